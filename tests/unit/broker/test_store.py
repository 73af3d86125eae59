"""The store on a bad disk: cut, damaged, full, locked; and what survives a broker."""

import errno
import itertools
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.contract import LEARNER_ENDED, BrokerStatus, Delivery, WeightChange, WeightRequest
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.journal.file_store import lock_store
from broker.journal.journal import SEGMENT_BYTES
from broker.journal.segments import BLOCK, SegmentFile
from broker.journal.store import StoreCorrupt, StoreFailed
from common.errors import BrokerError, UsageError
from common.rollouts import GroupMeta
from common.waste import Waste
from tests.rigs.brokers import DurableRig, full_disk, learner_report, meta, newest, node_report
from tests.rigs.refusals import refused
from tests.rigs.waiting import until

MOVES = ("step", "offer", "lease", "fail", "commit", "regenerate")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "store"


def copied(path: Path, name: str = "copy") -> Path:
    target = path.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(path, target)


def size_of(path: Path) -> int:
    return newest(path).stat().st_size


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def what_is_known(rig: DurableRig) -> tuple[Any, ...]:
    return (
        [(e.serial, e.state, e.step) for e in rig.state.ledger()],
        rig.state.committed_step,
        set(rig.state.accepted),
    )


def found_in(path: Path) -> tuple[Any, ...]:
    with DurableRig(path) as rig:
        return what_is_known(rig)


def after_a_step(home: Path) -> DurableRig:
    """A broker that has taken step 0."""
    rig = DurableRig(home).begin()
    rig.settle()
    rig.step(0)
    rig.settle()
    return rig


# -------------------------------------------------------------------- torn tails


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_store_cut_at_any_byte_is_a_prefix_with_all_that_was_acknowledged(home: Path, data: st.DataObject) -> None:
    """Each move is a turn of its own; what the store knew after each of them is remembered with the size it had."""
    shutil.rmtree(home, ignore_errors=True)
    with DurableRig(home, "everysec").begin() as rig:
        rig.settle()
        states = [(size_of(home), what_is_known(rig))]
        steps = itertools.count()
        for move in data.draw(st.lists(st.sampled_from(MOVES), max_size=8)):
            play(rig, move, steps)
            rig.settle()
            states.append((size_of(home), what_is_known(rig)))
        copy = copied(home)
    first = states[0][0]
    for cut in data.draw(st.lists(st.integers(first, states[-1][0]), min_size=1, max_size=12, unique=True)):
        broken = copied(copy, "broken")
        os.truncate(newest(broken), cut)
        found = found_in(broken)
        acknowledged = max(i for i, (size, _) in enumerate(states) if size <= cut)
        possible = [known for _, known in states[acknowledged : acknowledged + 2]]
        assert found == possible[0] or is_between(found, possible), f"cut at {cut}"


def is_between(found: tuple[Any, ...], possible: list[tuple[Any, ...]]) -> bool:
    """Whether what was found is somewhere on the way from one acknowledged state to the next."""
    (before, after) = possible
    return before[2] <= found[2] <= after[2] and before[1] <= found[1] <= after[1] and len(found[0]) >= len(before[0])


def play(rig: DurableRig, move: str, steps: Iterator[int]) -> None:
    if move == "step":
        number = next(steps)
        rig.offer(2)
        for lease in rig.lease(8):
            rig.complete(lease)
        LearnerRules(rig.state).take(number, 2)
    elif move == "offer":
        rig.offer(1)
    elif move == "lease":
        rig.lease(1)
    elif move == "fail" and rig.state.tasks.leased:
        NodeRules(rig.state).fail("n0", next(iter(rig.state.tasks.leased)), "because")
    elif move == "commit" and rig.state.tasks.steps:
        LearnerRules(rig.state).commit(min(rig.state.tasks.steps))
    elif move == "regenerate" and rig.state.tasks.steps:
        step = max(rig.state.tasks.steps)
        LearnerRules(rig.state).regenerate(step, rig.state.tasks.steps[step][:1])


