"""Limits on one client's cost for the broker: parked requests, nodes, log lines, kept messages, numbers and texts."""

import logging
from pathlib import Path

import msgspec
import pytest
import zmq

from broker import wire
from broker.client.connection import BrokerClient
from broker.contract import LearnerReport
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.moves import MOST_NODES_NAMED
from broker.delivery.node_rules import NodeRules
from broker.delivery.nodes import MOST_NODES
from broker.server import request_guard
from broker.server.flood_guard import TokenBucket
from broker.server.handlers import MOST_LEASES, Handlers
from broker.server.request_guard import (
    KEPT_BYTES,
    KEPT_MESSAGES,
    LOGGED_A_MINUTE,
    Denied,
    RateLimited,
    RejectionLog,
    RequestGuard,
    anonymous,
    reply_bytes,
)
from broker.wire import WireError
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task
from common.security.credentials import Identity
from tests.rigs.brokers import new_state, node_report, serving
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S


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
    with refused(BrokerError, MOST_NODES):
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
    refusals = RejectionLog(state)
    with caplog.at_level(logging.WARNING):
        for _ in range(10_000):
            refusals.note(b"secret-id", WireError("strange"), b"x", 0)
        assert len(caplog.records) == LOGGED_A_MINUTE
        now += 61
        refusals.note(b"client", Denied("not yours"), b"x", 0)
    assert caplog.records[-2].message.startswith(f"{10_000 - LOGGED_A_MINUTE} ")
    assert "not yours" in caplog.records[-1].message
    assert (state.rejected.refused, state.rejected.denied) == (10_001, 1)
    events = state.event_log.after(-1)
    assert len(events) == LOGGED_A_MINUTE + 1
    shown = f"{events} {caplog.text}"
    assert b"secret-id".hex() not in shown and "secret-id" not in shown, "it identifies the connection"
    assert anonymous(b"secret-id") != anonymous(b"secret-ie")


def test_the_first_messages_that_do_not_decode_are_kept_over_restarts_and_denied_ones_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "quarantine"
    state = new_state()
    refusals = RejectionLog(state, folder)
    refusals.note(b"client", Denied("not yours"), b"fine", 0)
    assert not folder.exists()
    for _ in range(3):
        refusals.note(b"client", WireError("strange"), b"y" * (2 * KEPT_BYTES), 2)
    assert state.rejected.kept == 3
    again = RejectionLog(state, folder)
    for _ in range(2 * KEPT_MESSAGES):
        again.note(b"client", WireError("strange"), b"z", 0)
    assert len(list(folder.glob("*.bin"))) == len(list(folder.glob("*.json"))) == KEPT_MESSAGES
    assert (folder / "1.bin").read_bytes() == b"y" * KEPT_BYTES
    about = msgspec.json.decode((folder / "1.json").read_bytes())
    facts = {"client": anonymous(b"client"), "reason": "strange", "header_bytes": 2 * KEPT_BYTES, "payloads": 2}
    assert about == {"time_s": about["time_s"], **facts}
    (tmp_path / "file").write_text("in the way")
    RejectionLog(state, tmp_path / "file").note(b"c", WireError("strange"), b"x", 0)
    assert state.rejected.refused == 5 + 2 * KEPT_MESSAGES, "a message that cannot be kept is counted all the same"


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
    with refused(WireError, "`$.") as caught:
        wire.decode_request(wire.encode(request_), payloads)
    assert caught.value.request_id == 1
    without_mean = wire.Complete(id=1, node_id="n", token="t", meta=GroupMeta(-1, -1, float("nan"), 0, 4))
    assert isinstance(wire.decode_request(wire.encode(without_mean), 1), wire.Complete), "all of its samples failed"


def test_observers_are_told_a_bounded_number_of_bytes_a_second_however_large_one_answer_is() -> None:
    now = 0.0
    bucket = TokenBucket(100, 200, lambda: now)
    assert bucket.spend(205)  # larger than all: once
    assert not bucket.spend(1)
    now += 1.0
    assert bucket.spend(50)
    assert not bucket.spend(100)
    now += 10.0
    assert [bucket.spend(50) for _ in range(5)] == [True] * 4 + [False]


def test_the_cost_of_an_answer_grows_with_what_it_tells() -> None:
    state = new_state()
    small = [reply_bytes(r, state) for r in (wire.AskLedger(id=1), wire.AskStatus(id=1))]
    LearnerRules(state).offer([Task(i, b"{}", i, 4) for i in range(1000)])
    NodeRules(state).register(node_report())
    large = [reply_bytes(r, state) for r in (wire.AskLedger(id=1), wire.AskStatus(id=1))]
    assert all(a < b for a, b in zip(small, large, strict=True))


BUDGET = 3 << 20  # three answers with events


def test_an_observer_that_asks_without_a_pause_waits_and_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal would end a learner without keys that asks for the status at that moment."""
    monkeypatch.setattr(request_guard, "REPLY_BURST_BYTES", BUDGET)
    monkeypatch.setattr(request_guard, "REPLY_BYTES_A_SECOND", BUDGET)
    with serving() as server, BrokerClient(server.address, deadline_s=LIMIT_S, retry_s=0.2) as client:
        assert [client.events(-1) for _ in range(6)] == [[]] * 6
        assert client.status().refused_messages == 0


def test_what_others_ask_does_not_hold_up_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "REPLY_BURST_BYTES", BUDGET)
    monkeypatch.setattr(request_guard, "REPLY_BYTES_A_SECOND", 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = RequestGuard(context, new_state(), None, None)
    request = wire.AskEvents(id=1, after=-1)
    for _ in range(3):
        guard.check(Identity("k", "observer", "observer"), request)
    with pytest.raises(RateLimited):
        guard.check(Identity("k", "observer", "observer"), request)
    guard.check(Identity("l", "learner", "learner"), request)
    guard.close()
    context.term()
