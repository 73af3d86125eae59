"""The ledger and the status in the run folder: in parts, whole on the disk, at once after a commit, and cheap."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from broker.client.connection import BrokerClient
from broker.contract import BrokerStatus, LedgerEntry, NodeReport
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.journal import run_folder
from broker.journal.recovery import OpenedState
from broker.journal.run_folder import LINES, RunFolder, StatusFiles
from broker.server import server as server_module
from common.rollouts import GroupMeta, Task
from tests.rigs.brokers import new_state, numbered_state, run_info, serving
from tests.rigs.waiting import LIMIT_S, until

STEP = 50


class Clock:
    """Seconds that pass only when they are looked at."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def state_with(tasks: int) -> DeliveryState:
    """Committed, dead, ready and pending tasks."""
    state = numbered_state(run_info(groups_per_step=STEP, max_staleness=1000, max_attempts=1))
    NodeRules(state).register(NodeReport("n0", 1, "host", "generating", 1000))
    LearnerRules(state).offer([Task(serial, b"{}", 0, 4) for serial in range(tasks)])
    for i, lease in enumerate(NodeRules(state).lease("n0", 1000, tasks - 10)):
        if i % 7:
            NodeRules(state).complete("n0", lease.token, GroupMeta(0, 0, 0.5, 4), b"group", 5)
        else:
            NodeRules(state).fail("n0", lease.token, "broken")
    LearnerRules(state).take(0, STEP)
    LearnerRules(state).commit(0)
    return state


def ledger_in(folder: Path) -> list[LedgerEntry]:
    return msgspec.json.decode((folder / "ledger.json").read_bytes(), type=list[LedgerEntry])


@pytest.mark.parametrize("tasks", [0, STEP + 50, LINES, LINES + 1, 5 * LINES + 3])
def test_a_ledger_in_parts_is_the_whole_ledger(tmp_path: Path, tasks: int) -> None:
    state = state_with(tasks) if tasks else new_state()
    StatusFiles(tmp_path, state).write()
    assert ledger_in(tmp_path) == state.ledger()
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=BrokerStatus) == state.status()
    assert sorted(os.listdir(tmp_path)) == ["ledger.json", "status.json"]


def test_a_long_ledger_keeps_no_turn_of_the_loop_for_longer_than_a_part(tmp_path: Path) -> None:
    state = state_with(20 * LINES)
    taken = StatusFiles(tmp_path, state, Clock(run_folder.PART_S / 4))
    ticks = 0
    while not (tmp_path / "ledger.json").exists():
        taken.tick()
        ticks += 1
        assert ticks < 100
    assert ticks >= 4
    assert ledger_in(tmp_path) == state.ledger()


def test_the_former_ledger_stays_until_the_next_is_complete_and_the_last_one_waits_for_nothing(tmp_path: Path) -> None:
    state = state_with(4 * LINES)
    taken = StatusFiles(tmp_path, state, Clock(run_folder.PART_S))
    (tmp_path / "ledger.json").write_text("[]")
    taken.tick()
    assert ledger_in(tmp_path) == []
    taken.write()
    assert ledger_in(tmp_path) == state.ledger()
    assert sorted(os.listdir(tmp_path)) == ["ledger.json", "status.json"], "the unfinished one is gone"


def test_the_last_files_are_on_the_disk_when_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    files = StatusFiles(tmp_path, state_with(3 * STEP))
    files.tick()
    assert not synced
    files.write()
    assert synced


class Killed(BaseException):
    """The process ends here."""


def test_a_broker_that_is_killed_while_it_writes_its_last_ledger_has_written_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger of millions of tasks takes longer than `up` waits. The next broker removes the rest of it."""
    remembered: list[tuple[str, int]] = []
    leading: Any = SimpleNamespace(
        term=SimpleNamespace(lapsed=False), remember=lambda *pointer: remembered.append(pointer)
    )
    store = SimpleNamespace(listens_at=lambda address: None)
    state = state_with(3 * STEP)
    opened = OpenedState(state, cast(Any, SimpleNamespace(acknowledged=7, store=store)))
    folder = RunFolder(tmp_path, leading)
    folder.begin(opened, "tcp://127.0.0.1:1")

    def line(serial: int) -> LedgerEntry:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(state.tasks, "line", line)
        folder.finish()
    cast(Any, folder._status_files)._file._file.close()
    assert remembered == [("tcp://127.0.0.1:1", 7)]
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=BrokerStatus) == state.status()
    (tmp_path / ".status.json.abcdefgh").touch()
    assert len(list(tmp_path.glob(".ledger.json.*"))) == 1
    RunFolder(tmp_path, leading).begin(opened, "tcp://127.0.0.1:2")
    assert sorted(os.listdir(tmp_path)) == ["broker.json", "events.jsonl", "status.json"]


def test_what_was_committed_is_on_disk_at_once(tmp_path: Path) -> None:
    state = state_with(3 * STEP)
    taken = StatusFiles(tmp_path, state)
    taken.tick()
    assert LearnerRules(state).take(1, STEP) is not None
    LearnerRules(state).commit(1)
    taken.tick()  # much sooner than the next snapshot is due
    assert ledger_in(tmp_path) == state.ledger()


def test_the_cost_of_snapshots_does_not_grow_with_the_number_of_commits(tmp_path: Path) -> None:
    now_s, written_at = 0.0, list[float]()

    class Slow(StatusFiles):
        def go_on(self, until: float, sync: bool = False) -> bool:
            nonlocal now_s
            written_at.append(now_s)
            now_s += 0.01
            return True

    state = new_state()
    snapshots = Slow(tmp_path, state, lambda: now_s)
    for step in range(10_000):
        state.committed_step = step
        snapshots.tick()
        now_s += 0.01
    assert 0.01 * len(written_at) < 0.015 * now_s
    assert max(later - sooner for sooner, later in itertools.pairwise(written_at)) < 6


def test_the_server_looks_after_every_turn_whether_something_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)
    turns: list[None] = []
    with (
        serving(on_tick=lambda: turns.append(None)) as server,
        BrokerClient(server.address, deadline_s=LIMIT_S) as client,
    ):
        for _ in range(20):
            before = len(turns)
            client.status()
            until(lambda: len(turns) > before, "the end of the turn of a request")  # noqa: B023
