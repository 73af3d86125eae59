"""Metrics over steps in bounded memory: the least, mean, largest and summed value of each, per bucket of steps."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.metrics import PANELS, Metrics, StepMetrics, declarations, judged

BUCKETS = 1024  # At most; when a run has more steps, two of them become one.
X_AXES = ("time_s", "tokens_trained_total")  # The page may draw metrics over these, too.
# The metrics that the page draws.
LIVE = tuple(
    dict.fromkeys([*X_AXES, *(name for panel in PANELS if panel.live for name in (*panel.lines, panel.band) if name)])
)
LARGEST = {metric.name for metric in declarations(StepMetrics) if metric.reduction == "max"}
FOLDS = ((np.minimum, np.inf), (np.maximum, -np.inf), (np.add, 0.0), (np.add, 0.0))  # least, largest, sum, count
Array = npt.NDArray[np.float64]


class Curves:
    """Arrays are [buckets, metrics]; bucket i has the steps from i * width on. A new generation voids old ones."""

    def __init__(self, names: Sequence[str] = LIVE, most: int = BUCKETS, generation: int = 0) -> None:
        """`most` buckets, an even number."""
        self.names = tuple(names)
        self.generation = generation
        self.width = 1
        self.used = 0
        self.last = 0
        self._most = most
        self._folded: list[Array] = [np.full((most, len(self.names)), empty) for _, empty in FOLDS]

    def add(self, lines: Iterable[Metrics]) -> None:
        """Add steps; a value that is no finite number, or that means nothing in its step, is passed over."""
        found = [(line.step, *(number(line, name) for name in self.names)) for line in lines]
        if found:
            values = np.array(found)
            self.fold(values[:, 0].astype(np.int64), values[:, 1:])

    def fold(self, steps: npt.NDArray[np.int64], values: Array) -> None:
        """Add `steps`, [n] with n > 0, and the values of the metrics in them, [n, metrics]."""
        while steps.max() // self.width >= self._most:
            self._halve()
        at = steps // self.width
        known = np.isfinite(values)
        for array, (fold, empty), new in zip(self._folded, FOLDS, (values, values, values, known), strict=True):
            fold.at(array, at, np.where(known, new, empty))
        self.used = max(self.used, int(at.max()) + 1)
        self.last = max(self.last, int(steps.max()))

    def since(self, first: int) -> dict[str, Any]:
        """The buckets from `first` on: per metric a list of means, and where a bucket is of several steps its range.

        The mean of a maximum is its largest value.
        """
        found = {"mean": self.reduced()[first:]}
        if self.width > 1:  # infinite in an empty bucket, which JSON has as null
            found |= {"least": self._folded[0][first : self.used], "most": self._folded[1][first : self.used]}
        columns = {kind: dict(zip(self.names, values.T.tolist(), strict=True)) for kind, values in found.items()}
        return {"generation": self.generation, "width": self.width, "last": self.last, "first": first, **columns}

    def means(self) -> Array:
        """[buckets, metrics], NaN where no step has the metric."""
        with np.errstate(invalid="ignore"):
            return self.sums() / self.counts()

    def largest(self) -> Array:
        """[buckets, metrics], NaN where no step has the metric."""
        return np.where(self.counts() > 0, self._folded[1][: self.used], np.nan)

    def reduced(self) -> Array:
        """[buckets, metrics]: the mean, or of a maximum the largest; NaN where no step has the metric."""
        return np.where([name in LARGEST for name in self.names], self.largest(), self.means())

    def sums(self) -> Array:
        return self._folded[2][: self.used]

    def counts(self) -> Array:
        return self._folded[3][: self.used]

    def _halve(self) -> None:
        for array, (fold, empty) in zip(self._folded, FOLDS, strict=True):
            array[: self._most // 2] = fold.reduce(array.reshape(-1, 2, len(self.names)), axis=1)
            array[self._most // 2 :] = empty
        self.width *= 2
        self.used = (self.used + 1) // 2
        self.generation += 1


def number(line: Metrics, name: str) -> float:
    """NaN where the line has no number, or one that means nothing: the loss of a step that trained no token is 0."""
    try:
        found = judged(line, name)
    except OverflowError:
        return np.nan
    return np.nan if found is None else found


def columns(lines: Sequence[Metrics], names: Iterable[str]) -> dict[str, Array]:
    """[lines] of each metric, NaN as `number` has it."""
    return {name: np.array([number(line, name) for line in lines], dtype=np.float64) for name in names}
