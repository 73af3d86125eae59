"""Which of several sources each position of the task stream belongs to, and how their weights change; docs/mixtures.md.

Position n draws u(n), the fraction of n times the golden ratio plus a start that follows from run.seed. Source i owns
the stretch of [0, 1) whose length is its share of the weights in effect at n. Such draws are spread evenly (Weyl's
sequence; Knuth, TAOCP 3, section 6.4): a source's part of any stretch of positions is close to its share. A task's row
is the next one of its source, which has its own order and epochs. So everything follows from the seed and the list
of changes of the weights, which lies in the checkpoint and with the broker.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from broker.contract import WeightChange
from common.config.tasks import CurriculumConfig
from common.rollouts import Task

if TYPE_CHECKING:
    from learner.loop.tasks import TaskSource

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, made odd
BLOCK = 4096  # positions that are looked up at once


class Mixture:
    """Tasks of several sources by position."""

    def __init__(
        self, sources: "Mapping[str, TaskSource]", weights: Mapping[str, float], seed: int, rule: CurriculumConfig
    ) -> None:
        self.weights = dict(weights)  # to begin with
        self.rule = rule
        self._sources = dict(sources)
        self._names = sorted(sources)  # whatever the order in the file
        self._start = np.random.SeedSequence([seed, 3]).generate_state(1, np.uint64)[0]
        told = [f"{name} {sources[name].digest}" for name in self._names]
        self.digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
        self._changes: list[WeightChange] = []  # under which these were found:
        self._owners = np.zeros(0, np.uint16)  # [n] number of the source of each position
        self._places = np.zeros(0, np.int64)  # [n] earlier positions of the same source

    def task(self, position: int, changes: Sequence[WeightChange]) -> Task:
        """The task at a position; `changes` are all of the weights, and the first one begins at position 0."""
        name, place = self.where(position, changes)
        return msgspec.structs.replace(self._sources[name].task(place), serial=position, source=name)

    def where(self, position: int, changes: Sequence[WeightChange]) -> tuple[str, int]:
        """(source, place among its tasks) of a position."""
        if len(changes) != len(self._changes) or changes[-1] != self._changes[-1]:
            self._follow(list(changes))
        if position >= len(self._owners):
            self._extend(position + BLOCK)
        return self._names[self._owners[position]], int(self._places[position])

    def _follow(self, changes: list[WeightChange]) -> None:
        """Forget the positions whose weights are others under these changes."""
        pairs = enumerate(zip(changes, self._changes, strict=False))
        same = next((i for i, (a, b) in pairs if a is not b and a != b), min(len(changes), len(self._changes)))
        others = [*changes[same : same + 1], *self._changes[same : same + 1]]
        keep = min((change.position for change in others), default=len(self._owners))
        self._owners = self._owners[:keep]
        self._places = self._places[:keep]
        self._changes = changes

    def _extend(self, end: int) -> None:
        start = len(self._owners)
        draws = ((np.arange(start, end, dtype=np.uint64) * GOLDEN + self._start) >> np.uint64(11)) * 2.0**-53
        owners = np.zeros(end - start, np.uint16)
        begins = [change.position for change in self._changes]  # ascending
        first = max(0, bisect_right(begins, start) - 1)  # earlier ones have no position here
        for number in range(first, bisect_left(begins, end)):
            found = self._changes[number].shares
            shares = np.array([found.get(name, 0.0) for name in self._names])
            edges = np.cumsum(shares)
            until = begins[number + 1] if number + 1 < len(begins) else end
            at = slice(max(0, begins[number] - start), until - start)
            drawn = np.searchsorted(edges / edges[-1], draws[at], side="right")
            owners[at] = np.minimum(drawn, np.flatnonzero(shares)[-1])
        places = np.zeros(end - start, np.int64)
        for number in range(len(self._names)):
            mine = owners == number
            places[mine] = np.count_nonzero(self._owners == number) + np.arange(np.count_nonzero(mine))
        self._owners = np.concatenate([self._owners, owners])
        self._places = np.concatenate([self._places, places])


def factor(success: float, rule: CurriculumConfig) -> float:
    """The factor of a source's weight at a success rate: 1 at the target, `floor` at the end that is farther from it.

    1 - ((p - target) / max(target, 1 - target))^2, at least `floor`. With a target of 0.5 that is 4 p (1 - p),
    the variance of the success. Where it is 0, all samples of a group have the same reward.
    """
    farthest = max(rule.target, 1 - rule.target)
    return max(rule.floor, 1 - ((success - rule.target) / farthest) ** 2)