def test_a_torn_record_is_dropped_with_a_reason_and_an_event(home: Path) -> None:
    with after_a_step(home) as rig:
        known = what_is_known(rig)
        rig.offer(1)
        rig.settle()
        copy = copied(home)
    path = newest(copy)
    os.truncate(path, path.stat().st_size - BLOCK + 20)  # in the middle of the last record
    with DurableRig(copy) as again:
        assert what_is_known(again) == known
        torn = [e for e in again.events.after(-1) if e.kind == "store_torn"]
        assert [str(path) in e.detail["reason"] for e in torn] == [True]
    with DurableRig(copy) as third:
        assert what_is_known(third) == known
        assert third.found.torn == "", "what was dropped once is gone"
    number = int(newest(copy).stem) + 1
    (copy / f"{number:08d}.log").write_bytes(newest(copy).read_bytes()[:100])
    assert found_in(copy) == known, "a snapshot that was never finished leaves the one before"


# -------------------------------------------------------------------- damage


def test_damage_to_a_record_that_was_synced_is_an_error_with_file_and_offset(home: Path) -> None:
    with DurableRig(home).begin() as rig:
        rig.settle()
        path, middle = newest(home), size_of(home) + 60
        for step in range(3):
            rig.step(step)
            rig.settle()
        copy = copied(home)
    flip(copy / path.name, middle)
    with refused(StoreCorrupt) as error:
        DurableRig(copy)
    assert error.value.where.startswith(f"{copy / path.name}: byte ")
    assert middle - 200 < int(error.value.where.rpartition(" ")[2]) <= middle
    assert error.value.exit_code == 2


def test_damage_at_the_end_or_to_the_history_of_a_closed_store_is_noticed_and_that_of_padding_costs_nothing(
    home: Path,
) -> None:
    with after_a_step(home) as rig:
        LearnerRules(rig.state).commit(0)
        rig.settle()
        known, end = what_is_known(rig), size_of(home)  # before the broker closes the store
    broken = copied(home)
    flip(newest(broken), end - BLOCK + 10)
    with refused(StoreCorrupt) as error:
        DurableRig(broken)
    assert error.value.where.startswith(f"{newest(broken)}: byte ")
    flip(newest(home), end - 1)
    assert found_in(home) == known
    flip(home / "history.log", 60)
    with refused(StoreCorrupt, f"{home / 'history.log'}: byte 0:"):
        DurableRig(home)


# -------------------------------------------------------------------- a full disk


@pytest.mark.parametrize(("segment_bytes", "room"), [(SEGMENT_BYTES, BLOCK), (1 << 14, 0)], ids=["same", "new segment"])
def test_on_a_full_disk_nothing_is_acknowledged_and_nothing_is_lost(home: Path, segment_bytes: int, room: int) -> None:
    with DurableRig(home, segment_bytes=segment_bytes).begin() as rig:
        rig.step(0)
        rig.settle()
        with full_disk(home, room):
            before = rig.journal.acknowledged
            for step in (1, 2, 3):
                rig.step(step, size=50_000)
                wanted = rig.journal.end_turn()
            until(lambda: rig.journal.stuck)
            assert str(home) in rig.journal.stuck
            assert before <= rig.journal.acknowledged < wanted
            copy = copied(home)
        rig.settle()
        until(lambda: not rig.journal.stuck)  # the store's thread says so right after the acknowledgement
        rig.journal.end_turn()
        assert [kind for kind in rig.kinds() if kind in ("store_full", "store_writable")] == [
            "store_full",
            "store_writable",
        ]
        known = what_is_known(rig)
    with DurableRig(home) as again:
        assert what_is_known(again) == known
        assert again.state.tasks.living[2].payload.read() == b"2." * 50_000  # type: ignore[attr-defined]
    assert {s: state for s, state, _ in found_in(copy)[0]}[0] == "taken"


