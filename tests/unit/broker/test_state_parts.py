"""The parts of the delivery state: history, deadlines, events, fleet."""

import random
import sys
import tracemalloc

import msgspec
import pytest

from broker.contract import BrokerEvent, LedgerEntry
from broker.delivery.deadlines import HEAP_SLACK, Deadlines
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import RING_EVENTS, EventLog
from broker.delivery.node_rules import NodeRules
from broker.delivery.nodes import FORGET_AFTER_S, Fleet
from broker.delivery.task_table import History
from broker.journal import records
from broker.server.handlers import LongPolls
from broker.wire import AskLease
from common.rollouts import GroupMeta
from tests.rigs.brokers import node_report, numbered_state, run_info, tasks


def test_history_gives_back_what_it_was_given_in_any_order() -> None:
    committed = LedgerEntry(5, "committed", 2, ["a", "b"], 3, 1, 2, 0.25, "lease of node a expired")
    dead = LedgerEntry(2, "dead", 3, ["a", "a", "b"], None, None, None, None, "bad")
    filtered = LedgerEntry(4, "committed", 1, ["a"], 3, 1, 1, 1.0, filtered=True)
    history = History()
    history.add(committed)
    history.add(dead)
    history.add(filtered)
    assert (history.get(5), history.get(2), history.get(4)) == (committed, dead, filtered)
    assert list(history.serials()) == [2, 4, 5]
    assert (3 in history, 5 in history, 6 in history) == (False, True, False)
    assert (history.committed, history.dead) == (2, 1)
    with pytest.raises(KeyError):
        history.get(3)


