"""How far a group is, in the words of a heartbeat."""

import time
from typing import Protocol

from broker.contract import GroupWork, Lease
from rollout_fleet.episode.group_runner import GroupProgress

REPORTED = 8  # groups of a heartbeat, the oldest


class Working(Protocol):
    """What is asked of a lease that is worked on."""

    lease: Lease
    progress: GroupProgress


def work_of(working: Working, now: float) -> GroupWork:
    """Of one group; `now` in monotonic seconds.

    The episode that is told about is the one that has been where it is for longest: in the engine when it is long, in
    its environment when that does not answer; in no place yet only when none has begun.
    """
    task, progress = working.lease.task, working.progress
    left = [e for e in progress.episodes if e.place != "done"]
    oldest = min([e for e in left if e.place != "room"] or left, key=lambda e: e.since, default=None)
    return GroupWork(
        serial=task.serial,
        samples=task.group_size,
        finished=progress.finished,
        age_s=max(0.0, now - progress.leased_at),
        tokens=progress.sampled_tokens,
        turns=oldest.turns if oldest else 0,
        episode_tokens=oldest.sampled_tokens if oldest else 0,
        place=oldest.place if oldest else "room",
        place_s=max(0.0, now - oldest.since) if oldest else 0.0,
    )


def oldest_work(every: list[Working], now: float | None = None) -> list[GroupWork]:
    """The oldest groups, REPORTED of them."""
    at = time.monotonic() if now is None else now
    return [work_of(one, at) for one in sorted(every, key=lambda w: w.progress.leased_at)[:REPORTED]]
