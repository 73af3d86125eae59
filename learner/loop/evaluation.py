"""Evaluation while the job trains: rounds over held-out problems, from a published version to its metrics lines.

    published -> open: the pool gets the version, or the fleet keeps it; the broker gets the problems
    turn -> results from the broker -> RUN/evaluation/VERSION-DATASET.jsonl -> the broker may forget them
    all are there -> one line per dataset in RUN/metrics.jsonl -> the next round

The files are the memory of a round: a learner that resumes at its version evaluates the problems that they lack.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from broker.messaging.client_methods import LearnerBroker
from common.config.schema import Config
from common.errors import BrokerError, SlipstreamError
from common.evaluation import (
    EvaluationOrder,
    EvaluationResult,
    Interval,
    mean_interval,
    node_seconds,
    pass_at,
    pass_ks,
)
from common.json_lines import LineFile, dataset_rows, lines_of
from common.metrics import EvaluationMetrics
from common.rollouts import Task
from learner.loop.run_files import RunFiles
from learner.publish.publisher import WeightPublisher

logger = logging.getLogger(__name__)

HOLD = "evaluation"
IDLE_S = 600.0  # without any result, before a round gives way to those that wait for it
LAST_TURN_S = 0.2  # between two looks at the last round
REFUSALS = 3  # results of one problem with other versions' tokens, before it counts as failed


@dataclass
class Round:
    """The evaluation of one version; `results` by the number of the problem in the round."""

    order: EvaluationOrder
    problems: int
    results: dict[int, EvaluationResult]
    stored: list[int] = field(default_factory=list[int])  # that the broker may forget
    refused: Counter[int] = field(default_factory=Counter[int])
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)  # when the last result came

    @property
    def version(self) -> int:
        return self.order.version

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self.problems) if number not in self.results]


class Evaluations:
    """One round at a time, and at most one that waits for its turn. The lead rank has one."""

    def __init__(self, config: Config, broker: LearnerBroker, publisher: WeightPublisher, files: RunFiles) -> None:
        """Read the datasets; raises UsageError."""
        told = config.evaluation
        self._config, self._broker, self._publisher, self._files = config, broker, publisher, files
        self._names = files.datasets
        self._rows = [[row for _, row in dataset_rows(Path(path), "evaluation.datasets")] for path in told.datasets]
        self._starts = [0, *accumulate(map(len, self._rows))]  # number of each dataset's first problem
        self._temperature = config.rollout.temperature if told.temperature is None else told.temperature
        self._shared = told.fleet == "shared"
        self._limit_s = max(IDLE_S, 4 * config.rollout.sample_timeout_s)
        self._round: Round | None = None
        self._next = self._newest = -1  # versions; `_next` waits for its turn, -1: none does
        self._done: set[tuple[int, str]] | None = None  # (version, dataset) with a metrics line

    def published(self, version: int) -> None:
        """A version was handed to the publisher; evaluate it if it is due and was not evaluated before."""
        self._newest = version
        try:
            if self._done is None:
                self._done = {(line.policy_version, line.dataset) for line in self._files.evaluated()}
                self._forget()  # a round of an earlier learner
            if version % self._config.evaluation.every or {(version, name) for name in self._names} <= self._done:
                return
            if self._round is None:
                self._open(version)
            else:
                self._skip("a later version takes its place")
                self._next = version
                self._tell()
        except (OSError, ValueError) as error:
            logger.exception("version %d is not evaluated", version)
            self._event("evaluation_skipped", version=version, reason=str(error))

    def turn(self, waited_for: bool = False) -> str:
        """Store new results, and end the round when all are there. Returns who is waited for, '' without a round.

        `waited_for`: the run has nothing else to do. Raises BrokerUnreachable.
        """
        now = self._round
        if now is None:
            return ""
        try:
            self._collect(now)
            if not now.missing:
                self._finish(now)
            elif time.monotonic() - now.heard > self._limit_s and (waited_for or self._shared or self._next >= 0):
                self._abandon(now, f"no result for {self._limit_s:g} s")
        except (BrokerError, OSError, ValueError) as error:
            logger.exception("version %d cannot be evaluated", now.version)
            self._abandon(now, str(error))
        return self._text()

    def last_turn(self, tell: Callable[[str], object]) -> bool:
        """The run is trained; returns whether its last versions are still evaluated, which `tell` hears of.

        A broker that is away ends that.
        """
        try:
            text = self.turn(waited_for=True)
        except SlipstreamError as error:
            logger.warning("the last version is not evaluated: %s", error)
            return False
        if text:
            tell(text)
            time.sleep(LAST_TURN_S)
        return bool(text)

    def _text(self) -> str:
        now = self._round
        return f"version {now.version}: {len(now.results)} of {now.problems} problems" if now else ""

    def _open(self, version: int) -> None:
        order = EvaluationOrder(version, self._files.incarnation, self._temperature)
        samples = self._config.evaluation.samples
        known: dict[int, EvaluationResult] = {}
        for number, rows in enumerate(self._rows):
            path = self._path(version, number)
            lines = lines_of(path.read_bytes(), EvaluationResult) if path.exists() else ()
            fit = (line for line in lines if line.problem < len(rows) and len(line.rewards) == samples)
            shifted = (replace(line, problem=self._starts[number] + line.problem) for line in fit)
            known |= {line.problem: line for line in shifted}
        self._round = Round(order, self._starts[-1], known)
        if self._shared:
            self._publisher.hold(HOLD)
        self._tell()
        self._event("evaluation_started", version=version, problems=self._starts[-1], finished=len(known))

    def _tell(self) -> None:
        """Let the publisher keep the versions of the rounds."""
        version = [self._round.version] if self._round is not None else []
        self._publisher.evaluate(*version, *([self._next] if self._next >= 0 else []))

    def _collect(self, now: Round) -> None:
        answer = self._broker.evaluate(now.order, [], now.stored, self._shared)
        now.stored = []
        missing = now.missing
        if answer.known < len(missing):
            tasks = [self._task(number) for number in missing]
            answer = self._broker.evaluate(now.order, tasks, [], self._shared)
        fresh = [found for result in answer.results if (found := self._checked(now, result)) is not None]
        for number in range(len(self._rows)):
            first, end = self._starts[number : number + 2]
            self._store(now.version, number, [result for result in fresh if first <= result.problem < end])
        now.results |= {result.problem: result for result in fresh}
        now.stored = [result.problem for result in answer.results]
        if fresh:
            now.heard = time.monotonic()

    def _checked(self, now: Round, result: EvaluationResult) -> EvaluationResult | None:
        """A result that counts; None for one that is known, or that must come again."""
        samples, version, number = self._config.evaluation.samples, now.version, result.problem
        if number in now.results or number >= now.problems:
            return None
        lists = (result.rewards, result.lengths, result.stop_reasons, result.errors)
        pure = not any(result.lengths) or (result.version_min, result.version_max) == (version, version)
        if pure and all(len(column) == samples for column in lists):
            return result
        now.refused[number] += 1
        reason = f"node {result.node_id} sampled it with versions {result.version_min} to {result.version_max}"
        logger.warning("problem %d of the evaluation of version %d is refused: %s", number, version, reason)
        return None if now.refused[number] < REFUSALS else EvaluationResult.failed(number, samples, reason)

    def _store(self, version: int, number: int, results: Sequence[EvaluationResult]) -> None:
        """Append a dataset's results to its file; they are on the disk on return."""
        if not results:
            return
        path = self._path(version, number)
        path.parent.mkdir(exist_ok=True)
        file = LineFile(path)
        try:
            for result in results:
                file.write(replace(result, problem=result.problem - self._starts[number]))
            file.sync()
        finally:
            file.close()

    def _finish(self, now: Round) -> None:
        held_s = time.monotonic() - now.began if self._shared else 0.0
        for number, name in enumerate(self._names):
            first, end = self._starts[number : number + 2]
            if self._done is not None and (now.version, name) not in self._done:
                results = [now.results[problem] for problem in range(first, end)]
                self._files.record(summary(now.order, name, results, held_s))
                self._done.add((now.version, name))
        results = list(now.results.values())
        tokens, spent_s = sum(sum(result.lengths) for result in results), node_seconds(results)
        self._event("evaluation_finished", version=now.version, tokens=tokens, node_seconds=spent_s, held_s=held_s)
        self._close()

    def _abandon(self, now: Round, reason: str) -> None:
        finished = {"version": now.version, "finished": len(now.results), "problems": now.problems}
        self._event("evaluation_abandoned", **finished, reason=reason)
        self._close()

    def _skip(self, reason: str) -> None:
        if self._next >= 0:
            self._event("evaluation_skipped", version=self._next, reason=reason)
            self._next = -1

    def _close(self) -> None:
        """End the round; the version that waits is next."""
        self._round = None
        if self._shared:
            self._publisher.release(HOLD)
            if self._next != self._newest:
                self._skip("the fleet goes on with a newer version")
        if (version := self._next) >= 0:
            self._next = -1
            self._open(version)
        else:
            self._tell()
            self._forget()

    def _forget(self) -> None:
        """Let the broker lease no more problems."""
        with contextlib.suppress(BrokerError):
            self._broker.evaluate(None, [], [])

    def _event(self, kind: str, **detail: object) -> None:
        with contextlib.suppress(OSError):
            self._files.events.add(kind, **detail)

    def _path(self, version: int, number: int) -> Path:
        return self._files.evaluation / f"{version:06d}-{self._names[number]}.jsonl"

    def _task(self, number: int) -> Task:
        dataset = max(i for i in range(len(self._rows)) if self._starts[i] <= number)
        seed = int(np.random.SeedSequence([self._config.run.seed, number, 2]).generate_state(1)[0]) >> 1
        row = self._rows[dataset][number - self._starts[dataset]]
        return Task(number, row, seed, self._config.evaluation.samples)


