"""The newest known status of a run: the broker's answer, or the files that it left behind."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from broker.contract import (
    LEARNER_ENDED,
    LOST_AFTER_S,
    BrokerStatus,
    LearnerReport,
    LedgerEntry,
    NodeStatus,
    ObserverBroker,
)
from common.errors import SlipstreamError
from common.process.lifecycle import alive
from common.process.run_dir import RunDir
from launch.observe import waste_view
from launch.observe.broker_access import ask
from launch.observe.ledger_history import former_ledgers, whole_ledger
from launch.resolve_target import config_of

ANSWER_TIMEOUT_S = 3.0
T = TypeVar("T")
# The fields that the JSON form copies as they are.
BROKER_FIELDS = (
    "pid", "address", "groups_ready", "groups_leased", "groups_pending", "groups_taken", "groups_committed",
    "groups_dead", "groups_filtered", "bytes_held", "full", "lease_expiries", "oldest_lease_s", "stale_results",
)  # fmt: skip
LEARNER_FIELDS = (
    "pid", "policy_version", "waiting_on", "incarnation", "groups_missing", "deliveries", "deliveries_waiting",
)  # fmt: skip
NODE_FIELDS = (
    "pid", "policy_version", "host", "waiting_on", "tokens_per_s", "tokens_generated", "samples_failed",
    "episodes_running", "concurrency", "kv_cache_usage", "preemptions", "prefix_hit_rate", "groups", "flips",
    "generation_stall_s", "canary_max_difference", "joined",
)  # fmt: skip


@dataclass(frozen=True)
class Observation:
    """The newest known status of a run.

    Attributes:
        status: from the broker, or from RUN/status.json.
        live: whether the broker answered just now.
        note: why the status is not live, '' when it is.
        unreachable: its process is alive and did not answer, so the status may be outdated.
        age_s: age of the status; 0 when it is live.
    """

    status: BrokerStatus
    live: bool
    note: str = ""
    unreachable: bool = False
    age_s: float = 0.0


def observe(run: RunDir, timeout_s: float = ANSWER_TIMEOUT_S) -> Observation:
    """Ask the broker; fall back to RUN/status.json. Raises SlipstreamError when there is neither."""
    answer, reason, unreachable = _ask(run, timeout_s, lambda client: client.status())
    if answer is not None:
        return Observation(answer, live=True)
    try:
        last = msgspec.json.decode(run.status_json.read_bytes(), type=BrokerStatus)
        age_s = max(0.0, time.time() - run.status_json.stat().st_mtime)
    except (OSError, msgspec.DecodeError):
        raise SlipstreamError(f"{run.path}: {reason}, and it left no status.json") from None
    return Observation(last, live=False, note=f"{reason}; last known status", unreachable=unreachable, age_s=age_s)


def observe_ledger(run: RunDir, timeout_s: float = ANSWER_TIMEOUT_S) -> list[LedgerEntry]:
    """The run's delivery ledger, over all its brokers; raises SlipstreamError when there is none.

    The newest broker's part comes from itself while it runs, else from RUN/ledger.json.
    """
    newest, reason, _ = _ask(run, timeout_s, lambda client: client.ledger())
    try:
        if newest is None:
            newest = msgspec.json.decode(run.ledger_json.read_bytes(), type=list[LedgerEntry])
        return whole_ledger(former_ledgers(run), newest)
    except OSError:
        raise SlipstreamError(f"{run.path}: {reason}, and it left no ledger.json") from None
    except msgspec.DecodeError as error:
        raise SlipstreamError(f"{run.path}: an unreadable ledger of this or an earlier broker: {error}") from None


def _ask(run: RunDir, timeout_s: float, question: Callable[[ObserverBroker], T]) -> tuple[T | None, str, bool]:
    """(the broker's answer, why there is none, whether its process is alive and did not answer)."""
    file = run.broker()
    if file is None:
        return None, "the broker has ended" if run.status_json.exists() else "no broker has run here yet", False
    if not alive(file.pid):
        return None, f"broker {file.pid} has ended", False
    config = config_of(run)
    try:
        return ask(file.address, timeout_s, config.broker.credentials if config else None, question), "", False
    except SlipstreamError as error:
        return None, f"broker not reachable: {error}", True


def as_json(run: RunDir, seen: Observation) -> dict[str, Any]:
    """The machine-readable form of `slipstream status`; its keys are relied on by other programs."""
    status = seen.status
    return {
        "run": str(run.path.resolve()),
        "name": status.run.name,
        "live": seen.live,
        "note": seen.note,
        "learner": _learner(status.learner, status.learner_last_seen_s, seen.live),
        "broker": {**_fields(status, BROKER_FIELDS), "max_bytes": status.run.max_bytes},
        "waste": waste_view.as_json(waste_view.whole(status)),
        "samples_failed": waste_view.failed_samples(status, run),
        "nodes": [_node(node) for node in status.nodes],
    }


def learner_state(report: LearnerReport, last_seen_s: float, live: bool) -> str:
    """The state it reported, or 'silent' when it has not reported for long (killed, stopped or unreachable)."""
    ended = report.state in LEARNER_ENDED
    return "silent" if live and not ended and last_seen_s > LOST_AFTER_S else report.state


def _learner(report: LearnerReport | None, last_seen_s: float, live: bool) -> dict[str, Any]:
    if report is None:
        waiting = "a learner to start" if live else ""
        return {"pid": None, "state": "absent", "policy_version": -1, "waiting_on": waiting, "since_s": 0.0}
    return _fields(report, LEARNER_FIELDS) | {
        "state": learner_state(report, last_seen_s, live),
        "since_s": report.since_s + (last_seen_s if live else 0.0),
        "last_seen_s": last_seen_s,
    }


def _node(node: NodeStatus) -> dict[str, Any]:
    report = node.report
    return _fields(report, NODE_FIELDS) | {
        "id": report.node_id,
        "state": report.state if node.alive else "gone",
        "leases": node.leases,
        "since_s": report.since_s + node.last_seen_s,
        "waste": waste_view.as_json(node.waste),
        "last_seen_s": node.last_seen_s,
    }


def _fields(value: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(value, name)) for name in names}
