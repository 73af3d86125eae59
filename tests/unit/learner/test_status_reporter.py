"""The reporter sends at every change and about once a second; what the lead says it waits for; stalls of nodes."""

import time
from pathlib import Path

import pytest

from broker.contract import BrokerStatus, HeartbeatReply, LearnerReport, NodeReport
from broker.delivery.node_rules import NodeRules
from common.errors import BrokerUnreachable
from common.span_buffer import SpanBuffer
from common.waits import WaitFor, WaitKind, sentence
from common.weights.source.nodes import Undelivered
from learner.checkpoint.folder import StreamState, TrainerState
from learner.loop import status_reporter
from learner.loop.status_reporter import SHOWN_DELIVERIES, StatusReporter
from learner.loop.step_metrics import StallMeter
from tests.rigs.configs import node_status, status_of
from tests.rigs.waiting import LIMIT_S, until
from tests.unit.learner.loop_fakes import MakeWorld

ROUNDING_S = 1e-6  # Unix times as floats


class Sink:
    def __init__(self) -> None:
        self.reports: list[LearnerReport] = []
        self.failures, self.closed = 0, False
        self.answers: list[HeartbeatReply] = []
        self.logs: list[tuple[str | None, int]] = []

    def report(self, report: LearnerReport, log: str | None = None, log_rank: int = -1) -> HeartbeatReply | None:
        if self.failures:
            self.failures -= 1
            raise BrokerUnreachable("away")
        self.reports.append(report)
        self.logs.append((log, log_rank))
        return self.answers.pop(0) if self.answers else None

    def close(self) -> None:
        self.closed = True


def test_a_change_of_state_is_sent_at_once_or_when_the_broker_is_back_and_the_last_one_always() -> None:
    sink = Sink()
    reporter = StatusReporter(lambda: sink, Path())
    reporter.take_over(3, TrainerState(policy_version=7, incarnation=2, tasks=StreamState()))
    reporter.update(weights_address="tcp://127.0.0.1:5")
    assert [r.state for r in sink.reports] == ["starting"]
    sink.failures = 2
    reporter.start()
    reporter.set("training", "the optimizer step 7", policy_version=7)
    until(lambda: any(r.state == "training" for r in sink.reports))
    reporter.set("done", policy_version=8)
    reporter.stop()
    last = sink.reports[-1]
    assert (last.state, last.policy_version, last.incarnation) == ("done", 8, 3)
    assert last.weights_address == "tcp://127.0.0.1:5"
    assert sink.closed


def test_what_the_broker_asks_for_is_done_a_log_comes_with_the_next_report_and_a_stop_is_remembered(tmp_path) -> None:
    (tmp_path / "learner-1.log").write_text("first\n\nlast\n")
    sink = Sink()
    sink.answers = [HeartbeatReply(log_rank=1), HeartbeatReply(log_rank=7), HeartbeatReply(stop=True)]
    reporter = StatusReporter(lambda: sink, tmp_path)
    assert reporter.stop_requested is None
    reporter.start()
    for state in ("waiting", "training", "publishing", "waiting"):
        count = len(sink.logs)
        reporter.set(state)  # is sent at once
        until(lambda count=count: len(sink.logs) > count)
    until(lambda: reporter.stop_requested == "slipstream stop")
    reporter.stop()
    assert sink.logs[:3] == [(None, -1), ("first\nlast", 1), ("", 7)], "rank 7 has no log here"
    assert {log for log, _ in sink.logs[3:]} == {None}


def test_the_answers_tell_how_far_the_brokers_clock_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = SpanBuffer()
    monkeypatch.setattr(status_reporter, "SPANS", spans)
    spans.open()

    class Ahead(Sink):
        def report(self, report: LearnerReport, log: str | None = None, log_rank: int = -1) -> HeartbeatReply:
            return HeartbeatReply(time_s=spans.now() + 50)

    reporter = StatusReporter(Ahead, Path())
    reporter.start()
    reporter.set("training")
    reporter.set("waiting")
    batch = until(lambda: spans.batch("learner", 1 << 20))
    reporter.stop()
    assert abs(batch.offset_s - 50) <= batch.error_s + ROUNDING_S
    assert batch.spans[0].name == "training" and batch.spans[0].kind == "state"


