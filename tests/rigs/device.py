"""The device that tests of the learner and of the weight plane run on, and how exactly it computes in float32.

`python -m tests.rigs.device` prints how fast the device is: `Pace` as JSON, which `slipstream selftest` asks for.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from common.config.parallel_layout import PLAIN
from tests.rigs.processes import ROOT

CUDA = torch.cuda.is_available()
# Transformer Engine multiplies float32 as TF32.
TF32 = CUDA and find_spec("transformer_engine") is not None and not os.environ.get(PLAIN)
# Tolerances are for the CPU. CUDA sums in another order.
LOOSE = 1000.0 if TF32 else 10.0 if CUDA else 1.0
PACE = "SLIPSTREAM_TEST_PACE"  # a Pace that was measured already
PROBE_S = 150.0
REDUCED = 20
RANKS = int(os.environ.get("SLIPSTREAM_TEST_RANKS", "8"))  # the largest world of the layouts that are tried


def sharing(name: object) -> dict[str, str]:
    """Variables of one of several processes that use one GPU.

    NCCL takes two ranks of one host and device for a mistake, and believes in two hosts when their ids differ.
    """
    return {"NCCL_HOSTID": str(name), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def rank_environment(rank: int, ranks: int, devices: int) -> dict[str, str]:
    """Variables of one of `ranks` local ranks; without `devices` all compute on the CPU."""
    found = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % max(1, devices))}
    return found | (sharing(rank) if 0 < devices < ranks else {})


class OnDevice(torch.Tensor):
    """Host memory that says that it is a GPU's, for tests without one: its copies to the host go through `STREAM`."""

    is_cuda = True
    is_cpu = False
    device = torch.device("cuda", 3)

    def cpu(self) -> NoReturn:
        raise AssertionError("a copy to new memory")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and not isinstance(args[0], OnDevice):
            return STREAM.copy(args[0], args[1].as_subclass(torch.Tensor), **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class Stream:
    """Makes copies in order: at once (`early`), or when the caller waits for them."""

    def __init__(self) -> None:
        self.early = False
        self.blocking = self.waits = 0  # copies that blocked, and waits for the whole stream
        self._asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self._asked.append((target, source.clone()))  # later work of the stream may overwrite the source
        self.blocking += not non_blocking
        if self.early or not non_blocking:
            self._make(len(self._asked))
        return target

    def record_event(self) -> SimpleNamespace:
        count = len(self._asked)
        return SimpleNamespace(synchronize=lambda: self._make(count))

    def synchronize(self) -> None:
        self.waits += 1
        self._make(len(self._asked))

    def _make(self, count: int) -> None:
        for target, source in self._asked[self._made : count]:
            target.copy_(source)
        self._made = max(self._made, count)


STREAM = Stream()


@dataclass(frozen=True)
class Pace:
    """Limits of tests that need a device follow from it."""

    joined_s: float  # two new processes: the import of torch, their contexts on the device, a group, a sum
    reduced_s: float  # one more sum over the two of them


@functools.cache
def pace() -> Pace:
    """That of this machine, measured once per process unless the environment has it."""
    if found := os.environ.get(PACE):
        return Pace(**json.loads(found))
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.rigs.device", f"{folder}/store"]
        two = [subprocess.Popen([*command, str(n)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for n in range(2)]
        try:
            said = [rank.communicate(timeout=PROBE_S)[0] for rank in two]
        finally:
            for rank in two:
                rank.kill()
        joined_s = time.monotonic() - began
    if any(rank.returncode for rank in two):
        raise RuntimeError("two processes could not sum a number on this machine's device")
    reduced_s = max(float(text.split()[-1]) for text in said)
    return Pace(joined_s - REDUCED * reduced_s, reduced_s)


def _join(store: str, rank: int) -> None:
    """One of the two processes of the probe; prints the seconds of a sum."""
    os.environ |= rank_environment(rank, 2, torch.cuda.device_count())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    backend = "nccl" if CUDA else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    number = torch.ones(1, device=device)
    torch.distributed.all_reduce(number)
    began, sums = time.monotonic(), [number.item()]
    for _ in range(REDUCED):
        torch.distributed.all_reduce(number)
        sums.append(number.item())
    print((time.monotonic() - began) / REDUCED)
    assert sums[:2] == [2.0, 4.0]
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _join(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(asdict(pace())))