def test_history_of_many_groups_is_compact() -> None:
    history = History()
    for serial in range(20_000):
        history.add(LedgerEntry(serial, "committed", 1, ["n0"], serial // 16, 3, 4, 0.5))
    assert sum(map(sys.getsizeof, vars(history).values())) <= 34 * 20_000


def test_renewed_deadlines_come_up_only_when_they_have_passed() -> None:
    true = {"a": 1.0, "b": 1.0, "gone": 1.0}
    deadlines = Deadlines()
    for key in true:
        deadlines.add(key, true[key])
        deadlines.add(key, true[key])
    true["a"] = 3.0
    del true["gone"]
    assert list(deadlines.passed(2.0, true.get)) == ["b"]
    assert deadlines.next() == 3.0
    assert list(deadlines.passed(3.0, true.get)) == ["a"]
    assert deadlines.next() is None
    for deadline in (10.0, 5.0):
        deadlines.add("moved forward", deadline)
    assert list(deadlines.passed(5.0, lambda key: 5.0)) == ["moved forward"]
    assert list(deadlines.passed(20.0, lambda key: 5.0)) == []


def test_the_event_ring_is_bounded_and_the_sink_sees_everything() -> None:
    seen: list[int] = []
    log = EventLog(lambda event: seen.append(event.index), wall_clock=lambda: 1.0)
    for number in range(RING_EVENTS + 10):
        log.add("tick", number=number)
    assert seen == list(range(RING_EVENTS + 10))
    assert [e.index for e in log.after(-1)] == list(range(10, RING_EVENTS + 10))
    assert [e.detail["number"] for e in log.after(RING_EVENTS + 8)] == [RING_EVENTS + 9]
    assert log.after(RING_EVENTS + 9) == []


def test_a_sink_that_cannot_write_disturbs_nobody_and_what_it_missed_is_counted() -> None:
    written: list[tuple[int, str, object]] = []
    full = False

    def sink(event: BrokerEvent) -> None:
        if full:
            raise OSError(28, "No space left on device")
        written.append((event.index, event.kind, event.detail.get("count")))

    log = EventLog(sink, wall_clock=lambda: 1.0)
    log.add("before")
    full = True
    log.add("lost")
    log.add("lost")
    full = False
    log.add("after")
    log.add("later")
    assert written == [(0, "before", None), (3, "events_unwritten", 2), (4, "after", None), (5, "later", None)]
    assert [e.kind for e in log.after(-1)] == ["before", "lost", "lost", "events_unwritten", "after", "later"]


def test_a_silent_node_dies_once_revives_when_seen_and_is_forgotten_long_after() -> None:
    fleet = Fleet(silent_s=5.0)
    node = fleet.join(node_report("n", tokens_generated=7), 0.0)
    assert fleet.expire(4.0)[0] == []
    fleet.seen(node, 4.0)
    assert fleet.expire(8.0)[0] == []
    assert fleet.expire(9.5)[0] == ["n"]
    assert fleet.expire(10.0)[0] == []
    assert fleet.seen(node, 11.0)
    assert fleet.expire(17.0)[0] == ["n"]
    assert [n.alive for n in fleet.status(17.0)] == [False]
    assert fleet.expire(12.0 + FORGET_AFTER_S) == ([], ["n"])
    fleet.leave("n")
    assert fleet.nodes == {}
    assert fleet.tokens_generated() == 7
    fleet.join(node_report("n", pid=2), 1000.0)
    assert fleet.expire(1004.5)[0] == []
    assert fleet.expire(1005.5)[0] == ["n"], "a node that joins again is watched again"


def test_freed_slots_are_counted_and_forgotten_once_no_older_task_is_unfinished() -> None:
    state = numbered_state(run_info(groups_per_step=3, max_staleness=1000))
    NodeRules(state).register(node_report("n", version=1000))
    LearnerRules(state).offer(tasks(2000))
    for step in range(400):
        for lease in NodeRules(state).lease("n", 1000, 3):
            NodeRules(state).complete("n", lease.token, GroupMeta(0, 0, 0.5, 1), b"", 0)
        taken = LearnerRules(state).take(step, 3)
        assert taken is not None
        LearnerRules(state).filter(step, [taken[0].serial], 2)
        assert state.tasks.freed_earlier + len(state.tasks.freed) == step + 1
        LearnerRules(state).commit(step - 1)
        assert len(state.tasks.freed) <= 2


def test_the_history_file_takes_a_few_bytes_a_task_and_gives_back_every_entry() -> None:
    numbers = random.Random(0)
    entries = [
        LedgerEntry(
            n, "committed", 1, [f"node-{numbers.randrange(8)}"], n // 64, n // 64 - 1, n // 64, numbers.random()
        )
        for n in range(4096)
    ]
    body = records.encode_finished(entries)
    assert records.decode_finished(body) == entries
    assert len(body) < 30 * len(entries)
    assert records.decode_finished(msgspec.msgpack.encode({"entries": entries})) == entries, "as earlier stores have it"
    with pytest.raises(msgspec.DecodeError):
        records.decode_finished(msgspec.msgpack.encode(records.FinishedTasks(packed=b"not zlib")))


@pytest.mark.slow
def test_deadlines_of_what_has_ended_take_no_memory() -> None:
    deadlines, lot, state = Deadlines[str](), LongPolls(), numbered_state(run_info())
    deadlines.add("kept", 5.0)
    NodeRules(state).register(node_report("n"))
    LearnerRules(state).offer(tasks(1))

    def end_a_deadline(number: int) -> None:
        deadlines.add(f"lease {number}", 60.0 + number)
        deadlines.discard(f"lease {number}")

    def end_a_lease(number: int) -> None:
        NodeRules(state).release("n", [lease.token for lease in NodeRules(state).lease("n", 0, 1)])

    def cancel_a_request(number: int) -> None:
        lot.park(b"c", AskLease(id=number, node_id="n0", version=0, max_groups=1, wait_s=60), 60.0)
        lot.drop((b"c", number))

    for end in (end_a_deadline, end_a_lease, cancel_a_request):
        tracemalloc.start()
        for number in range(20 * HEAP_SLACK):
            end(number)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert grown < 1 << 20, end
    assert list(deadlines.passed(1e9, lambda key: 5.0)) == ["kept"]
    lot.park(b"c", AskLease(id=-1, node_id="n0", version=0, max_groups=1, wait_s=60), 50.0)
    assert [parked.request.id for parked in lot.overdue(55.0)] == [-1]
