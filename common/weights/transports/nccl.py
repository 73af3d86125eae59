"""Broadcasts over NCCL between the devices of learner and nodes, with communicators that never block.

A collective between devices may never end when a member is gone. So one thread of a DeviceGroup makes all calls, and
asks the library again and again whether it is through. At the deadline the caller continues, and the thread aborts the
communicator, also one that is still forming, which frees the devices of the survivors. The contract suite runs all of
DeviceGroup over gloo, with the CPU as the device.

Not vLLM's NCCL weight-transfer engine: that one receives into the live parameters while generation stands still, and
knows neither a deadline nor a version. Here buckets are staged and verified first, as with every transport. Not torch's
process group either: it waits for a group to form under the lock that its abort needs.
"""

import ctypes
import functools
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import psutil
import torch

from common.errors import UsageError
from common.process.versions import versions
from common.weights.transports.groups import ROOT, RelayedStore, dist
from common.weights.wire.failures import GivenUp, GroupFailed, Late
from common.weights.wire.messages import Epoch

logger = logging.getLogger(__name__)

LOOK_S = 0.02  # a wait notices within this time that the group was closed
PAUSES_S = 1e-4, 2e-3  # the shortest and the longest of the thread that asks; each is a tenth longer than the last


def own_stream(device: torch.device | None, purpose: str = "") -> AbstractContextManager[object]:
    """Lets what this thread asks of `device` not wait for what the others have asked for.

    A `purpose` has the same stream each time, because torch uses freed memory again only on the stream that had it.
    """
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(_stream_for(purpose, device) if purpose else torch.cuda.Stream(device))


@functools.cache
def _stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Communicator(Protocol):
    """A library's group, from when it begins to form; its calls wait for no other member."""

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Begin to bring rank 0's bytes into everyone's device `buffer` [n] uint8."""

    def pending(self) -> bool:
        """Whether forming, or the broadcast begun last, is under way; raises when it failed."""
        ...

    def abort(self) -> None:
        """Give up what is under way, and free all that the communicator has."""


class DeviceGroup:
    """A BroadcastGroup on `device`; only buckets that are elsewhere pass through a bounce buffer there."""

    def __init__(self, epoch: Epoch, form: Callable[[Epoch], Communicator], device: torch.device) -> None:
        """Meet the others, at most `epoch.timeout_s`, or raise RuntimeError; the group's thread calls `form`."""
        self._is_root = epoch.rank == ROOT
        self._device = device
        self._bounce = torch.empty(0, dtype=torch.uint8, device=device)
        self._communicator: Communicator | None = None
        self._closing = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="device-broadcasts").start()

        def connect() -> None:
            self._communicator = form(epoch)
            self._finish(self._communicator)
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # libraries connect at their first use

        self._wait(self._call(connect), epoch.timeout_s, f"epoch {epoch.epoch} did not form")

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        done = self._call(lambda: self._cross(bucket))
        return lambda: self._wait(done, timeout_s, "a broadcast did not finish")

    def close(self) -> None:
        """Drop the group; its thread aborts what is under way."""
        self._closing.set()
        self._calls.put(None)

    def _cross(self, bucket: torch.Tensor) -> None:
        if self._closing.is_set():
            return  # posted behind one that failed: its communicator is being aborted
        if bucket.device == self._device:
            self._broadcast(bucket)
            return
        if self._bounce.numel() < bucket.numel():
            self._bounce = torch.empty(bucket.numel(), dtype=torch.uint8, device=self._device)
        buffer = self._bounce[: bucket.numel()]
        if self._is_root:
            buffer.copy_(bucket)
        self._broadcast(buffer)
        if not self._is_root and not self._closing.is_set():
            bucket.copy_(buffer)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        assert self._communicator is not None
        self._communicator.broadcast(buffer)
        self._finish(self._communicator)

    def _finish(self, communicator: Communicator) -> None:
        pause_s, longest_s = PAUSES_S
        while communicator.pending():
            if self._closing.is_set():
                raise GivenUp("the group was closed")
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, longest_s)

    def _call(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done

    def _wait(self, done: Future[None], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._closing.is_set():
                raise GivenUp("the group was closed")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.close()
                raise Late(f"{what} within {timeout_s:g} s; its communicator was aborted")
            try:
                return done.result(min(left_s, LOOK_S))
            except TimeoutError:
                continue  # the call's own errors are RuntimeErrors
            except RuntimeError:
                self.close()
                raise

    def _work(self) -> None:
        with own_stream(self._device):
            while (item := self._calls.get()) is not None:
                call, done = item
                try:
                    call()
                except Exception as error:  # the library's errors are raised where the call is waited for
                    done.set_exception(error if isinstance(error, RuntimeError) else GroupFailed(str(error)))
                else:
                    done.set_result(None)
            try:
                if self._communicator is not None:
                    self._communicator.abort()
            except Exception:  # no caller waits for it
                logger.exception("a communicator could not be aborted")


# From nccl.h. A config of version 2.14, the first with `blocking`, is one that every later library reads.
IN_PROGRESS, UINT8, MAGIC, CONFIG_VERSION = 7, 1, 0xCAFEBEEF, 21400
PORT_AT = 10  # in a unique id: 8 bytes of a random number, then a sockaddr
KEY = "nccl"  # of the unique id, in the store where the members meet


class UniqueId(ctypes.Structure):
    """ncclUniqueId: where rank 0 waits for the others."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class CommunicatorConfig(ctypes.Structure):
    """The first fields of ncclConfig_t."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int)
    ]  # fmt: skip


@functools.cache
def library() -> Any:
    """The NCCL that torch has loaded; raises UsageError for a torch without one, or with one inside."""
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError:
        raise UsageError(
            "weights.transport: nccl needs a torch that brings NCCL as a library of its own, libnccl.so.2; "
            "this one does not; use gloo"
        ) from None
    number, pointer = ctypes.c_int, ctypes.c_void_p
    config = ctypes.POINTER(CommunicatorConfig)
    found.ncclCommInitRankConfig.argtypes = [ctypes.POINTER(pointer), number, UniqueId, number, config]
    found.ncclBroadcast.argtypes = [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer]
    found.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(number)]
    found.ncclCommAbort.argtypes = found.ncclGetLastError.argtypes = [pointer]
    found.ncclGetErrorString.restype = found.ncclGetLastError.restype = ctypes.c_char_p
    return found


