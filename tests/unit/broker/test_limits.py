"""Limits on one client's cost for the broker: parked requests, nodes, log lines, numbers and texts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from broker import wire
from broker.contract import LearnerReport
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.moves import MOST_NODES_NAMED
from broker.delivery.node_rules import NodeRules
from broker.delivery.nodes import MOST_NODES
from broker.delivery.state import DeliveryState
from broker.server.handlers import MOST_LEASES, Handlers
from broker.server.request_guard import LOG_EVERY_S, Denied, RequestGuard, anonymous
from broker.wire import WireError
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task
from tests.broker_rig import new_state, node_report


@contextmanager
def guarded(state: DeliveryState) -> Iterator[RequestGuard]:
    with zmq.Context[Any]() as context:
        guard = RequestGuard(context, state, None)
        yield guard
        guard.close()


def ask_lease(request_id: int, node_id: str = "n0") -> wire.AskLease:
    return wire.AskLease(id=request_id, node_id=node_id, version=0, max_groups=1, wait_s=60)


def test_a_node_that_parks_lease_requests_without_end_has_only_its_newest_ones_parked() -> None:
    handlers = Handlers(new_state())
    handlers.handle(b"c", wire.Register(id=0, report=node_report()), None)
    answered = [p.request.id for i in range(1, 500) for p in handlers.handle(b"c", ask_lease(i), None)[1]]
    assert answered == list(range(1, 500 - MOST_LEASES))
    assert len(handlers.parked.leases) == MOST_LEASES


def test_a_broker_takes_a_bounded_number_of_nodes_and_says_so() -> None:
    state = new_state()
    for i in range(MOST_NODES):
        NodeRules(state).register(node_report(f"n{i}"))
    with pytest.raises(BrokerError, match="16384 nodes have joined"):
        NodeRules(state).register(node_report("one more"))
    NodeRules(state).register(node_report("n5", pid=2))


def test_a_node_that_leases_and_releases_for_ever_does_not_grow_the_ledger() -> None:
    state = new_state()
    LearnerRules(state).offer([Task(0, b"{}", 0, 4)])
    for node in ("first", "n0"):
        NodeRules(state).register(node_report(node))
    for _ in range(3 * MOST_NODES_NAMED):
        [lease] = NodeRules(state).lease("n0", 0, 1)
        NodeRules(state).release("n0", [lease.token])
    [lease] = NodeRules(state).lease("first", 0, 1)
    [entry] = state.ledger()
    assert (len(entry.nodes), entry.nodes[-1]) == (MOST_NODES_NAMED, "first")


def test_refusals_are_all_counted_but_logged_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 1000.0
    state = new_state(clock=lambda: now)
    with guarded(state) as guard, caplog.at_level(logging.WARNING):
        for _ in range(10_000):
            guard.note_refused(b"secret-id", WireError("strange"))
        assert len(caplog.records) == 1
        now += LOG_EVERY_S - 0.1
        guard.note_refused(b"secret-id", WireError("strange"))
        assert len(caplog.records) == 1
        now += 0.1
        guard.note_refused(b"client", Denied("not yours"))
        assert caplog.records[-2].message == "10000 more refused messages were not logged one by one"
        assert "not yours" in caplog.records[-1].message
        now += LOG_EVERY_S
        guard.note_refused(b"client", WireError("strange"))
        assert len(caplog.records) == 4
    assert (state.rejected.refused, state.rejected.denied) == (10_003, 1)
    events = state.event_log.after(-1)
    assert [event.detail["count"] for event in events] == [1, 10_002, 10_003]
    shown = f"{events} {caplog.text}"
    assert b"secret-id".hex() not in shown and "secret-id" not in shown, "it identifies the connection"
    assert anonymous(b"secret-id") != anonymous(b"secret-ie")


def test_a_long_reason_is_cut_in_events() -> None:
    state = new_state()
    with guarded(state) as guard:
        guard.note_refused(b"client", WireError("x" * 1000))
    (event,) = state.event_log.after(-1)
    assert (event.detail["reason"], event.detail["count"]) == ("x" * 500, 1)


STRANGE: dict[str, object] = {"tokens_per_s": float("nan"), "tokens_generated": -1, "pool": "x" * 100_000}
BAD = [
    wire.Commit(id=1, step=1 << 31),
    wire.Take(id=1, step=-2, count=1, wait_s=0),
    *(wire.Take(id=1, step=0, count=1, wait_s=float(wait_s)) for wait_s in ("nan", "inf")),
    wire.Take(id=1, step=0, count=0, wait_s=0),
    wire.Complete(id=1, node_id="n", token="t", meta=GroupMeta(0, 1 << 40, 0.5, 10)),
    wire.Complete(id=1, node_id="n", token="t", meta=GroupMeta(0, 0, 0.5, -10)),
    wire.Complete(id=1, node_id="n", token="t", meta=GroupMeta(0, 0, 0.5, 10, generation_s=float("nan"))),
    *(wire.Register(id=1, report=node_report(name)) for name in ("", "x" * 300)),
    *(wire.Heartbeat(id=1, report=node_report(**{name: value}), tokens=[]) for name, value in STRANGE.items()),
    wire.Heartbeat(id=1, report=node_report(), tokens=["t"] * 20_000),
    wire.Release(id=1, node_id="n", tokens=["t" * 300]),
    wire.Offer(id=1, tasks=[Task(0, b"{}", 0, 4)] * 10_000),
    wire.Report(id=1, report=LearnerReport(1, 1, "training", 1 << 40)),
]


@pytest.mark.parametrize("request_", BAD, ids=lambda r: type(r).__name__)
def test_numbers_and_texts_beyond_their_limits_do_not_decode_and_the_field_is_named(request_: wire.Request) -> None:
    payloads = 1 if isinstance(request_, wire.Complete) else 0
    with pytest.raises(WireError, match=r"Expected .* at `\$\.") as caught:
        wire.decode_request(wire.encode(request_), payloads)
    assert caught.value.request_id == 1
    without_mean = wire.Complete(id=1, node_id="n", token="t", meta=GroupMeta(-1, -1, float("nan"), 0, 4))
    assert isinstance(wire.decode_request(wire.encode(without_mean), 1), wire.Complete), "all of its samples failed"
