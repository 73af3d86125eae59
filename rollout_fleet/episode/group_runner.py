"""Rolls out one leased task: `group_size` episodes of one problem, bounded by the node's concurrency."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from broker.contract import GroupWork
from common.evaluation import EvaluationOrder
from common.rollouts import Group, GroupMeta, Sample, Task
from common.span_buffer import SPANS
from rollout_fleet.episode.concurrency import Slots
from rollout_fleet.episode.driver import EpisodeDriver, Progress

NOTHING = GroupMeta(version_min=-1, version_max=-1, reward_mean=0.0, sampled_tokens=0)


@dataclass
class GroupProgress:
    """How far a group got, also when it is cancelled half-way."""

    task: Task
    leased_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # when its first episode began, monotonic seconds
    lost: bool = False  # the lease was lost, so the broker has counted its seconds
    evaluation: EvaluationOrder | None = None  # the task is a held-out problem of this round
    episodes: list[Progress] = field(default_factory=list)  # one per sample; empty before the group runs

    @property
    def sampled_tokens(self) -> int:
        """By calls of the model that ended."""
        return sum(episode.sampled_tokens for episode in self.episodes)

    @property
    def finished(self) -> int:
        return sum(episode.state == "done" for episode in self.episodes)

    @property
    def starting(self) -> int:
        """Episodes whose environment has not given its first observation."""
        return sum(episode.state == "environment" and not episode.turns for episode in self.episodes)

    @property
    def facts(self) -> dict[str, int]:
        """Arguments of its spans. A held-out problem has no serial, so no step is linked to it."""
        number, order = self.task.serial, self.evaluation
        return {"serial": number} if order is None else {"problem": number, "version": order.version}

    def seconds(self) -> float:
        """Since its first episode began; 0 before."""
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def report(self, now: float) -> GroupWork:
        """For a heartbeat at `now` (monotonic seconds); about its oldest episode, those that wait for a slot last."""
        left = [e for e in self.episodes if e.state != "done"]
        oldest = min([e for e in left if e.state != "queued"] or left, key=lambda e: e.since, default=None)
        return GroupWork(
            serial=self.task.serial,
            samples=self.task.group_size,
            finished=self.finished,
            age_s=max(0.0, now - self.leased_at),
            tokens=self.sampled_tokens,
            turns=oldest.turns if oldest else 0,
            episode_tokens=oldest.sampled_tokens if oldest else 0,
            state=oldest.state if oldest else "queued",
            state_s=max(0.0, now - oldest.since) if oldest else 0.0,
            evaluates=self.evaluation.version if self.evaluation else -1,
        )


@dataclass(frozen=True)
class RolledOut:
    """A finished group; `failure` says why when every one of its samples failed."""

    group: Group
    meta: GroupMeta
    failure: str | None


class GroupRunner:
    """Runs groups concurrently; episodes start in the order in which their groups came, `slots` at a time."""

    def __init__(self, driver: EpisodeDriver, slots: int, on_failure: Callable[[str], None] = lambda _: None) -> None:
        """`on_failure` hears the stop reason of every sample that failed."""
        self._driver, self._on_failure = driver, on_failure
        self.slots = Slots(slots)
        self.on_episode_end: Callable[[], None] = lambda: None
        self.episodes_running = 0

    async def run(self, progress: GroupProgress) -> RolledOut:
        """All samples of `progress.task`, which is kept current; raises SlipstreamError when the engine failed."""
        task = progress.task
        try:
            problem = msgspec.json.decode(task.problem, type=dict[str, Any])
        except msgspec.DecodeError as error:
            reason = f"task {task.serial}: the problem is not a JSON object: {error}"
            return RolledOut(Group(task.serial, []), NOTHING, reason)
        driver = self._driver.at(progress.evaluation.temperature) if progress.evaluation else self._driver
        started = [0.0] * task.group_size
        progress.episodes = [Progress(track=f"episodes/{task.serial}.{i}") for i in range(task.group_size)]

        async def episode(index: int) -> Sample:
            async with self.slots:
                started[index] = time.monotonic()
                if progress.started_at is None:
                    progress.started_at = started[index]
                self.episodes_running += 1
                try:
                    return await driver.run(problem, task.seed + index, progress.episodes[index], task.seed)
                finally:
                    self._ended(progress, index, started[index])
                    self.on_episode_end()
                    self.episodes_running -= 1

        tasks: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(episode(i)) for i in range(task.group_size)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        samples = [t.result() for t in tasks]
        for sample in samples:
            if sample.error is not None:
                self._on_failure(sample.stop_reason)
        return summarize(task.serial, samples, time.monotonic() - min(started))

    @staticmethod
    def _ended(progress: GroupProgress, index: int, began: float) -> None:
        episode, name = progress.episodes[index], f"episode {progress.task.serial}.{index}"
        episode.at("done")
        facts = {**progress.facts, "sample": index, "turns": episode.turns, "tokens": episode.sampled_tokens}
        SPANS.add(name, "episode", began, episode.since, episode.track, **facts)


def summarize(serial: int, samples: list[Sample], generation_s: float) -> RolledOut:
    """The group of `samples` with what broker and ledger want to know of it."""
    good = [s for s in samples if s.error is None]
    versions = [run.version for sample in samples for run in sample.version_runs]  # each starts at a sampled token
    sampled = [int(s.loss_mask.numpy().sum()) for s in samples]
    meta = GroupMeta(
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        reward_mean=sum(s.reward for s in good) / len(good) if good else 0.0,
        sampled_tokens=sum(sampled),
        failed_samples=len(samples) - len(good),
        generation_s=generation_s,
    )
    failure = None if good else f"every sample failed, the first with {samples[0].stop_reason}: {samples[0].error}"
    return RolledOut(Group(serial, samples), meta, failure)
