"""The newest known status of a run, its waste and its outcome, from the broker's answer or from the run's files."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from broker.client.calls import LearnerBroker
from broker.client.connect import connect_observer
from broker.contract import LEARNER_ENDED, LOST_AFTER_S, BrokerStatus, NodeStatus
from common.config.schema import Config
from common.errors import SlipstreamError, UsageError
from common.evaluation import EvalResult
from common.process.lock_file import is_locked
from common.process.run_dir import RunDir
from common.run_reader import RecentTail, ends
from common.security.credentials import Role
from common.waste import WASTE_REASONS, Waste, merged_waste
from launch.resolve_target import Target
from learner.loop.run_files import read_record, went_on

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
    begins: bool = False  # `up` has started a learner, which has not attached yet

    @property
    def learner_state(self) -> str:
        """The state it reported; 'silent' when it has not reported for long (killed, stopped or unreachable)."""
        learner = self.status.learner
        if learner is None:
            return "starting" if self.begins else "absent"
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
        status = ask(job, lambda client: client.status(), timeout_s)
        begins = status.learner is None and job.run is not None and is_locked(job.run.up_lock)
        return Observation(status, live=True, begins=begins)
    except SlipstreamError as error:
        reason = str(error)
        if (run := job.run) is None:
            if last is None:
                raise
            return replace(last, live=False, note=reason)
    unreachable = job.broker()[0] != ""
    try:
        status = msgspec.json.decode(run.status_json.read_bytes(), type=BrokerStatus)
        age_s = max(0.0, time.time() - run.status_json.stat().st_mtime)
    except (OSError, ValueError):
        raise SlipstreamError(f"{run.path}: {reason}, and it left no status.json") from None
    return Observation(status, live=False, note=f"{reason}; last known status", unreachable=unreachable, age_s=age_s)


def as_json(run: RunDir | None, seen: Observation, tail: RecentTail | None = None) -> dict[str, Any]:
    """The answer of `slipstream status` for programs, which rely on its keys; ages count up to now.

    `tail`: as in `failed_samples`.
    """
    status, live = seen.status, seen.live
    if status.learner is None:
        waits = "a learner to start" if live and not seen.begins else ""
        learner = NO_LEARNER | {"state": seen.learner_state, "waiting_on": waits}
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
    return about | {"waste": waste_json(whole_waste(status)), "samples_failed": failed_samples(status, tail)}


def _node(node: NodeStatus) -> dict[str, Any]:
    report = node.report
    about = {"id": report.node_id, "state": report.state if node.alive else "gone", "leases": node.leases}
    about["waiting_on"] = report.waiting_on
    times = {"since_s": report.since_s + node.last_seen_s, "last_seen_s": node.last_seen_s}
    return msgspec.to_builtins(report) | about | times | {"waste": waste_json(node.waste)}


def whole_waste(status: BrokerStatus) -> dict[str, Waste]:
    """The waste of all nodes and of the learner, by the reasons of docs/waste.md."""
    learner = status.learner.waste if status.learner is not None else {}
    return merged_waste((status.waste, learner))


def waste_json(wasted: Mapping[str, Waste]) -> dict[str, dict[str, float]]:
    """Every reason, also those under which nothing was lost."""
    return {reason: msgspec.to_builtins(wasted.get(reason, Waste())) for reason in WASTE_REASONS}


def failed_samples(status: BrokerStatus, tail: RecentTail | None) -> dict[str, int]:
    """By stop reason: of the nodes that are there; when none is any more, of the groups that were trained on.

    `tail` has read the run's metrics; None: they are not known.
    """
    if status.nodes:
        return summed(node.report.samples_failed for node in status.nodes)
    return summed([tail.failed] if tail else [])


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = sum((Counter(count) for count in counts), Counter[str]())
    return dict(sorted(total.items()))


def given_up(tasks: int) -> str:
    """'3 tasks given up, every try failed: `slipstream ledger RUN` says why'; '' without any."""
    many = "" if tasks == 1 else "s"
    return f"{tasks:,} task{many} given up, every try failed: `slipstream ledger RUN` says why" if tasks else ""


def dead_tasks(run: RunDir) -> int:
    """Tasks whose every try failed, by RUN/status.json; 0 without it."""
    with suppress(OSError, ValueError):
        return msgspec.json.decode(run.status_json.read_bytes(), type=BrokerStatus).groups_dead
    return 0


class Outcome(msgspec.Struct, frozen=True):
    """Steps, reward, accuracy and places of a run. The figures are those of the files that are there."""

    steps: int
    of: int  # run.steps
    reward: dict[str, float | None]  # means of its first and last steps
    held_out: dict[str, float] = {}  # accuracy of the final model: greedy and sampled, else by dataset
    model: str = ""  # '' while the run is not finished
    report: str = ""
    tasks_given_up: int = 0  # by the newest broker

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is written."""
        return self.model != ""

    def sentence(self) -> str:
        return f"finished: {self.steps} of {self.of} steps{self.words()}"

    def words(self) -> str:
        """The figures and places, '; ' in front of each."""
        first, last = self.reward.values()
        reward = "" if first is None else f"; reward {first:.3f} (first 5 steps) to {last:.3f} (last 10)"
        lost = given_up(self.tasks_given_up)
        return reward + (f"; {lost}" if lost else "") + self.places()

    def places(self) -> str:
        """As `words`, without the reward."""
        accuracies = ", ".join(f"{value:.3f} ({name})" for name, value in self.held_out.items())
        parts = [f"held-out accuracy {accuracies}"] if accuracies else []
        parts += [f"{name} in {place}" for name, place in (("model", self.model), ("report", self.report)) if place]
        return "".join(f"; {part}" for part in parts)


def finished_version(run: RunDir, steps: int) -> int | None:
    """The version of a run's final model; None while it has not done `steps` and written the model."""
    record = read_record(run)
    done = record is not None and record.state == "done" and record.policy_version >= steps
    return record.policy_version if record and done and (run.model / "config.json").is_file() else None


def measured_of(run: RunDir, version: int) -> EvalResult | None:
    """RUN/eval.json, if that measured the run's final model of this version; else None."""
    path, model = run.path / "eval.json", run.model / "config.json"
    with suppress(OSError, ValueError):
        measured = msgspec.json.decode(path.read_bytes(), type=EvalResult)
        if measured.policy_version is not UNSET:
            return measured if measured.policy_version == version else None
        older = model.is_file() and path.stat().st_mtime < model.stat().st_mtime
        return None if older or went_on(run) else measured
    return None


def outcome_of(run: RunDir, config: Config, tail: RecentTail) -> Outcome:
    """The outcome by the run's files, with the metrics that `tail` has read."""
    version = finished_version(run, config.run.steps)
    report = run.report / "report.html"
    steps = tail.last.policy_version if tail.last else 0
    reward = ends(tail.rewards)
    reached = Outcome(steps, config.run.steps, reward, tasks_given_up=dead_tasks(run))
    if version is None:
        return reached
    last = [line for line in tail.evaluations if line.policy_version == version]
    held_out = {line.dataset: line.mean_reward for line in last if not math.isnan(line.mean_reward)}
    if measured := measured_of(run, version):
        held_out = {"greedy": measured.greedy_accuracy, "sampled": measured.sampled_accuracy}
    return msgspec.structs.replace(
        reached,
        steps=version,
        held_out=held_out,
        model=str(run.model),
        report=str(report) if report.is_file() else "",
    )