class DroppedPages:
    """`SegmentFile.sync` as Linux has it when a write-back fails: the error comes once, and the pages are lost."""

    def __init__(self, errors: list[int]) -> None:
        self._errors, self._synced = errors, dict[Path, int]()
        self._sync = SegmentFile.sync

    def __call__(self, file: SegmentFile) -> None:
        if self._errors:
            with file.path.open("r+b") as disk:
                disk.seek(begun := self._synced.get(file.path, 0))
                disk.write(bytes(file.size - begun))
            raise OSError(number := self._errors.pop(0), os.strerror(number))
        self._sync(file)
        self._synced[file.path] = file.size


@pytest.mark.parametrize("errors", [[errno.ENOSPC], [errno.EIO], [errno.EIO, errno.ENOSPC]], ids=str)
def test_a_sync_that_succeeds_after_one_that_failed_counts_only_for_what_was_written_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, errors: list[int]
) -> None:
    disk, left = DroppedPages([]), len(errors)
    monkeypatch.setattr(SegmentFile, "sync", lambda file: disk(file))
    with DurableRig(home, "everysec").begin() as rig:
        rig.settle()
        until(lambda: rig.journal._writer.synced == rig.journal.acknowledged)
        disk._errors.extend(errors)
        for step in (0, 1):
            rig.step(step, size=5_000)
            rig.settle()
        last = rig.journal.acknowledged
        until(lambda: not disk._errors and rig.journal._writer.synced >= last, f"{left} failures and a sync")
        known = what_is_known(rig)
        copy = copied(home)  # as a power cut would leave it: nothing waits in the page cache
    with DurableRig(copy) as again:
        assert what_is_known(again) == known
        assert again.state.tasks.living[3].payload.read() == b"3." * 5_000  # type: ignore[attr-defined]