def summary(order: EvaluationOrder, dataset: str, results: list[EvaluationResult], held_s: float) -> EvaluationMetrics:
    """The metrics line of a dataset, from the results of all its problems."""
    samples, episodes = len(results[0].rewards), len(results) * len(results[0].rewards)
    mean, bounds = mean_interval([sum(result.rewards) / samples for result in results])
    correct = [sum(reward >= 1.0 for reward in result.rewards) for result in results]
    passes = {str(k): mean_interval([pass_at(samples, c, k) for c in correct]) for k in pass_ks(samples)}
    known: dict[str, Interval] = {k: interval for k, (_, interval) in passes.items() if interval is not None}
    started = [result.started_s for result in results if result.started_s]
    ended = [result.started_s + result.seconds for result in results]
    tokens = sum(sum(result.lengths) for result in results)
    return EvaluationMetrics(
        step=order.version,
        policy_version=order.version,
        time_s=time.time(),
        incarnation=order.incarnation,
        dataset=dataset,
        problems=len(results),
        samples=samples,
        temperature=order.temperature,
        failed=sum(bool(error) for result in results for error in result.errors),
        mean_reward=mean,
        mean_reward_low=bounds[0] if bounds else None,
        mean_reward_high=bounds[1] if bounds else None,
        pass_at={k: value for k, (value, _) in passes.items()},
        pass_at_low={k: max(0.0, low) for k, (low, _) in known.items()},
        pass_at_high={k: min(1.0, high) for k, (_, high) in known.items()},
        truncated_fraction=sum(result.stop_reasons.count("length") for result in results) / episodes,
        length_mean=tokens / episodes,
        tokens=tokens,
        seconds=max(ended) - min(started) if started else 0.0,
        node_seconds=node_seconds(results),
        held_s=held_s,
    )
