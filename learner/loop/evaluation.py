"""Evaluation while the job trains: rounds over held-out problems, from a published version to its metrics lines.

    published -> open: the pool gets the version, or the fleet keeps it; the broker gets the problems
    turn -> results from the broker -> RUN/evaluation/VERSION-DIGEST.jsonl -> the broker may forget them
    all are there -> one line per dataset in RUN/metrics.jsonl -> the next round

The file is the memory of a round: a learner that resumes at its version evaluates the problems that it lacks.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from broker.client.calls import LearnerBroker
from common.config.schema import Config
from common.errors import BrokerError, SlipstreamError, StoreChanged
from common.evaluation import EvaluationOrder, EvaluationResult, Interval, mean_interval, pass_at, pass_ks, succeeds
from common.json_lines import LineFile, dataset_rows, lines_of
from common.metrics import EvaluationMetrics
from common.rollouts import Task
from common.weights.source.publisher import WeightPublisher
from learner.loop.run_files import RunFiles

logger = logging.getLogger(__name__)

HOLD = "evaluation"
IDLE_S = 600.0  # without any result, before a round gives way to those that wait for it
LAST_TURN_S = 0.2  # between two looks at the last round


@dataclass
class Round:
    """The evaluation of one version; `results` by the number of the problem over all datasets."""

    order: EvaluationOrder
    path: Path
    results: dict[int, EvaluationResult]
    stored: list[int] = field(default_factory=list[int])  # that the broker may forget
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)  # when the last result came


class Evaluations:
    """One round at a time, and at most one that waits for its turn. The lead rank has one."""

    def __init__(self, config: Config, broker: LearnerBroker, publisher: WeightPublisher, files: RunFiles) -> None:
        """Read the datasets; raises UsageError."""
        told = config.evaluation
        self._broker = broker
        self._publisher = publisher
        self._files = files
        self._every = told.every
        self._samples = told.samples
        self._seed = config.run.seed
        self._problems: list[bytes] = []
        self._datasets: dict[str, range] = {}  # numbers of the problems
        self._digests: dict[str, str] = {}  # one for each dataset, as in its lines
        self._sources: list[str] = []  # one for each problem
        for name, (source, path) in zip(files.datasets, told.held_out, strict=True):
            start = len(self._problems)
            self._problems += [row for _, row in dataset_rows(Path(path), "evaluation.datasets")]
            self._datasets[name] = range(start, len(self._problems))
            self._sources += [source] * len(self._datasets[name])
        self._temperature = config.rollout.temperature if told.temperature is None else told.temperature
        sources = self._sources if config.tasks.sources else []  # as each problem is played
        self._digest = self._digest_of(self._problems, sources)  # results of another config do not count
        for name, numbers in self._datasets.items():
            of_these = slice(numbers.start, numbers.stop)
            self._digests[name] = self._digest_of(self._problems[of_these], sources[of_these])
        self._jobs = config.sources
        self._fleet = told.fleet  # the config's
        self._shared = False  # whether the training fleet plays the round
        self._limit_s = max(IDLE_S, 4 * config.rollout.sample_timeout_s)
        self._round: Round | None = None
        self._next = self._newest = -1  # versions; `_next` waits for its turn, -1: none does

    def published(self, version: int, paused: bool = False) -> None:
        """A version was handed to the publisher; evaluate it if it is due and was not evaluated before.

        `paused`: the publisher keeps it from the training fleet until a person resumes the run.
        """
        self._newest = version
        if version % self._every or {(version, name) for name in self._datasets} <= self._files.evaluated:
            return
        if paused and self._training_fleet():
            return self._files.note("evaluation_skipped", version=version, reason="publishing is paused")
        if self._round is None:
            return self._open(version)
        if self._next >= 0:
            self._files.note("evaluation_skipped", version=self._next, reason="a later version takes its place")
        self._next = version
        self._keep()

    def turn(self, waited_for: bool = False) -> str:
        """Store new results, and end the round when all are there. Returns who is waited for, '' without a round.

        `waited_for`: the run has nothing else to do. Raises BrokerUnreachable, StoreChanged.
        """
        if (now := self._round) is None:
            return ""
        reason = ""
        try:
            if waited_for and not self._shared and now.order.version == self._newest and self._training_fleet():
                self._shared = True  # the pool has gone, and the fleet has the last version
            self._collect(now)
            if len(now.results) == len(self._problems):
                self._finish(now)
            elif time.monotonic() - now.heard > self._limit_s and (waited_for or self._shared or self._next >= 0):
                reason = f"no result for {self._limit_s:g} s"
        except Exception as error:  # such as a full disk, or rewards whose squares are no floats
            if isinstance(error, SlipstreamError) and not isinstance(error, BrokerError):
                raise
            logger.exception("version %d cannot be evaluated", now.order.version)
            reason = f"{type(error).__name__}: {error}"
        if reason:
            counts = {"finished": len(now.results), "problems": len(self._problems)}
            self._files.note("evaluation_abandoned", version=now.order.version, **counts, reason=reason)
            self._close()
        now = self._round
        return f"version {now.order.version}: {len(now.results)} of {len(self._problems)} problems" if now else ""

    def last_turn(self, tell: Callable[[str], object]) -> bool:
        """The run is trained; returns whether its last versions are still evaluated, which `tell` hears of.

        A broker that is away ends that. Raises StoreChanged.
        """
        try:
            text = self.turn(waited_for=True)
        except StoreChanged:
            raise
        except SlipstreamError as error:
            logger.warning("the last version is not evaluated: %s", error)
            return False
        if text:
            tell(text)
            time.sleep(LAST_TURN_S)
        return bool(text)

    def _open(self, version: int) -> None:
        path = self._files.evaluation / f"{version:06d}-{self._digest}.jsonl"
        known = dict[int, EvaluationResult]()
        with contextlib.suppress(OSError):
            known = {line.problem: line for line in lines_of(path.read_bytes(), EvaluationResult)}
        self._round = Round(EvaluationOrder(version, self._files.incarnation, self._temperature), path, known)
        self._shared = self._training_fleet()
        if self._shared:
            self._publisher.hold(HOLD)
        self._keep()

    def _training_fleet(self) -> bool:
        """Whether the training fleet plays: as the config says, else while no node of the pool is alive."""
        if self._fleet is not None:
            return self._fleet == "shared"
        with contextlib.suppress(SlipstreamError):  # the next request says that the broker is away
            return not any(node.alive and node.report.pool for node in self._broker.status().nodes)
        return True

    def _keep(self) -> None:
        versions = (self._round.order.version if self._round else -1, self._next)
        self._publisher.evaluate(*(version for version in versions if version >= 0))

    def _collect(self, now: Round) -> None:
        answer = self._broker.evaluate(now.order, [], now.stored, self._shared)
        now.stored = []
        missing = [number for number in range(len(self._problems)) if number not in now.results]
        if answer.known < len(missing):
            answer = self._broker.evaluate(now.order, list(map(self._task, missing)), [], self._shared)
        if fresh := [result for result in answer.results if self._counts(now, result)]:
            now.path.parent.mkdir(exist_ok=True)
            with contextlib.closing(LineFile(now.path)) as file:
                for result in fresh:
                    file.write(result)
                file.sync()
            now.results |= {result.problem: result for result in fresh}
            now.heard = time.monotonic()
        now.stored = [result.problem for result in answer.results]

    def _counts(self, now: Round, result: EvaluationResult) -> bool:
        """Whether a result is new and wholly of the round's version. Else its problem is played again."""
        lists = (result.rewards, result.lengths, result.stop_reasons, result.errors)
        pure = not any(result.lengths) or {result.version_min, result.version_max} == {now.order.version}
        if pure and all(len(column) == self._samples for column in lists):
            return result.problem not in now.results
        logger.warning("node %s sampled problem %d with other versions", result.node_id, result.problem)
        return False

    def _finish(self, now: Round) -> None:
        held_s = time.monotonic() - now.began if self._shared else 0.0
        for name, numbers in self._datasets.items():
            if (done := (now.order.version, name)) not in self._files.evaluated:
                results = [now.results[number] for number in numbers]
                success = self._jobs[self._sources[numbers.start]].tasks.success
                line = summary(now.order, name, results, held_s, success=success)
                self._files.record(msgspec.structs.replace(line, digest=self._digests[name]))
                self._files.evaluated.add(done)
        self._files.note("evaluation_finished", version=now.order.version)
        self._close()

    def _close(self) -> None:
        """End the round; the version that waits is next."""
        self._round = None
        version = self._next
        self._next = -1
        if self._shared:
            self._publisher.release(HOLD)
            if 0 <= version < self._newest:
                self._files.note("evaluation_skipped", version=version, reason="the fleet goes on with a newer version")
                version = -1
        if version >= 0:
            return self._open(version)
        self._keep()
        with contextlib.suppress(BrokerError):
            self._broker.evaluate(None, [], [])

    def _digest_of(self, problems: list[bytes], sources: list[str]) -> str:
        about = msgspec.msgpack.encode((problems, self._samples, self._temperature, *sources))
        return hashlib.sha256(about).hexdigest()[:8]

    def _task(self, number: int) -> Task:
        seed = int(np.random.SeedSequence([self._seed, number, 2]).generate_state(1)[0]) >> 1
        return Task(number, self._problems[number], seed, self._samples, source=self._sources[number])