def test_since_starts_over_only_with_another_state_and_groups_are_missing_only_while_they_are_waited_for() -> None:
    reporter = StatusReporter(Sink, Path())
    reporter.set("waiting", WaitFor(WaitKind.GROUPS, count=1, of=4), groups_missing=3)
    time.sleep(0.05)
    reporter.set("waiting", WaitFor(WaitKind.GROUPS, count=2, of=4), groups_missing=2)
    report = reporter.snapshot()
    assert (report.wait.count, report.groups_missing) == (2, 2) and report.since_s >= 0.05
    reporter.set("training")
    report = reporter.snapshot()
    assert report.since_s < 0.05 and report.groups_missing == 0


def test_a_report_names_the_nodes_that_a_version_has_not_reached() -> None:
    reporter = StatusReporter(Sink, Path())
    began = time.perf_counter() - 5
    many = [Undelivered(f"n{i}", 8, "receiving", began) for i in range(SHOWN_DELIVERIES + 4)]
    reporter._undelivered = lambda: many
    report = reporter.snapshot()
    assert [d.node_id for d in report.deliveries] == [f"n{i}" for i in range(SHOWN_DELIVERIES)]
    assert (report.deliveries[0].version, report.deliveries[0].stage) == (8, "receiving")
    assert 5 <= report.deliveries[0].since_s < 5 + LIMIT_S
    assert report.deliveries_waiting == SHOWN_DELIVERIES + 4


def test_silent_ranks_are_reported_in_place_of_what_the_loop_does_until_they_answer() -> None:
    reporter = StatusReporter(Sink, Path())
    reporter.set("training", WaitFor(WaitKind.OPTIMIZER, version=3))
    reporter.set_silence("rank 1 silent for 9 s")
    reporter.set("training", WaitFor(WaitKind.OPTIMIZER, version=4))
    report = reporter.snapshot()
    assert (report.state, report.wait) == (
        "stalled",
        WaitFor(WaitKind.RANKS, cause="rank 1 silent for 9 s"),
    )
    reporter.set_silence("")
    report = reporter.snapshot()
    assert (report.state, report.wait) == ("training", WaitFor(WaitKind.OPTIMIZER, version=4))
    reporter.set_silence("rank 1 silent for 21 s")
    reporter.set("failed", "rank 1 silent for 21 s")
    assert reporter.snapshot().state == "failed"


# ---------------------------------------------------------------- the lead


def status(*nodes: tuple[str, int, float]) -> BrokerStatus:
    """(id, pid, seconds stalled so far) per node."""
    return status_of(*(node_status(name, pid=pid, generation_stall_s=stall) for name, pid, stall in nodes))


def test_stalls_are_differences_of_running_totals_of_nodes_that_come_go_and_restart() -> None:
    meter = StallMeter()
    assert meter.advance(status(("a", 1, 5.0))) == 0.0
    assert meter.advance(status(("a", 1, 5.25), ("b", 2, 0.5))) == 0.75
    assert meter.advance(status(("a", 1, 5.25), ("b", 2, 0.5))) == 0.0
    assert meter.advance(status()) == 0.0
    assert meter.advance(status(("a", 1, 5.5))) == 0.25, "a node that was away loses nothing"
    assert meter.advance(status(("a", 9, 0.25))) == 0.25, "one that restarts counts from zero"


def test_the_wait_names_who_unblocks_it(make_world: MakeWorld) -> None:
    world = make_world()
    world.trainer.source.next_command(0)
    report = world.lead.reporter.snapshot()
    assert (report.state, report.wait) == ("waiting", WaitFor(WaitKind.GROUPS, version=0, of=2))
    world.fleet.work()  # the node registers; it has no weights yet
    world.memory.state.fleet.nodes["fake"].report = NodeReport(
        "fake", 1, "here", "starting", -1, WaitFor(WaitKind.ENGINE)
    )
    world.trainer.source.next_command(0)
    wait = world.lead.reporter.snapshot().wait
    assert (wait.nodes, wait.leased, wait.peer, wait.peer_state) == (1, 0, "fake", "starting")
    assert wait.cause == sentence(WaitFor(WaitKind.ENGINE))
    state = world.memory.state
    start = WaitFor(WaitKind.ENVIRONMENTS, count=2)
    NodeRules(state).register(NodeReport("fake", 1, "here", "environments", 0, start))
    (lease,) = NodeRules(state).lease("fake", 0, 1)
    world.trainer.source.next_command(0)
    wait = world.lead.reporter.snapshot().wait
    assert (wait.nodes, wait.leased, wait.peer, wait.peer_state) == (1, 1, "fake", "environments")
    assert wait.cause == sentence(start)
    NodeRules(state).release("fake", [lease.token])
    world.trainer.run()
    assert world.lead.reporter.snapshot().state == "checkpointing"
