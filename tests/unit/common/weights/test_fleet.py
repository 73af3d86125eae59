"""All nodes together: whose ping is due, which attempts are looked at, and how seldom all nodes are."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from common.weights.source import fleet
from common.weights.source.fleet import IDLE_PING_S, PING_TRIES, Fleet, Pace, Pings
from common.weights.source.nodes import IDLE_SILENCE_S, DropNode, DropReason, Step, begin, drop, hear
from common.weights.wire.messages import Pong, Staged
from tests.unit.common.weights.node_views import attempt_at, settled, snapshot_of

SNAPSHOT = snapshot_of(4)


def fleet_of(*names: str) -> Fleet:
    made = Fleet()
    for name in names:
        made.add(settled(name))
    return made


@pytest.mark.parametrize("nodes", [1, 3, 1000, 20_000])
def test_every_node_is_pinged_once_in_an_interval_a_few_at_a_time(nodes: int) -> None:
    made, pings = fleet_of(*map(str, range(nodes))), Pings(timeout_s=20.0)
    pings.due(made, 1000.0)
    longest = IDLE_SILENCE_S / PING_TRIES
    turns = [pings.due(made, 1000.0 + 0.05 * turn) for turn in range(1, int(3 * longest / 0.05))]
    counts = Counter(node for turn in turns for node in turn)
    assert len(counts) == nodes and max(counts.values()) - min(counts.values()) <= 1 and min(counts.values()) >= 2
    assert max(map(len, turns)) <= max(1, nodes * 0.05 / IDLE_PING_S + 1)


def test_after_a_long_turn_no_node_is_pinged_twice_and_a_fleet_without_nodes_has_no_pings() -> None:
    made, pings = fleet_of("a", "b"), Pings(timeout_s=20.0)
    assert pings.due(Fleet(), 1000.0) == []
    assert sorted(pings.due(made, 1000.0)) == [b"a", b"b"] and sorted(pings.due(made, 9000.0)) == [b"a", b"b"]
    made.take(b"a", drop(made.nodes[b"a"], DropNode(DropReason.LEFT))[0])
    assert pings.due(made, 9500.0) == [b"b"]


def test_only_attempts_to_which_something_happened_are_looked_at() -> None:
    made, now = fleet_of("a", "b"), 5.0

    def step(name: bytes, event: Callable[..., Step], *args: object) -> None:
        made.take(name, event(made.nodes[name], *args)[0])

    first, second = (attempt_at(SNAPSHOT, name, transport="relay") for name in "ab")
    for attempt, name in ((first, b"a"), (second, b"b")):
        made.begin(attempt)
        step(name, begin, attempt, 1)
    assert made.touched() == [first, second] and made.touched() == []
    made.changed = False
    step(b"a", hear, Pong("a"), now)
    assert made.nodes[b"a"].heard == now and made.touched() == [] and not made.changed
    step(b"b", hear, Staged("b", 0, 4, 0.1, epoch=1), now)
    assert made.touched() == [second] and made.changed
    assert made.members(second) == [b"b"]
    step(b"b", drop, DropNode(DropReason.LEFT))
    assert made.touched() == [second] and made.members(second) == [] and b"b" not in made.nodes
    made.touch(second)
    made.end(second)
    assert made.touched() == [] and made.broadcast is None


def test_nodes_are_ready_for_what_is_meant_for_them() -> None:
    made = fleet_of("a", "b")
    made.add(settled("eval", pool="eval"))
    assert list(made.strangers) == [b"a", b"b", b"eval"]
    assert [node.node_id for node in made.ready(SNAPSHOT, None)] == ["a", "b"] and not made.stirred
    made.begin(attempt_at(SNAPSHOT, "a"))
    assert made.broadcast is not None
    made.take(b"a", begin(made.nodes[b"a"], made.broadcast)[0])
    assert made.stirred and [node.node_id for node in made.ready(SNAPSHOT, None)] == ["b"]
    assert [node.node_id for node in made.ready(snapshot_of(5), SNAPSHOT)] == ["b", "eval"]


def test_work_runs_again_after_so_long_that_its_cpu_is_a_small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = {threading.get_ident(): iter([7.0, 7.0 + 2 * fleet.SHARE])}  # another thread has a time of its own
    monkeypatch.setattr(
        fleet.time, "thread_time", lambda: next(cpu_s.get(threading.get_ident(), itertools.repeat(0.0)))
    )
    pace = Pace()
    assert pace.due()
    with pace:
        pass
    assert not pace.due() and 1.0 < pace.next - time.perf_counter() <= 2.0
