"""Metrics of a run in bounded memory: the least, mean and largest value of each, per bucket of steps."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.observe.line_tail import LineTail
from launch.observe.metrics_tail import MetricsTail

BUCKETS = 1024  # At most; when a run has more steps, two of them become one.
RECENT, EVALUATIONS = 64, 1000
AGES = 6  # classes of StepMetrics.tokens_by_age
NAMES = (
    "reward_mean", "reward_std", "staleness_mean", "staleness_max", "entropy", "loss", "grad_norm", "ratio_max",
    "effective_sample_fraction", "mismatch_abs_mean", "length_mean", "truncated_fraction", "step_s", "learner_idle_s",
    "train_s", "publish_s", "seconds_to_active", "kl_mean", "nodes_live", "time_s",
)  # fmt: skip


class Curves:
    """All arrays are [BUCKETS, metrics]; bucket i has the steps from i * width on. A new generation voids old ones."""

    def __init__(self, generation: int = 0) -> None:
        self.generation, self.width, self.used, self.last = generation, 1, 0, 0
        self._least = np.full((BUCKETS, len(NAMES)), np.inf)
        self._most = -self._least
        self._sum, self._count = np.zeros_like(self._least), np.zeros_like(self._least)

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
        np.minimum.at(self._least, at, np.where(known, values, np.inf))
        np.maximum.at(self._most, at, np.where(known, values, -np.inf))
        np.add.at(self._sum, at, np.where(known, values, 0.0))
        np.add.at(self._count, at, known)
        self.used, self.last = max(self.used, int(at.max()) + 1), max(self.last, int(steps.max()))

    def since(self, first: int) -> dict[str, Any]:
        """The buckets from `first` on: per metric a list of means, and where a bucket is of several steps its range."""
        part = slice(first, self.used)
        count = self._count[part]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._sum[part] / count
        found = {"mean": mean}
        if self.width > 1:
            found |= {"least": self._least[part], "most": self._most[part]}
        rounded = {kind: _rounded(np.where(count > 0, values, np.nan)) for kind, values in found.items()}
        columns = {kind: dict(zip(NAMES, values.T.tolist(), strict=True)) for kind, values in rounded.items()}
        return {"generation": self.generation, "width": self.width, "last": self.last, "first": first, **columns}

    def _halve(self) -> None:
        """Make a bucket of each two."""
        pairs = [array.reshape(-1, 2, len(NAMES)) for array in (self._least, self._most, self._sum, self._count)]
        folded = [pairs[0].min(1), pairs[1].max(1), pairs[2].sum(1), pairs[3].sum(1)]
        for array, empty, half in zip(
            (self._least, self._most, self._sum, self._count), (np.inf, -np.inf, 0, 0), folded, strict=True
        ):
            array[: BUCKETS // 2], array[BUCKETS // 2 :] = half, empty
        self.width, self.used, self.generation = 2 * self.width, (self.used + 1) // 2, self.generation + 1


class BoundedTail(MetricsTail):
    """The metrics of a run for the page. `lines` has only the newest ones; `total` counts all."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self.tail = LineTail(path)
        self._forget(0)

    def _forget(self, generation: int) -> None:
        self.lines = []
        self.curves, self.seen = Curves(generation), 0
        self.expired, self.ages = 0.0, np.zeros(AGES)
        self.ages_of: deque[list[float]] = deque(maxlen=RECENT)
        self.evaluations: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS)
        self.failed = Counter[str]()

    def take(self, replaced: bool, lines: list[dict[str, Any]]) -> None:
        """Add lines that `tail` has read."""
        if replaced:
            self._forget(self.curves.generation + 1)
        steps = [line for line in lines if "kind" not in line]
        self.evaluations.extend(line for line in lines if line.get("kind") == "evaluation")
        self.curves.add(steps)
        self.lines = [*self.lines, *steps][-RECENT:]
        self.seen += len(lines)
        for line in steps:
            self.expired += np.nan_to_num(_number(line.get("tokens_expired")))
            ages = line.get("tokens_by_age")
            if isinstance(ages, list) and len(ages) == AGES:
                self.ages_of.append([float(np.nan_to_num(_number(age))) for age in ages])
                self.ages += self.ages_of[-1]

    def total(self, name: str) -> float:
        """As in MetricsTail; `tokens_expired` is counted over all steps, others over the newest."""
        return self.expired if name == "tokens_expired" else super().total(name)


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan


def _rounded(values: np.ndarray) -> np.ndarray:
    """Six significant digits, and of seconds since 1970 the milliseconds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** np.clip(5 - np.floor(np.log10(np.abs(values))), 3, 12)
    return np.where(np.isfinite(scale), np.round(values * scale) / scale, values)
