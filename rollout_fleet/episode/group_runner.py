"""Rolls out one leased task: `group_size` episodes of one problem, bounded by the node's concurrency."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.rollouts import Group, GroupMeta, Sample, Task
from rollout_fleet.episode.concurrency import Slots
from rollout_fleet.episode.driver import EpisodeDriver, Progress
from rollout_fleet.episode.group_progress import GroupProgress

NOTHING = GroupMeta(version_min=-1, version_max=-1, reward_mean=0.0, sampled_tokens=0)


@dataclass(frozen=True)
class RolledOut:
    """A finished group; `failure` says why when every one of its samples failed."""

    group: Group
    meta: GroupMeta
    failure: str | None


class GroupRunner:
    """Runs groups concurrently; episodes start in the order in which their groups came, `concurrency` at a time."""

    def __init__(
        self, driver: EpisodeDriver, concurrency: int, on_failure: Callable[[str], None] = lambda reason: None
    ) -> None:
        """`on_failure` hears the stop reason of every sample that failed."""
        self._driver, self._on_failure = driver, on_failure
        self.slots = Slots(concurrency)
        self.on_episode_end: Callable[[], None] = lambda: None
        self.episodes_running = 0

    async def run(self, progress: GroupProgress) -> RolledOut:
        """All samples of `progress.task`; `progress` is kept current for the caller.

        Raises:
            SlipstreamError: the engine failed.
        """
        task = progress.task
        try:
            problem = _decode_problem(task)
        except ValueError as error:
            return RolledOut(Group(task.serial, []), NOTHING, str(error))
        started = [0.0] * task.group_size
        progress.episodes = [Progress() for _ in range(task.group_size)]

        async def episode(index: int) -> Sample:
            async with self.slots:
                started[index] = time.monotonic()
                if progress.started_at is None:
                    progress.started_at = started[index]
                self.episodes_running += 1
                try:
                    return await self._driver.run(problem, task.seed + index, progress.episodes[index], task.seed)
                finally:
                    progress.episodes[index].at("done")
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


def _decode_problem(task: Task) -> dict[str, object]:
    try:
        problem = msgspec.json.decode(task.problem)
    except msgspec.DecodeError as error:
        raise ValueError(f"task {task.serial}: the problem is not JSON: {error}") from error
    if not isinstance(problem, dict):
        raise ValueError(f"task {task.serial}: the problem is a {type(problem).__name__}, not an object")
    return problem


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
