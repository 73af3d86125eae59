"""Workers of one engine: what one of them cannot do, all of them hear."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from rollout_fleet.weights.tensor_parallel import Ranks

_dist: Any = distributed
WAIT_S = 300


class Workers:
    """Two ranks with a real gloo group, each in a thread of its own."""

    def __init__(self) -> None:
        self.store = _dist.HashStore()
        self.place: Any = None
        self.said = threading.Event()

    def group(self, rank: int) -> Any:
        gloo = _dist.ProcessGroupGloo(self.store, rank, 2, timedelta(seconds=WAIT_S))
        return SimpleNamespace(
            rank_in_group=rank,
            world_size=2,
            cpu_group=gloo,
            broadcast_object=lambda said, src: self.broadcast(rank, said),
        )

    def broadcast(self, rank: int, said: Any) -> Any:
        if rank == 0:
            self.place = said
            self.said.set()
        assert self.said.wait(WAIT_S)
        return self.place

    def both(self, work: Any) -> list[str]:
        def run(rank: int) -> str:
            try:
                work(Ranks(self.group(rank)))
            except (ValueError, RuntimeError) as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, range(2)))


def test_all_go_on_when_all_have_loaded() -> None:
    assert Workers().both(lambda ranks: ranks.agree(None)) == ["", ""]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_worker_that_cannot_load_its_shard_keeps_no_other_waiting(bad: int) -> None:
    found = Workers().both(lambda ranks: ranks.agree(RuntimeError("no memory") if ranks.rank == bad else None))
    assert found[bad] == "no memory"
    assert found[1 - bad] == "1 of 2 workers could not load their shards"


def test_a_version_that_is_not_staged_is_refused_on_every_worker() -> None:
    found = Workers().both(lambda ranks: ranks.take(0, 7, 128))
    assert found == ["version 7 is not staged"] * 2


def test_a_staged_version_is_the_same_memory_on_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def work(ranks: Ranks) -> None:
        if ranks.receives:
            flat = ranks._buffers.allocate(128)
            flat[3] = 9
            monkeypatch.setattr(ranks.receiver, "take", lambda incarnation, version: flat)
        seen.append(ranks.take(0, 1, 128))
        ranks.agree(None)

    assert Workers().both(work) == ["", ""]
    assert [int(flat[3]) for flat in seen] == [9, 9]