def test_a_disk_that_refuses_the_same_records_again_ends_the_broker(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DurableRig(home, "everysec").begin()
    rig.settle()
    until(lambda: rig.journal._writer.synced == rig.journal.acknowledged)
    disk = DroppedPages([errno.EIO] * 3)
    monkeypatch.setattr(SegmentFile, "sync", lambda file: disk(file))
    rig.step(0)
    with refused(StoreFailed, os.strerror(errno.EIO)):
        until(lambda: rig.journal.end_turn() < 0, "the failure")
    assert not rig.journal.close()


# -------------------------------------------------------------------- who may write


def test_a_second_broker_is_kept_out_while_the_first_lives_on_a_full_disk_too_and_told_why(home: Path) -> None:
    with full_disk(home):
        with lock_store(home), refused(UsageError, "process unknown"):
            lock_store(home)
        lock_store(home).close()
    with DurableRig(home) as first:
        assert (first.found.records, first.found.torn, first.state.ledger()) == (0, "", []), "it begins with nothing"
        with refused(UsageError, home, f"process {os.getpid()}"):
            DurableRig(home)
    DurableRig(home).close()
    (home / "lock").unlink()
    (home / "lock").mkdir()
    with refused(UsageError, home, os.strerror(errno.EISDIR)):
        lock_store(home)


def test_a_store_of_another_schema_or_without_its_identity_is_refused_and_left_as_it_is(home: Path) -> None:
    """Taken for an empty one, it would be written over: its checksums cannot be checked without the identity."""
    after_a_step(home).close()
    info, before = home / "store.json", newest(home).read_bytes()
    info.write_bytes(info.read_bytes().replace(b'"schema":1', b'"schema":2'))
    with refused(UsageError, f"{info}: schema 2"):
        DurableRig(home)
    info.unlink()
    with refused(UsageError, f"{info}: missing"):
        DurableRig(home)
    assert newest(home).read_bytes() == before


# -------------------------------------------------------------------- what survives


def test_a_lease_whose_answer_was_lost_with_the_broker_goes_back_at_once_and_counts_no_attempt(home: Path) -> None:
    with DurableRig(home).begin() as rig:
        rig.offer(3)
        heard, unheard, failed = rig.lease(3)
        rig.settle()
    with DurableRig(home) as again:
        state, node = again.state, node_report()
        NodeRules(state).fail("n0", failed.token, "because")
        assert NodeRules(state).heartbeat(node, [heard.token]).lost == []
        assert set(state.tasks.leased) == {heard.token}
        left = {e.serial: (e.state, e.attempts) for e in state.ledger()}
        assert left == {0: ("leased", 1), 1: ("pending", 0), 2: ("pending", 1)}
        (lease,) = NodeRules(state).lease("n0", 1 << 20, 1)
        assert NodeRules(state).heartbeat(node, [heard.token]).lost == [], (
            "a lease that was given since then is none of those"
        )
        assert lease.token in state.tasks.leased
        assert not NodeRules(state).complete("n0", unheard.token, meta(), b"", 0)


@pytest.mark.parametrize("in_good_order", [True, False])
def test_nodes_drain_after_a_crash_at_the_end_of_a_job_and_not_when_a_job_that_ended_goes_on(
    home: Path, in_good_order: bool
) -> None:
    with DurableRig(home).begin() as rig:
        LearnerRules(rig.state).report(learner_report("done"))
        rig.settle()
        copy = copied(home)
    with DurableRig(home if in_good_order else copy) as again:
        reply = NodeRules(again.state).heartbeat(node_report(), [])
        assert (reply.drain, reply.learner_incarnation) == (not in_good_order, 1)


@pytest.mark.parametrize("state", LEARNER_ENDED)
def test_a_learner_that_ended_is_still_said_to_have_and_its_progress_is_not_recorded(home: Path, state: str) -> None:
    with DurableRig(home) as rig:
        LearnerRules(rig.state).attach(told := learner_report(instance="a"))
        before, late = rig.journal.end_turn(), [Delivery("n0", 1, "queued")]
        LearnerRules(rig.state).report(
            msgspec.structs.replace(told, groups_missing=3, deliveries=late, deliveries_waiting=1)
        )
        assert rig.journal.end_turn() == before
        LearnerRules(rig.state).report(learner_report(state, instance="a"))
    with DurableRig(home) as again:
        found = again.state.learner.status(again.state.clock() + 1000)
        assert found is not None and found.state == state
        LearnerRules(again.state).attach(learner_report(instance="b"))  # at once: no learner is alive


def test_replaced_processes_stay_refused_and_those_that_do_not_say_who_they_are_do_not(home: Path) -> None:
    with DurableRig(home) as rig:
        for told in (learner_report(instance=""), learner_report(instance="a")):
            LearnerRules(rig.state).attach(told)
        LearnerRules(rig.state).report(learner_report("failed", instance="a"))
        LearnerRules(rig.state).attach(learner_report(instance="b"))
    with DurableRig(home) as again:
        for instance in ("b", ""):
            LearnerRules(again.state).check_learner(1, instance)
        with refused(BrokerError, "incarnation 1", "pid 5"):
            LearnerRules(again.state).check_learner(1, "a")
        with refused(BrokerError, "incarnation 1", "process 5"):
            LearnerRules(again.state).attach(learner_report(instance="c"))


def test_a_log_that_outgrew_its_segment_is_compacted_and_keeps_what_is_known(home: Path) -> None:
    with DurableRig(home, segment_bytes=1 << 16).begin() as rig:
        rig.settle()
        first = newest(home)
        for step in range(12):
            rig.step(step, size=4000)
            rig.settle()
            LearnerRules(rig.state).commit(step)
            rig.settle()
        until(lambda: newest(home) != first, "another segment")
        known = what_is_known(rig)
    assert found_in(home) == known


def test_large_groups_alone_close_no_segment_of_a_broker_with_many_tasks(home: Path) -> None:
    with DurableRig(home, segment_bytes=1 << 16).begin() as rig:
        rig.offer(1000)
        rig.settle()
        for lease in rig.lease(100):
            rig.complete(lease, size=4000)
        rig.settle()
        numbers = [int(path.stem) for path in home.glob("0*.log")]
        assert len(numbers) == 1, "200 records since a snapshot of 1,000 tasks"
        for lease in rig.lease(900):
            rig.complete(lease)
        rig.settle()
        rig.offer(1)
        rig.settle()
        until(lambda: int(newest(home).stem) > numbers[0], "another segment")
        known = what_is_known(rig)
    assert found_in(home) == known


def test_weights_of_sources_and_requests_for_others_outlive_compaction(home: Path) -> None:
    changes = [WeightChange(0, {"a": 1.0, "b": 2.0}), WeightChange(1, {"a": 0.0, "b": 2.0}, requests=["one"])]
    with DurableRig(home, segment_bytes=1 << 16).begin() as rig:
        rules = LearnerRules(rig.state)
        rules.offer([], changes[:1])
        for name in ("one", "two"):
            rules.set_weights(WeightRequest(name, {"a": 0.0}))
        rules.offer([], changes[1:], 1)
        rig.settle()
        first = newest(home)
        for step in range(12):
            rig.step(step, size=4000)
            rig.settle()
            rules.commit(step)
            rig.settle()
        until(lambda: newest(home) != first, "another segment")
    with DurableRig(home) as again:
        assert LearnerRules(again.state).attach(learner_report(incarnation=9)).weight_changes == changes
        assert [request.id for request in again.state.status().weight_requests] == ["two"]


def test_events_and_waste_go_on_from_where_they_were(home: Path) -> None:
    with DurableRig(home).begin() as rig:
        rig.state.fleet.waste_of("n0", "failed", 5, 1.5)
        rig.settle()
        last = rig.events.next_index
        assert last > 0
    with DurableRig(home) as again:
        assert all(event.index >= last for event in again.events.after(-1))
        again.state.fleet.waste_of("n0", "failed", 1)
        status = again.state.status()
        assert status.waste == status.nodes[0].waste == {"failed": Waste(6, 1.5)}


@pytest.mark.parametrize("seconds", [-1.0, 1e300])
def test_what_a_node_makes_up_leaves_neither_store_nor_status_unreadable(home: Path, seconds: float) -> None:
    with DurableRig(home).begin() as rig:
        rig.offer(2)
        for lease in rig.lease():
            assert NodeRules(rig.state).complete("n0", lease.token, GroupMeta(0, 0, 0.5, 1 << 53, 0, seconds), b"g", 1)
        assert LearnerRules(rig.state).take(0, 2) is not None
        LearnerRules(rig.state).filter(0, [0, 1], 0)
        for number in (1, 2):
            NodeRules(rig.state).register(node_report(f"n{number}", tokens_wasted=1 << 53))
        rig.settle()
    with DurableRig(home) as again:
        encoded = msgspec.msgpack.encode(again.state.status())
    status = msgspec.msgpack.decode(encoded, type=BrokerStatus)
    assert (status.groups_taken, status.waste["cancelled"].tokens) == (2, 1 << 53)


def test_a_store_of_an_earlier_release_is_read_with_every_task_group_and_name(tmp_path: Path) -> None:
    """Two brokers of the release before moves recorded themselves wrote it; the second one was killed."""
    with tarfile.open(Path(__file__).parents[2] / "golden" / "store_schema_1.tar.gz") as archive:
        archive.extractall(tmp_path / "store", filter="data")
    with DurableRig(tmp_path / "store") as rig:
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
        assert (state.committed_step, len(state.accepted)) == (2, 9)
        assert (tasks.living[6].reason, tasks.living[6].failed_by) == ("because", ["n0"])
        assert state.fleet.nodes["n0"].tokens == set(tasks.leased)
