"""The store on a bad disk: cut, damaged, full, locked."""

import itertools
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.contract import BrokerStatus, LearnerReport, NodeReport
from broker.journal.file_store.frames import BLOCK
from broker.journal.store import PayloadUnreadable, StoreCorrupt, StoredPayload
from common.errors import UsageError
from common.rollouts import GroupMeta
from tests.unit.broker.durable_rig import Rig, files_may_not_grow_beyond, meta
from tests.waiting import until

MOVES = ("step", "offer", "lease", "fail", "commit", "regenerate")


def copied(path: Path, name: str) -> Path:
    target = path.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(path, target)


def newest(path: Path) -> Path:
    return max(path.glob("0*.log"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def what_is_known(rig: Rig) -> tuple[Any, ...]:
    return (
        [(e.serial, e.state, e.step) for e in rig.state.ledger()],
        rig.state.committed_step,
        set(rig.state.accepted),
    )


# -------------------------------------------------------------------- torn tails


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_store_cut_at_any_byte_is_a_prefix_with_all_that_was_acknowledged(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Each move is a turn of its own; what the store knew after each of them is remembered with the size it had."""
    home = tmp_path / "store"
    shutil.rmtree(home, ignore_errors=True)
    rig = Rig(home, "everysec")
    rig.begin()
    rig.settle()
    states = [(newest(home).stat().st_size, what_is_known(rig))]
    steps = itertools.count()
    for move in data.draw(st.lists(st.sampled_from(MOVES), max_size=8)):
        play(rig, move, steps)
        rig.settle()
        states.append((newest(home).stat().st_size, what_is_known(rig)))
    copy = copied(home, "copy")
    rig.close()
    first = states[0][0]
    for cut in data.draw(st.lists(st.integers(first, states[-1][0]), min_size=1, max_size=12, unique=True)):
        broken = copied(copy, "broken")
        os.truncate(newest(broken), cut)
        again = Rig(broken, "everysec")
        found = what_is_known(again)
        again.close()
        acknowledged = max(i for i, (size, _) in enumerate(states) if size <= cut)
        possible = [known for _, known in states[acknowledged : acknowledged + 2]]
        assert found == possible[0] or is_between(found, possible), f"cut at {cut}"


def is_between(found: tuple[Any, ...], possible: list[tuple[Any, ...]]) -> bool:
    """Whether what was found is somewhere on the way from one acknowledged state to the next."""
    (before, after) = possible
    return before[2] <= found[2] <= after[2] and before[1] <= found[1] <= after[1] and len(found[0]) >= len(before[0])


def play(rig: Rig, move: str, steps: Iterator[int]) -> None:
    if move == "step":
        number = next(steps)
        rig.offer(2)
        for lease in rig.lease(8):
            rig.complete(lease)
        rig.state.take(number, 2)
    elif move == "offer":
        rig.offer(1)
    elif move == "lease":
        rig.lease(1)
    elif move == "fail" and rig.state.tasks.leased:
        rig.state.fail("n0", next(iter(rig.state.tasks.leased)), "because")
    elif move == "commit" and rig.state.tasks.steps:
        rig.state.commit(min(rig.state.tasks.steps))
    elif move == "regenerate" and rig.state.tasks.steps:
        step = max(rig.state.tasks.steps)
        rig.state.regenerate(step, rig.state.tasks.steps[step][:1])


def test_a_torn_record_is_dropped_with_a_reason_and_an_event(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.step(0)
    rig.settle()
    known = what_is_known(rig)
    rig.offer(1)
    rig.settle()
    copy = copied(tmp_path / "store", "copy")
    rig.close()
    path = newest(copy)
    os.truncate(path, path.stat().st_size - BLOCK + 20)  # in the middle of the last record
    again = Rig(copy)
    assert what_is_known(again) == known
    torn = [e for e in again.events.after(-1) if e.kind == "store_torn"]
    assert [str(path) in e.detail["reason"] for e in torn] == [True]
    again.close()
    third = Rig(copy)
    assert what_is_known(third) == known
    assert third.found.torn == "", "what was dropped once is gone"
    third.close()


def test_a_snapshot_that_was_never_finished_leaves_the_one_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.step(0)
    rig.settle()
    known = what_is_known(rig)
    copy = copied(tmp_path / "store", "copy")
    rig.close()
    number = int(newest(copy).stem) + 1
    (copy / f"{number:08d}.log").write_bytes(newest(copy).read_bytes()[:100])
    again = Rig(copy)
    assert what_is_known(again) == known
    again.close()


# -------------------------------------------------------------------- damage


def test_damage_to_a_record_that_was_synced_is_an_error_with_file_and_offset(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.settle()
    path = newest(tmp_path / "store")
    middle = path.stat().st_size + 60
    for step in range(3):
        rig.step(step)
        rig.settle()
    copy = copied(tmp_path / "store", "copy")
    rig.close()
    flip(copy / path.name, middle)
    with pytest.raises(StoreCorrupt, match=r"is cut off or damaged; what the broker had acknowledged is") as error:
        Rig(copy)
    assert error.value.where.startswith(f"{copy / path.name}: byte ")
    assert middle - 200 < int(error.value.where.rpartition(" ")[2]) <= middle
    assert error.value.exit_code == 2


def test_damage_to_the_very_end_of_a_store_that_was_closed_is_noticed(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.step(0)
    rig.settle()
    at = newest(tmp_path / "store").stat().st_size - BLOCK + 10
    rig.close()
    flip(newest(tmp_path / "store"), at)
    with pytest.raises(StoreCorrupt):
        Rig(tmp_path / "store")


def test_a_damaged_group_is_refused_when_it_is_wanted_with_file_and_offset(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.step(0, size=5000)
    rig.settle()
    stored = rig.state.tasks.living[1].stored
    assert isinstance(stored, StoredPayload)
    location = stored.location
    rig.close()
    assert location is not None
    path = tmp_path / "store" / f"{location.segment:08d}.log"
    flip(path, location.offset + 777)
    again = Rig(tmp_path / "store")
    good, bad = (again.state.tasks.living[serial].payload for serial in (0, 1))
    assert isinstance(good, StoredPayload) and isinstance(bad, StoredPayload)
    assert good.read() == b"0." * 5000
    with pytest.raises(
        PayloadUnreadable, match=rf"{path.name}: byte {location.offset}: the stored group of 10000 bytes"
    ):
        bad.read()
    again.close()


def test_damage_to_the_history_of_finished_tasks_is_an_error(tmp_path: Path) -> None:
    for life in range(2):
        rig = Rig(tmp_path / "store")
        if life == 0:
            rig.begin()
            rig.step(0)
            rig.state.commit(0)
        rig.settle()
        rig.close()
    flip(tmp_path / "store" / "history.log", 60)
    with pytest.raises(StoreCorrupt, match=r"history\.log: byte 0: a record of finished tasks"):
        Rig(tmp_path / "store")


def test_padding_that_is_damaged_costs_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.settle()
    at = newest(tmp_path / "store").stat().st_size - 1
    rig.step(0)
    rig.settle()
    known = what_is_known(rig)
    rig.close()
    flip(newest(tmp_path / "store"), at)
    again = Rig(tmp_path / "store")
    assert what_is_known(again) == known
    again.close()


# -------------------------------------------------------------------- a full disk


def test_on_a_full_disk_nothing_is_acknowledged_and_nothing_is_lost(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.step(0)
    rig.settle()
    with files_may_not_grow_beyond(newest(tmp_path / "store").stat().st_size + BLOCK):
        before = rig.journal.acknowledged
        rig.step(1, size=50_000)
        wanted = rig.journal.end_turn()
        until(lambda: rig.journal.stuck, "a store that cannot be written")
        assert str(tmp_path / "store") in rig.journal.stuck
        assert before <= rig.journal.acknowledged < wanted
        copy = copied(tmp_path / "store", "copy")
    rig.settle()
    rig.wait_until_writable()
    known = what_is_known(rig)
    rig.close()
    again = Rig(tmp_path / "store")
    assert what_is_known(again) == known
    assert again.state.tasks.living[2].payload.read() == b"2." * 50_000  # type: ignore[attr-defined]
    again.close()
    crashed = Rig(copy)
    assert {s: state for s, state, _ in what_is_known(crashed)[0]}[0] == "taken"
    crashed.close()


def test_a_new_segment_waits_for_room_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store", segment_bytes=1 << 14)
    rig.begin()
    rig.settle()
    with files_may_not_grow_beyond(1 << 12):
        for step in range(3):
            rig.step(step, size=20_000)
            rig.journal.end_turn()
        until(lambda: rig.journal.stuck, "a store that cannot be written")
    rig.settle()
    known = what_is_known(rig)
    rig.close()
    again = Rig(tmp_path / "store")
    assert what_is_known(again) == known
    again.close()


# -------------------------------------------------------------------- who may write


def test_a_second_broker_is_kept_out_while_the_first_lives(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    with pytest.raises(UsageError, match=rf"already has a broker: process {os.getpid()} writes its store"):
        Rig(tmp_path / "store")
    rig.close()
    Rig(tmp_path / "store").close()


def test_a_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    Rig(tmp_path / "store").close()
    info = tmp_path / "store" / "store.json"
    info.write_bytes(info.read_bytes().replace(b'"schema":1', b'"schema":2'))
    with pytest.raises(UsageError, match=r"store\.json: schema 2, this release reads 1"):
        Rig(tmp_path / "store")


def test_a_store_without_its_identity_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Taken for an empty one, it would be written over: its checksums cannot be checked without the identity."""
    home = tmp_path / "store"
    rig = Rig(home)
    rig.begin()
    rig.step(0)
    rig.settle()
    rig.close()
    (home / "store.json").unlink()
    before = newest(home).read_bytes()
    with pytest.raises(UsageError, match=r"store\.json.*missing"):
        Rig(home)
    assert newest(home).read_bytes() == before


# -------------------------------------------------------------------- what survives


def test_leases_keep_their_tokens_and_get_a_fresh_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.offer(2)
    first, second = rig.lease()
    rig.complete(first)
    rig.settle()
    rig.close()
    again = Rig(tmp_path / "store")
    state = again.state
    assert state.tasks.leased[second.token].deadline > time.monotonic() + 9
    assert state.complete("n0", first.token, meta(), b"", 0), "accepted before: still true"
    assert state.complete("n0", second.token, meta(), b"late", 4)
    assert not state.complete("n0", "unknown", meta(), b"", 0)
    assert (state.store_id, state.attach(state.learner.report).next_serial) == (rig.info.store_id, 2)  # type: ignore[arg-type]
    again.close()


def test_a_lease_whose_answer_was_lost_with_the_broker_goes_back_at_once_and_counts_no_attempt(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.offer(3)
    heard, unheard, failed = rig.lease(3)
    rig.settle()
    rig.close()
    again = Rig(tmp_path / "store")
    state, node = again.state, NodeReport("n0", 1, "h", "generating", 0)
    state.fail("n0", failed.token, "because")
    assert state.heartbeat(node, [heard.token]).lost == []
    assert set(state.tasks.leased) == {heard.token}
    assert {e.serial: (e.state, e.attempts) for e in state.ledger()} == {
        0: ("leased", 1),
        1: ("pending", 0),
        2: ("pending", 1),
    }
    (lease,) = state.lease("n0", 1 << 20, 1)
    assert state.heartbeat(node, [heard.token]).lost == [], "a lease that was given since then is none of those"
    assert lease.token in state.tasks.leased
    assert not state.complete("n0", unheard.token, meta(), b"", 0)
    again.close()


@pytest.mark.parametrize("in_good_order", [True, False])
def test_nodes_drain_after_a_crash_at_the_end_of_a_job_and_not_when_a_job_that_ended_goes_on(
    tmp_path: Path, in_good_order: bool
) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.state.report(LearnerReport(1, 1, "done", 3))
    rig.settle()
    copy = copied(tmp_path / "store", "copy")
    rig.close()
    again = Rig(tmp_path / "store" if in_good_order else copy)
    reply = again.state.heartbeat(NodeReport("n0", 1, "h", "generating", 0), [])
    assert (reply.drain, reply.learner_incarnation) == (not in_good_order, 1)
    again.close()


def test_events_go_on_from_where_they_were(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.begin()
    rig.journal.end_turn()
    rig.settle()
    last = rig.events.next_index
    assert last > 0
    rig.close()
    again = Rig(tmp_path / "store")
    assert all(event.index >= last for event in again.events.after(-1))
    again.close()


def test_a_store_of_an_earlier_release_is_read_with_every_task_group_and_name(tmp_path: Path) -> None:
    """Two brokers of the release before moves recorded themselves wrote it; the second one was killed."""
    with tarfile.open(Path(__file__).parents[2] / "golden" / "store_schema_1.tar.gz") as archive:
        archive.extractall(tmp_path / "store", filter="data")
    rig = Rig(tmp_path / "store")
    state, tasks = rig.state, rig.state.tasks
    assert [(e.serial, e.state, e.step, e.attempts, e.filtered) for e in state.ledger()] == [
        *[(serial, "committed", serial // 2, 1, serial == 4) for serial in range(6)],
        (6, "pending", None, 2, False),
        (7, "taken", 3, 1, False),
        (8, "ready", None, 1, False),
        (9, "leased", None, 1, False),
        (10, "pending", None, 0, False),
    ]
    assert [tasks.living[serial].stored.read() for serial in (7, 8)] == [b"7." * 3, b"8." * 3]  # type: ignore[union-attr]
    retained = {step: [(e.serial, e.filtered) for e in entries] for step, entries in tasks.retained.items()}
    assert retained == {1: [(2, False), (3, False)], 2: [(4, True), (5, False)]}
    assert (state.committed_step, len(state.accepted), state.owners) == (2, 9, {"n0": "K" * 40})
    assert (tasks.living[6].reason, tasks.living[6].failed_by) == ("because", ["n0"])
    assert state.fleet.nodes["n0"].tokens == set(tasks.leased)
    rig.close()


@pytest.mark.parametrize("seconds", [-1.0, 1e300])
def test_seconds_that_a_node_made_up_leave_neither_store_nor_status_unreadable(tmp_path: Path, seconds: float) -> None:
    home = tmp_path / "store"
    rig = Rig(home)
    rig.begin()
    rig.offer(2)
    for lease in rig.lease():
        assert rig.state.complete("n0", lease.token, GroupMeta(0, 0, 0.5, 1 << 53, 0, seconds), b"g", 1)
    assert rig.state.take(0, 2) is not None
    rig.state.filter(0, [0, 1], 0)
    rig.settle()
    rig.close()
    again = Rig(home)
    encoded = msgspec.msgpack.encode(again.state.status())
    again.close()
    assert msgspec.msgpack.decode(encoded, type=BrokerStatus).groups_taken == 2


def test_a_report_cannot_make_the_sum_of_waste_unreadable(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.state.attach(LearnerReport(1, 1, "training", 0))
    for number in range(2):
        rig.state.register(NodeReport(f"n{number}", 1, "h", "generating", 0, tokens_wasted=1 << 53))
    encoded = msgspec.msgpack.encode(rig.state.status())
    rig.close()
    assert msgspec.msgpack.decode(encoded, type=BrokerStatus).waste["cancelled"].tokens == 1 << 53