def summary(
    order: EvaluationOrder, dataset: str, results: list[EvaluationResult], held_s: float, *, success: float = 1.0
) -> EvaluationMetrics:
    """The metrics line of a dataset, from the results of all its problems; `success`: tasks.success of its source.

    Raises ValueError without any score.
    """
    samples = len(results[0].rewards)
    episodes = len(results) * len(results[0].rewards)
    scored = [rewards for result in results if (rewards := result.scored)]
    if not scored:
        raise ValueError(f"no sample of {dataset} has a score")
    mean, bounds = mean_interval([sum(rewards) / len(rewards) for rewards in scored])
    passes = _passes(results, success)
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
        pass_at_low={k: max(0.0, interval[0]) for k, (_, interval) in passes.items() if interval},
        pass_at_high={k: min(1.0, interval[1]) for k, (_, interval) in passes.items() if interval},
        truncated_fraction=sum(result.stop_reasons.count("length") for result in results) / episodes,
        length_mean=tokens / episodes,
        tokens=tokens,
        seconds=played_s(results),
        held_s=held_s,
    )


def played_s(results: list[EvaluationResult]) -> float:
    """Seconds in which episodes ran, by the clocks of their nodes; without the pause of a round that is resumed."""
    total = end = 0.0
    for began, ended in sorted((each.started_s, each.started_s + each.seconds) for each in results if each.started_s):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


def _passes(results: list[EvaluationResult], success: float) -> dict[str, tuple[float, Interval | None]]:
    """Mean and interval of pass@k by k, every k over the same problems; a sample that failed does not succeed.

    They are the problems whose samples were all scored. Without any, they are all, and no k exceeds their least number.
    """
    counts: list[tuple[int, int]] = []
    for result in results:
        good = zip(result.rewards, result.errors, strict=True)
        right = sum(not error and succeeds(reward, success) for reward, error in good)
        counts.append((len(result.scored), right))
    samples = len(results[0].rewards)
    counts = [(n, right) for n, right in counts if n == samples] or [(n, right) for n, right in counts if n]
    least = min(n for n, _ in counts)
    ks = [k for k in pass_ks(samples) if k <= least]
    return {str(k): mean_interval([pass_at(n, right, k) for n, right in counts]) for k in ks}
