"""The ledger and the status in the run folder: in parts, whole on the disk; and deadlines that matter no more."""

import os
from pathlib import Path

import msgspec
import pytest

from broker.contract import BrokerStatus, LedgerEntry, NodeReport
from broker.delivery.deadlines import HEAP_SLACK, Deadlines
from broker.delivery.state import DeliveryState
from broker.journal import run_folder
from broker.journal.run_folder import LINES, StatusFiles
from common.rollouts import GroupMeta, Task
from tests.broker_rig import new_state, numbered_state, run_info

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
    state.register(NodeReport("n0", 1, "host", "generating", 1000))
    state.offer([Task(serial, b"{}", 0, 4) for serial in range(tasks)])
    for i, lease in enumerate(state.lease("n0", 1000, tasks - 10)):
        if i % 7:
            state.complete("n0", lease.token, GroupMeta(0, 0, 0.5, 4), b"group", 5)
        else:
            state.fail("n0", lease.token, "broken")
    state.take(0, STEP)
    state.commit(0)
    return state


def ledger_in(folder: Path) -> list[LedgerEntry]:
    return msgspec.json.decode((folder / "ledger.json").read_bytes(), type=list[LedgerEntry])


@pytest.mark.parametrize("tasks", [STEP + 50, LINES, LINES + 1, 5 * LINES + 3])
def test_a_ledger_in_parts_is_the_whole_ledger(tmp_path: Path, tasks: int) -> None:
    state = state_with(tasks)
    StatusFiles(tmp_path, state).write()
    assert ledger_in(tmp_path) == state.ledger()
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=BrokerStatus) == state.status()
    assert sorted(os.listdir(tmp_path)) == ["ledger.json", "status.json"]


def test_an_empty_ledger_is_an_empty_list(tmp_path: Path) -> None:
    StatusFiles(tmp_path, new_state()).write()
    assert ledger_in(tmp_path) == []


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


def test_a_disk_that_takes_no_snapshot_stops_nobody_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(1e-6)
    taken = StatusFiles(tmp_path, state_with(2 * LINES), clock)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder.AtomicFile, "write", lambda self, data: (_ for _ in ()).throw(OSError(28, "full")))
        taken.tick()
    assert "status not written" in caplog.text
    assert os.listdir(tmp_path) == []
    clock.now_s += 2 * run_folder.STATUS_S
    taken.tick()
    assert len(ledger_in(tmp_path)) == 2 * LINES


def test_deadlines_of_leases_that_ended_do_not_pile_up() -> None:
    deadlines = Deadlines()
    deadlines.add("kept", 5.0)
    for i in range(100 * HEAP_SLACK):
        deadlines.add(f"lease {i}", 60.0 + i)
        deadlines.discard(f"lease {i}")
    assert len(deadlines._heap) <= HEAP_SLACK + 4  # pyright: ignore[reportPrivateUsage]
    assert list(deadlines.passed(1e9, lambda key: 5.0)) == ["kept"]


def test_a_lease_that_ends_is_no_longer_watched() -> None:
    state = state_with(4 * HEAP_SLACK)
    watched = state.lease_deadlines
    assert len(watched._heap) <= 2 * HEAP_SLACK  # pyright: ignore[reportPrivateUsage]
