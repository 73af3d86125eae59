"""Broadcasts over NCCL between the devices of learner and nodes, through torch's process group.

Not vLLM's NCCL weight-transfer engine: that one receives into the live parameters while generation stands still, and
knows neither a deadline nor a version. Here buckets are staged and verified first, as with every transport.
"""

import ctypes
import datetime
import os
from collections.abc import Mapping
from typing import Any

import torch

from common.errors import UsageError
from common.process.versions import versions
from common.weights.collectives import Meeting, dist, from_root
from common.weights.messages import Epoch
from common.weights.transports.device import DeviceGroup

NEVER = datetime.timedelta(days=1)  # torch's own watchdog would end the process; the deadlines here are DeviceGroup's
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # "0": an error of one communicator is not the end of the process


def require_device() -> None:
    """Raises UsageError when this machine has no device for NCCL."""
    if not torch.cuda.is_available():
        raise UsageError("weights.transport: nccl needs a CUDA device on learner and nodes; found none; use gloo")
    if not hasattr(dist, "ProcessGroupNCCL"):
        raise UsageError("weights.transport: nccl needs a torch that is built with NCCL; this one is not; use gloo")


def shared_versions() -> dict[str, str]:
    """Versions that all members of a group must share: NCCL refuses others, and ours decides what is sent when."""
    return {"nccl": loaded_version(), "slipstream": versions()["slipstream"]}


def loaded_version() -> str:
    """Version of the NCCL library in this process; '' for a torch without NCCL.

    torch.cuda.nccl.version() is the version that torch was compiled with, whatever library was loaded.
    """
    if not dist.is_nccl_available():
        return ""
    code = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))  # torch has loaded it already
    except OSError:  # a torch that has NCCL inside
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def mismatch(node: Mapping[str, str]) -> str:
    """The shared versions that a node has otherwise than this process, both named; '' if none."""
    ours = {name: version for name, version in shared_versions().items() if node.get(name) != version}
    other = [f"{name} {node.get(name) or 'none'}, and the learner {ours[name] or 'none'}" for name in ours]
    return f"weights.transport is nccl; this node has {'; '.join(other)}" if other else ""


_device: torch.device | None = None


def remember_device() -> torch.device:
    """Let groups that other threads form use this thread's CUDA device, which it returns; the CPU where there is none.

    Each thread has a current device of its own.
    """
    global _device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    _device = torch.device("cuda", torch.cuda.current_device())
    return _device


class NcclGroup(DeviceGroup):
    """ProcessGroupNCCL of the epoch's members, on the remembered CUDA device, else on the current one."""

    def __init__(self, epoch: Epoch, meeting: Meeting) -> None:
        """Meet the other members; raises UsageError without a CUDA device, RuntimeError when someone does not come."""
        require_device()
        device = _device if _device is not None else torch.device("cuda", torch.cuda.current_device())
        super().__init__(epoch, lambda epoch: NcclCommunicator(epoch, meeting, device), device)


class NcclCommunicator:
    """A Communicator; used by DeviceGroup's thread, `abort` by another."""

    def __init__(self, epoch: Epoch, meeting: Meeting, device: torch.device) -> None:
        torch.cuda.set_device(device)  # the current device is a thread's own
        self._meeting = meeting  # the group's threads may ask it later
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NEVER
        before = os.environ.get(HANDLING)
        os.environ[HANDLING] = "0"  # read when a group is made, and by this one only
        try:
            self._group: Any = dist.ProcessGroupNCCL(meeting, epoch.rank, epoch.world_size, options)
        finally:
            if before is None:
                del os.environ[HANDLING]
            else:
                os.environ[HANDLING] = before

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._group.broadcast([buffer], from_root()).wait()
        torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        self._group.abort()