def require_device() -> None:
    """Raises UsageError when this machine has no device for NCCL, or no NCCL, or lets it block."""
    if not torch.cuda.is_available():
        raise UsageError("weights.transport: nccl needs a CUDA device on learner and nodes; found none; use gloo")
    if os.environ.get("NCCL_COMM_BLOCKING") == "1":  # it overrides what a communicator asks for: init.cc of NCCL
        why = "a call would wait for ever for a node that is gone"
        raise UsageError(f"weights.transport: nccl needs NCCL_COMM_BLOCKING unset, found 1: {why}; unset it")
    library()


def shared_versions() -> dict[str, str]:
    """Versions that all members of a group must share: NCCL refuses others, and ours decides what is sent when."""
    return {"nccl": loaded_version(), "slipstream": versions()["slipstream"]}


def loaded_version() -> str:
    """Version of the NCCL library in this process; '' without one.

    torch.cuda.nccl.version() is the version that torch was compiled with, whatever library was loaded.
    """
    if not dist.is_nccl_available():
        return ""
    code = ctypes.c_int()
    try:
        library().ncclGetVersion(ctypes.byref(code))
    except UsageError:
        return ""
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
    """A communicator of the epoch's members, on the remembered CUDA device, else on the current one."""

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        """Meet the other members; raises UsageError without a CUDA device, RuntimeError when someone does not come."""
        require_device()
        device = _device if _device is not None else torch.device("cuda", torch.cuda.current_device())
        super().__init__(epoch, lambda epoch: NcclCommunicator(epoch, store, device), device)


class NcclCommunicator:
    """A Communicator of NCCL's nonblocking kind; one thread uses it."""

    def __init__(self, epoch: Epoch, store: RelayedStore, device: torch.device) -> None:
        torch.cuda.set_device(device)  # the current device is a thread's own
        self._nccl = library()
        self._communicator = ctypes.c_void_p()
        self._listener: socket.socket | None = None
        self._done: Any = None  # an event behind what was begun
        try:
            unique = self._mint(store) if epoch.rank == ROOT else UniqueId.from_buffer_copy(store.get(KEY))
            config = CommunicatorConfig(CommunicatorConfig.blocking.offset + 4, MAGIC, CONFIG_VERSION, blocking=0)
            made = ctypes.byref(self._communicator)
            asked = ctypes.byref(config)
            self._check(self._nccl.ncclCommInitRankConfig(made, epoch.world_size, unique, epoch.rank, asked))
        except BaseException:
            self.abort()
            raise

    def broadcast(self, buffer: torch.Tensor) -> None:
        at = buffer.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        self._done = None
        self._check(self._nccl.ncclBroadcast(at, at, buffer.numel(), UINT8, ROOT, self._communicator, stream))

    def pending(self) -> bool:
        state = ctypes.c_int()
        self._check(self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        self._check(state.value)
        if state.value == IN_PROGRESS:
            return True
        if self._done is None:  # only now is all of it in the stream
            self._done = torch.cuda.current_stream().record_event()
            self._stop_listening()
        return not self._done.query()

    def abort(self) -> None:
        self._stop_listening()
        self._nccl.ncclCommAbort(self._communicator)
        self._communicator = ctypes.c_void_p()

    def _mint(self, store: RelayedStore) -> UniqueId:
        """A new unique id, which the others get. NCCL then listens in a thread until every member has come."""
        unique = UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        self._listener = listener(struct.unpack_from(">H", unique, PORT_AT)[0])
        store.set(KEY, bytes(unique))
        return unique

    def _stop_listening(self) -> None:
        """End NCCL's listening thread, which nothing in NCCL ends when a member never comes."""
        if self._listener is not None:
            with self._listener, suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener = None

    def _check(self, code: int) -> None:
        if code not in (0, IN_PROGRESS):
            said = [self._nccl.ncclGetErrorString(code), self._nccl.ncclGetLastError(None)]
            raise GroupFailed(f"NCCL: {'; '.join(text.decode(errors='replace') for text in said if text)}")


def listener(port: int) -> socket.socket | None:
    """A second handle of the socket with which this process listens at `port`."""
    known = psutil.Process().net_connections("tcp")
    found = next((one.fd for one in known if one.status == psutil.CONN_LISTEN and one.laddr.port == port), None)
    return None if found is None else socket.socket(fileno=os.dup(found))
