"""The newest known status of a run: the broker's answer, or the files that it left behind."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from broker.client.calls import LearnerBroker
from broker.client.connect import connect_observer
from broker.contract import LEARNER_ENDED, LOST_AFTER_S, BrokerStatus, NodeStatus
from common.errors import SlipstreamError, UsageError
from common.process.run_dir import RunDir
from common.security.credentials import Role
from launch.observe import waste_view
from launch.resolve_target import Target

ANSWER_TIMEOUT_S = 3.0
NO_LEARNER = {"pid": None, "state": "absent", "policy_version": -1, "since_s": 0.0}
ELSEWHERE = ("run", "learner", "learner_last_seen_s", "nodes", "left", "waste")  # fields with keys of their own
T = TypeVar("T")


@dataclass(frozen=True)
class Observation:
    """The newest known status of a run."""

    status: BrokerStatus  # from the broker, or from RUN/status.json
    live: bool  # whether the broker answered just now
    note: str = ""  # why the status is not live
    unreachable: bool = False  # the broker's process is alive and did not answer, so the status may be outdated
    age_s: float = 0.0  # 0 when the status is live

    @property
    def learner_state(self) -> str:
        """The state it reported; 'silent' when it has not reported for long (killed, stopped or unreachable)."""
        learner = self.status.learner
        if learner is None:
            return "absent"
        lost = self.live and self.status.learner_last_seen_s > LOST_AFTER_S
        return "silent" if lost and learner.state not in LEARNER_ENDED else learner.state


def ask(
    job: Target, question: Callable[[LearnerBroker], T], timeout_s: float = ANSWER_TIMEOUT_S, role: Role = "observer"
) -> T:
    """The answer of the job's broker. Raises SlipstreamError when there is none; UsageError also at an ADDRESS."""
    address, reason = job.broker()
    if not address:
        raise SlipstreamError(reason)
    try:
        with connect_observer(address, timeout_s, job.credentials, role) as client:
            return question(client)
    except SlipstreamError as error:
        kind = SlipstreamError if job.run and not isinstance(error, UsageError) else UsageError
        raise kind(f"broker not reachable: {error}") from None


def observe(job: Target, timeout_s: float = ANSWER_TIMEOUT_S, last: Observation | None = None) -> Observation:
    """Ask the broker; fall back to RUN/status.json, at an ADDRESS to `last`. Raises SlipstreamError without either."""
    try:
        return Observation(ask(job, lambda client: client.status(), timeout_s), live=True)
    except SlipstreamError as error:
        if job.run is None and last is None:
            raise
        if job.run is None:
            return replace(last, live=False, note=str(error))
        run, reason, unreachable = job.run, str(error), job.broker()[0] != ""
    try:
        last = msgspec.json.decode(run.status_json.read_bytes(), type=BrokerStatus)
        age_s = max(0.0, time.time() - run.status_json.stat().st_mtime)
    except (OSError, ValueError):
        raise SlipstreamError(f"{run.path}: {reason}, and it left no status.json") from None
    return Observation(last, live=False, note=f"{reason}; last known status", unreachable=unreachable, age_s=age_s)


def as_json(run: RunDir | None, seen: Observation) -> dict[str, Any]:
    """The answer of `slipstream status` for programs, which rely on its keys; ages count up to now."""
    status, live = seen.status, seen.live
    if status.learner is None:
        learner = NO_LEARNER | {"waiting_on": "a learner to start" if live else ""}
    else:
        last_seen_s = status.learner_last_seen_s
        times = {"since_s": status.learner.since_s + (last_seen_s if live else 0.0), "last_seen_s": last_seen_s}
        learner = msgspec.to_builtins(status.learner) | {"state": seen.learner_state, **times}
        learner["waiting_on"] = status.learner.waiting_on
    broker = {name: value for name, value in msgspec.to_builtins(status).items() if name not in ELSEWHERE}
    folder = str(run.path.resolve()) if run else status.run.run_dir
    about = {"run": folder, "name": status.run.name, "live": live, "note": seen.note, "learner": learner}
    about |= {"broker": broker | {"max_bytes": status.run.max_bytes}, "nodes": [_node(node) for node in status.nodes]}
    about["left"] = [_node(node) | {"state": "left", "tokens_per_s": 0.0} for node in status.left]
    wasted, failed = waste_view.as_json(waste_view.whole(status)), waste_view.failed_samples(status, run)
    return about | {"waste": wasted, "samples_failed": failed}


def _node(node: NodeStatus) -> dict[str, Any]:
    report = node.report
    about = {"id": report.node_id, "state": report.state if node.alive else "gone", "leases": node.leases}
    about["waiting_on"] = report.waiting_on
    times = {"since_s": report.since_s + node.last_seen_s, "last_seen_s": node.last_seen_s}
    return msgspec.to_builtins(report) | about | times | {"waste": waste_view.as_json(node.waste)}
