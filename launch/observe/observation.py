"""The newest known status of a run: the broker's answer, or the files that it left behind."""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.connect import Access, connect
from broker.contract import LEARNER_ENDED, LOST_AFTER_S, BrokerStatus, LearnerReport, LedgerEntry, NodeStatus
from common.errors import SlipstreamError
from common.process.lifecycle import alive
from common.process.run_dir import BrokerFile, RunDir
from launch.observe import failures_view, waste_view
from launch.observe.ledger_history import former_ledgers, whole_ledger
from launch.resolve_target import config_of

ANSWER_TIMEOUT_S = 3.0


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
    file = run.broker()
    reason, unreachable = _absent(run), False
    if file is not None:
        if not alive(file.pid):
            reason = f"broker {file.pid} has ended"
        else:
            try:
                with connect(_access(run, file, timeout_s)) as client:
                    return Observation(client.status(), live=True)
            except SlipstreamError as error:
                reason, unreachable = f"broker not reachable: {error}", True
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
    newest = _newest_ledger(run, timeout_s)
    try:
        return whole_ledger(former_ledgers(run), newest)
    except msgspec.DecodeError as error:
        raise SlipstreamError(f"{run.path}: the ledger of an earlier broker cannot be read: {error}") from None


def _newest_ledger(run: RunDir, timeout_s: float) -> list[LedgerEntry]:
    file = run.broker()
    reason = _absent(run)
    if file is not None and alive(file.pid):
        try:
            with connect(_access(run, file, timeout_s)) as client:
                return client.ledger()
        except SlipstreamError as error:
            reason = f"broker not reachable: {error}"
    try:
        return msgspec.json.decode(run.ledger_json.read_bytes(), type=list[LedgerEntry])
    except OSError:
        raise SlipstreamError(f"{run.path}: {reason}, and it left no ledger.json") from None
    except msgspec.DecodeError as error:
        raise SlipstreamError(f"{run.ledger_json} cannot be read: {error}") from None


def _access(run: RunDir, file: BrokerFile, timeout_s: float) -> Access:
    config = config_of(run)
    credentials = config.broker.credentials if config is not None else None
    return Access(address=file.address, role="observer", deadline_s=timeout_s, retry_s=0.5, credentials=credentials)


def _absent(run: RunDir) -> str:
    return "the broker has ended" if run.status_json.exists() else "no broker has run here yet"


def as_json(run: RunDir, seen: Observation) -> dict[str, Any]:
    """The machine-readable form of `slipstream status`; its keys are relied on by other programs."""
    status = seen.status
    return {
        "run": str(run.path.resolve()),
        "name": status.run.name,
        "live": seen.live,
        "note": seen.note,
        "learner": _learner(status.learner, status.learner_last_seen_s, seen.live),
        "broker": {
            "pid": status.pid,
            "address": status.address,
            "groups_ready": status.groups_ready,
            "groups_leased": status.groups_leased,
            "groups_pending": status.groups_pending,
            "groups_taken": status.groups_taken,
            "groups_committed": status.groups_committed,
            "groups_dead": status.groups_dead,
            "groups_filtered": status.groups_filtered,
            "bytes_held": status.bytes_held,
            "max_bytes": status.run.max_bytes,
            "full": status.full,
            "lease_expiries": status.lease_expiries,
            "oldest_lease_s": status.oldest_lease_s,
            "stale_results": status.stale_results,
        },
        "waste": waste_view.as_json(waste_view.whole(status)),
        "samples_failed": failures_view.whole(status, run),
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
    return {
        "pid": report.pid,
        "state": learner_state(report, last_seen_s, live),
        "policy_version": report.policy_version,
        "waiting_on": report.waiting_on,
        "since_s": report.since_s + (last_seen_s if live else 0.0),
        "incarnation": report.incarnation,
        "last_seen_s": last_seen_s,
        "groups_missing": report.groups_missing,
        "deliveries": msgspec.to_builtins(report.deliveries),
        "deliveries_waiting": report.deliveries_waiting,
    }


def _node(node: NodeStatus) -> dict[str, Any]:
    report = node.report
    return {
        "id": report.node_id,
        "pid": report.pid,
        "state": report.state if node.alive else "gone",
        "policy_version": report.policy_version,
        "leases": node.leases,
        "host": report.host,
        "waiting_on": report.waiting_on,
        "since_s": report.since_s + node.last_seen_s,
        "tokens_per_s": report.tokens_per_s,
        "tokens_generated": report.tokens_generated,
        "waste": waste_view.as_json(node.waste),
        "samples_failed": node.report.samples_failed,
        "last_seen_s": node.last_seen_s,
        "episodes_running": report.episodes_running,
        "concurrency": report.concurrency,
        "kv_cache_usage": report.kv_cache_usage,
        "preemptions": report.preemptions,
        "prefix_hit_rate": report.prefix_hit_rate,
        "groups": msgspec.to_builtins(report.groups),
        "flips": report.flips,
        "generation_stall_s": report.generation_stall_s,
        "canary_max_difference": report.canary_max_difference,
        "joined": msgspec.to_builtins(report.joined),
    }
