"""Workers of one engine: all of them hear of a failure of one, and they share the staged version's memory."""

import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from common.weights.transports.groups import dist
from common.weights.wire import flat_buffer
from common.weights.wire.flat_buffer import pinned
from rollout_fleet.weights.tensor_parallel import EngineWorkers, SharedBuffers, attach
from tests.rigs import processes
from tests.rigs.waiting import LIMIT_S

SIZE = 4096 + 7


class Workers:
    """Two ranks with a real gloo group, each in a thread of its own."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def group(self, rank: int) -> Any:
        gloo = dist.ProcessGroupGloo(self.store, rank, 2, timedelta(seconds=LIMIT_S))
        return SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=gloo)

    def both(self, work: Any) -> list[str]:
        def run(rank: int) -> str:
            try:
                work(EngineWorkers(self.group(rank), torch.device("cpu")))
            except (ValueError, RuntimeError) as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, range(2)))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_worker_that_cannot_load_its_shard_keeps_no_other_waiting(bad: int) -> None:
    found = Workers().both(lambda ranks: ranks.agree(RuntimeError("no memory") if ranks.rank == bad else None))
    assert found[bad] == "no memory"
    assert re.findall(r"\d", found[1 - bad]) == ["1", "2"]


def test_a_version_that_is_not_staged_is_refused_on_every_worker() -> None:
    found = Workers().both(lambda ranks: ranks.take(0, 7, 128))
    assert len(found) == 2 and all("version 7" in text for text in found)


def test_a_staged_version_is_the_same_memory_on_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def work(ranks: EngineWorkers) -> None:
        if ranks.receives:
            flat = ranks.buffers.allocate(128)
            flat[3] = 9
            monkeypatch.setattr(ranks.receiver, "take", lambda incarnation, version: flat)
        seen.append(ranks.take(0, 1, 128))
        ranks.agree(None)

    assert Workers().both(work) == ["", ""]
    assert [int(flat[3]) for flat in seen] == [9, 9]


def test_the_memory_of_the_last_version_stays_mapped_and_another_buffer_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []

    def work(ranks: EngineWorkers) -> None:
        first = ranks.buffers.allocate(SIZE) if ranks.receives else None
        for mark, size, again in ((1, SIZE, True), (2, SIZE, True), (3, SIZE, False), (4, 2 * SIZE, False)):
            if ranks.receives:
                first = first if again else ranks.buffers.allocate(size)
                first[3] = mark
                monkeypatch.setattr(ranks.receiver, "take", lambda incarnation, version, flat=first: flat)
            flat = ranks.take(0, mark, size)
            assert int(flat[3]) == mark
            if not ranks.receives:
                seen.append((flat.data_ptr(), len(flat)))
            del flat
            ranks.agree(None)
        ranks.forget()
        assert ranks._mapped is None

    assert Workers().both(work) == ["", ""]
    assert seen[0] == seen[1] and [size for _, size in seen] == [SIZE, SIZE, SIZE, 2 * SIZE]


def double(pipe: Connection) -> None:
    """Map what is told, say its sum, and write into it."""
    flat = attach(pipe.recv_bytes().decode(), SIZE)
    pipe.send_bytes(str(int(flat.sum())).encode())
    flat[0] = 9
    pipe.send_bytes(b"written")


@pytest.mark.slow
def test_another_process_maps_the_same_memory() -> None:
    buffers = SharedBuffers()
    flat = buffers.allocate(SIZE)
    assert flat.shape == (SIZE,) and not flat.any()
    flat[5] = 7
    ours, theirs = processes.context().Pipe()
    child = processes.start(double, theirs)
    ours.send_bytes(buffers.path(flat).encode())
    assert ours.recv_bytes() == b"7"
    assert ours.recv_bytes() == b"written" and int(flat[0]) == 9
    child.join(LIMIT_S)


def test_a_buffer_that_is_gone_cannot_be_mapped_and_holds_no_descriptor() -> None:
    buffers = SharedBuffers()
    flat = buffers.allocate(SIZE)
    path = buffers.path(flat)
    assert torch.equal(attach(path, SIZE), flat)
    del flat
    gc.collect()
    with pytest.raises(RuntimeError):
        attach(path, SIZE)


class CudaRuntime:
    """The page-locking of torch.cuda.cudart(), on a machine that allows it or not."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.locked = refuses, dict[int, int]()
        self.unlocked = 0  # calls

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.locked[address] = size
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        self.unlocked += 1
        return 0 if self.locked.pop(address, None) else 1


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, runtime: CudaRuntime) -> tuple[list[torch.device], Mock]:
    """Let this machine have a GPU; (devices that became the current one, torch.zeros, which reports an error)."""
    current: list[torch.device] = []
    reported = Mock(side_effect=RuntimeError("CUDA error: operation not supported"))
    monkeypatch.setattr(torch, "zeros", reported)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    return current, reported


@pytest.mark.parametrize("refuses", [False, True])
def test_on_a_gpu_staged_versions_are_page_locked_while_they_exist(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: bool
) -> None:
    runtime, device = CudaRuntime(refuses), torch.device("cuda", 1)
    current, reported = on_a_gpu(monkeypatch, runtime)
    flat_buffer._log_refusal.cache_clear()
    alone = EngineWorkers(SimpleNamespace(rank_in_group=0, world_size=1), device)
    first = EngineWorkers(SimpleNamespace(rank_in_group=0, world_size=2), device)
    flats = [alone.receiver._allocate(SIZE), first.receiver._allocate(SIZE)]
    other = pinned(attach(first.buffers.path(flats[1]), SIZE), device)
    expected = {flat.data_ptr(): SIZE for flat in (*flats, other)}
    assert runtime.locked == ({} if refuses else expected) and current == [device] * 3
    assert reported.call_count == (3 if refuses else 0), "else a later call would report that"
    assert [record.message[-14:] for record in caplog.records] == (["(CUDA error 1)"] if refuses else [])
    del flats, other
    gc.collect()
    assert runtime.locked == {}


def test_a_forked_child_unlocks_nothing_and_an_error_of_unlocking_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, device = CudaRuntime(refuses=False), torch.device("cuda", 1)
    flats = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    _, reported = on_a_gpu(monkeypatch, runtime)
    assert [pinned(flat, device).shape for flat in flats] == [(SIZE,)] * 2
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        flats.pop()
    assert len(runtime.locked) == 2 and runtime.unlocked == 0
    runtime.locked.clear()
    flats.pop()
    assert runtime.unlocked == reported.call_count == 1


def test_other_workers_lock_what_a_flip_mapped_after_it_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, buffers = CudaRuntime(refuses=False), SharedBuffers()
    flat = buffers.allocate(SIZE)
    on_a_gpu(monkeypatch, runtime)
    other = EngineWorkers(SimpleNamespace(rank_in_group=1, world_size=2), torch.device("cuda", 1))
    mapped = other._attached(buffers.path(flat), SIZE)
    assert runtime.locked == {}, "generation would stand still for it"
    other.lock()
    assert runtime.locked == {mapped.data_ptr(): SIZE}
    runtime.locked.clear()
    other._attached(buffers.path(flat), SIZE)
    other.lock()
    assert runtime.locked == {}
    other.forget()


def test_without_a_gpu_nothing_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA was asked"))
    flat = torch.zeros(SIZE, dtype=torch.uint8)
    assert pinned(flat, torch.device("cpu")) is flat
