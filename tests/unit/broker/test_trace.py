"""The nodes' spans at the broker: how many may come, what is kept of them, and the clock in its answers."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker import wire
from broker.client.connection import AsyncBrokerClient
from broker.contract import HeartbeatReply
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import SPAN_BYTES_PER_S, NodeRules
from common.config.schema import TelemetryConfig
from common.process.run_dir import RunDir
from common.run_reader import read_batches
from common.span_buffer import BATCH_BYTES
from common.spans import Span, SpanBatch
from tests.rigs.brokers import job, learner_report, new_state, node_report, run_info
from tests.rigs.waiting import LIMIT_S
from tests.unit.broker.conftest import Running

TRACED = run_info(trace=True)
FLIP = Span("flip to version 3", "flip", 1700000000.25, 0.5, "weights", {"version": 3, "stall_s": 0.25, "by": "me"})
BATCH = SpanBatch(who="n0", host="vm", offset_s=0.5, error_s=0.25, dropped=7, spans=[FLIP])


def test_golden_bytes_of_a_heartbeat_with_spans_do_not_change() -> None:
    request = wire.Heartbeat(id=7, report=node_report(), tokens=[], spans=BATCH)
    spans = (
        b"\xa5spans\x86\xa3who\xa2n0\xa4host\xa2vm\xa8offset_s\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa7error_s\xcb?\xd0\x00\x00\x00\x00\x00\x00\xa7dropped\x07\xa5spans\x91\x86\xa4name\xb1flip to version 3"
        b"\xa4kind\xa4flip\xa7start_s\xcbA\xd9T\xfc@\x10\x00\x00\xaaduration_s\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa5track\xa7weights\xa4args\x83\xa7version\x03\xa7stall_s\xcb?\xd0\x00\x00\x00\x00\x00\x00\xa2by\xa2me"
    )
    assert wire.encode(request).endswith(spans)
    assert wire.decode_request(wire.encode(request), 0) == request
    earlier = msgspec.msgpack.decode(wire.encode(request))
    del earlier["spans"]
    assert wire.decode_request(msgspec.msgpack.encode(earlier), 0) == wire.Heartbeat(
        id=7, report=node_report(), tokens=[]
    )


def test_an_earlier_answer_to_a_heartbeat_is_read_as_one_without_a_clock() -> None:
    earlier = {"lost": [], "weights_address": "", "learner_incarnation": 0, "drain": False, "stop": False}
    assert msgspec.convert(earlier | {"log_rank": -1}, HeartbeatReply) == HeartbeatReply()


@pytest.mark.parametrize(
    "bad",
    [
        {"args": {"x": float("nan")}},
        {"args": {"x": [1]}},
        {"args": {str(i): i for i in range(33)}},
        {"duration_s": -1.0},
        {"name": "x" * 70_000},
    ],
)
def test_spans_that_break_a_limit_are_refused(bad: dict[str, object]) -> None:
    request = wire.Heartbeat(report=node_report(), tokens=[], spans=BATCH)
    message = msgspec.msgpack.decode(wire.encode(request))
    message["spans"]["spans"][0] |= bad
    with pytest.raises(wire.WireError):
        wire.decode_request(msgspec.msgpack.encode(message), 0)


@pytest.mark.parametrize(("nodes", "every_s"), [(1, 2.0), (100, 2.0), (1000, 0.5)])
def test_all_nodes_together_may_send_so_many_bytes_a_second_however_often_they_ask(nodes: int, every_s: float) -> None:
    now = 0.0
    state = new_state(TRACED, lambda: now)
    reports = [node_report(f"n{number}") for number in range(nodes)]
    for report in reports:
        NodeRules(state).register(report)
        NodeRules(state).heartbeat(report, [])
    seconds, allowed = 10.0, 0
    for turn in range(int(seconds / every_s)):
        now = (turn + 1) * every_s
        allowed += sum(NodeRules(state).heartbeat(report, []).span_bytes for report in reports)
    assert allowed == pytest.approx(seconds * SPAN_BYTES_PER_S, rel=0.05)
    now += 1e6
    assert NodeRules(state).heartbeat(reports[0], []).span_bytes <= 10 * SPAN_BYTES_PER_S, (
        "a node that was away saved up little"
    )


def test_without_a_trace_the_broker_neither_allows_nor_keeps_spans_and_leaves_the_learner_without_an_answer() -> None:
    kept: list[SpanBatch] = []
    for run, expected in ((run_info(), 0), (TRACED, 1)):
        state = new_state(run)
        state.trace = kept.append
        reply = NodeRules(state).heartbeat(node_report("n1"), [], None, BATCH)
        assert len(kept) == expected
        assert bool(reply.time_s) == bool(reply.span_bytes) == bool(expected)
        answer = LearnerRules(state).report(learner_report())
        assert (answer is not None and answer.time_s > 1.7e9) == bool(expected)
    assert kept[0].who == "n1", "a node speaks for itself only"
    assert msgspec.structs.replace(kept[0], who="n0") == BATCH


@pytest.mark.parametrize(
    "bad",
    [
        {"spans": [FLIP] * 3000},
        {"spans": [msgspec.structs.replace(FLIP, name="x" * 65_000)] * 5},
        {"spans": [FLIP, msgspec.structs.replace(FLIP, start_s=-1e300)]},
        {"spans": [msgspec.structs.replace(FLIP, duration_s=1e15)]},
        {"offset_s": 1e300},
        {"error_s": 1e15},
    ],
)
def test_a_nodes_large_batches_and_absurd_clocks_are_not_kept_and_cost_it_no_lease(bad: dict[str, Any]) -> None:
    kept: list[SpanBatch] = []
    state = new_state(TRACED)
    state.trace = kept.append
    assert NodeRules(state).heartbeat(node_report("n1"), [], None, msgspec.structs.replace(BATCH, **bad)) is not None
    assert not kept
    full = msgspec.structs.replace(BATCH, spans=[FLIP] * (BATCH_BYTES // len(msgspec.json.encode(FLIP)) + 1))
    NodeRules(state).heartbeat(node_report("n1"), [], None, full)
    assert len(kept) == 1, "the largest batch of an honest node"


async def test_spans_that_come_with_a_heartbeat_are_in_the_run_folder_with_those_of_the_broker(
    running: Running, tmp_path: Path
) -> None:
    config = job(tmp_path)
    with running(config) as life:
        async with AsyncBrokerClient(life.address, deadline_s=LIMIT_S) as node:
            run = await node.register(node_report())
            assert run.trace
            reply = await node.heartbeat(node_report(), [], spans=BATCH)
            assert reply.span_bytes > 0
    batches = {batch.who: batch for batch in read_batches(RunDir(tmp_path).trace)}
    assert batches["n0"] == BATCH
    assert [(s.name, s.kind) for s in batches["broker"].spans] == [("leading", "state")]
    assert (batches["broker"].offset_s, batches["broker"].error_s) == (0.0, 0.0)


def test_a_broker_without_a_trace_writes_none(running: Running, tmp_path: Path) -> None:
    config = msgspec.structs.replace(job(tmp_path), telemetry=TelemetryConfig(trace_mib=0))
    with running(config) as life, life.client() as client:
        assert not client.status().run.trace
    assert not RunDir(tmp_path).trace.exists()
