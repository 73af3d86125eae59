"""How far a group is, for the node that runs it and for its heartbeat."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.contract import GroupWork
from common.rollouts import Task
from rollout_fleet.episode.driver import Progress

REPORTED = 8  # groups in a heartbeat, the oldest ones


@dataclass
class GroupProgress:
    """How far a group got, also when it is cancelled half-way.

    Attributes:
        task: the leased task.
        leased_at: monotonic seconds.
        started_at: when its first episode began, monotonic seconds; None before.
        lost: the lease was lost, so the broker has counted its seconds.
        episodes: one per sample; empty before the group runs.
    """

    task: Task
    leased_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    lost: bool = False
    episodes: list[Progress] = field(default_factory=list)

    @property
    def sampled_tokens(self) -> int:
        """By calls of the model that ended."""
        return sum(episode.sampled_tokens for episode in self.episodes)

    @property
    def finished(self) -> int:
        """Episodes that ended."""
        return sum(episode.state == "done" for episode in self.episodes)

    @property
    def starting(self) -> int:
        """Episodes whose environment has not given its first observation."""
        return sum(episode.state == "environment" and not episode.turns for episode in self.episodes)

    def seconds(self) -> float:
        """Since its first episode began; 0 before."""
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def report(self, now: float) -> GroupWork:
        """For a heartbeat at `now` (monotonic seconds).

        It describes the episode that has been for longest in the engine or in its environment. Only when none has
        begun, it describes one that waits for a slot.
        """
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
        )


def oldest_groups(groups: Iterable[GroupProgress], now: float) -> list[GroupWork]:
    """Reports of the oldest groups, at most REPORTED of them."""
    return [group.report(now) for group in sorted(groups, key=lambda group: group.leased_at)[:REPORTED]]
