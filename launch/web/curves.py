"""Metrics of a run in bounded memory: the least, mean and largest value of each, per bucket of steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.observe.metrics_tail import LineTail, MetricsTail

BUCKETS = 1024  # At most; when a run has more steps, two of them become one.
RECENT, EVALUATIONS = 64, 1000
NAMES = (  # those that the page draws, and one that it counts
    "reward_mean", "reward_std", "staleness_mean", "staleness_max", "entropy", "loss", "grad_norm",
    "effective_sample_fraction", "mismatch_abs_mean", "length_mean", "truncated_fraction", "step_s", "learner_idle_s",
    "train_s", "publish_s", "tokens_expired",
)  # fmt: skip
FOLDS = ((np.minimum, np.inf), (np.maximum, -np.inf), (np.add, 0.0), (np.add, 0.0))  # least, largest, sum, count


class Curves:
    """Arrays are [BUCKETS, metrics]; bucket i has the steps from i * width on. A new generation voids old ones."""

    def __init__(self, generation: int = 0) -> None:
        self.generation, self.width, self.used, self.last = generation, 1, 0, 0
        self.folded = [np.full((BUCKETS, len(NAMES)), empty) for _, empty in FOLDS]

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add steps; a line without a step, and a value that is no finite number, are passed over."""
        kept = [line for line in lines if type(line.get("step")) is int and 0 <= line["step"] < 1 << 62]
        if not kept:
            return
        steps = np.array([line["step"] for line in kept])
        values = np.array([[_number(line.get(name)) for name in NAMES] for line in kept])
        while steps.max() // self.width >= BUCKETS:
            self._halve()
        at, known = steps // self.width, np.isfinite(values)
        for array, (fold, empty), new in zip(self.folded, FOLDS, (values, values, values, known), strict=True):
            fold.at(array, at, np.where(known, new, empty))
        self.used, self.last = max(self.used, int(at.max()) + 1), max(self.last, int(steps.max()))

    def since(self, first: int) -> dict[str, Any]:
        """The buckets from `first` on: per metric a list of means, and where a bucket is of several steps its range."""
        least, most, total, count = (array[first : self.used] for array in self.folded)
        with np.errstate(invalid="ignore"):
            found = {"mean": total / count}
        if self.width > 1:
            found |= {"least": least, "most": most}  # infinite in an empty bucket, which JSON has as null
        columns = {kind: dict(zip(NAMES, values.T.tolist(), strict=True)) for kind, values in found.items()}
        return {"generation": self.generation, "width": self.width, "last": self.last, "first": first, **columns}

    def _halve(self) -> None:
        """Make a bucket of each two."""
        for array, (fold, empty) in zip(self.folded, FOLDS, strict=True):
            array[: BUCKETS // 2] = fold.reduce(array.reshape(-1, 2, len(NAMES)), axis=1)
            array[BUCKETS // 2 :] = empty
        self.width, self.used, self.generation = 2 * self.width, (self.used + 1) // 2, self.generation + 1


class BoundedTail(MetricsTail):
    """The metrics of a run for the page: `lines` and `evaluations` have only the newest ones, `curves` all."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self.tail, self.curves, self.steps = LineTail(path), Curves(), 0

    def take(self, replaced: bool, lines: list[dict[str, Any]]) -> None:
        """Add lines that `tail` has read."""
        if replaced:
            self.lines, self.evaluations, self.steps = [], [], 0
            self.curves = Curves(self.curves.generation + 1)
        steps = [line for line in lines if "kind" not in line]
        evaluations = [line for line in lines if line.get("kind") == "evaluation"]
        self.curves.add(steps)
        self.lines = [*self.lines, *steps][-RECENT:]
        self.evaluations = [*self.evaluations, *evaluations][-EVALUATIONS:]
        self.steps += len(steps)

    def total(self, name: str) -> float:
        """The sum of one metric of NAMES over all steps."""
        return float(self.curves.folded[2][:, NAMES.index(name)].sum())


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
