"""Watch rules as state machines over the lines of RUN/metrics.jsonl; docs/watch.md. No clock and no files.

    line -> the metric's value -> well, or astray -> astray for `steps` lines: the rule acts, once
                                  well again: it may act again

The state follows from the lines alone, so a learner that is started again reads them and continues as if never killed.
"""

import math
from collections import deque
from statistics import fmean, median

import msgspec

from common.config.observing import WatchRule
from common.metrics import Metrics, StepMetrics, value_of
from learner.backend_protocol import NOTHING_TRAINED
from learner.loop.step_metrics import loss_figures

MEDIAN_OF = 50  # values before the one that is judged
FEWEST = 10  # values before, without which nothing counts as a spike
OF_TRAINED = {"loss", "grad_norm", "staleness_mean", *loss_figures(NOTHING_TRAINED)}  # 0 in a step that trains no token


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that acts: the facts of the event `watch`, and of a command's standard input."""

    rule: str  # its key path, watch[0]
    metric: str
    step: int
    value: float | None  # that was judged; None: not finite
    limit: float | None  # None: no line before gave one
    do: str
    text: str

    @property
    def kind(self) -> str:
        """Which lines it judges: step, or evaluation, whose `step` is the version."""
        return "evaluation" if self.metric.startswith("evaluation/") else "step"


class RuleState:
    """One rule and what it remembers."""

    def __init__(self, number: int, rule: WatchRule) -> None:
        """`number`: its place in the config."""
        self.name = f"watch[{number}]"
        self.rule = rule
        self.firing: Firing | None = None  # from the step at which it acted until the metric is well again
        self._astray = 0  # lines in a row
        self._best: float | None = None  # mean of `steps` values
        self._values: deque[float] = deque(maxlen=MEDIAN_OF if rule.drops is None else rule.steps)

    def see(self, line: Metrics) -> None:
        """Take the next line. It changes nothing where it lacks the metric."""
        value = judged_value(line, self.rule.metric)
        if value is None:
            return
        value, limit = self._judged(value)
        astray = not math.isfinite(value)
        if limit is not None and not astray:
            astray = value > limit if self.rule.upper else value < limit
        self._astray = self._astray + 1 if astray else 0
        if not astray:
            self.firing = None
        elif self.firing is None and self._astray >= (self.rule.steps if self.rule.drops is None else 1):
            self.firing = self._fire(line.step, value, limit)

    def _judged(self, value: float) -> tuple[float, float | None]:
        """(the figure that counts, its limit or None where too little is known)."""
        rule = self.rule
        limit = self.rule.above if self.rule.below is None else self.rule.below
        if rule.drops is not None:
            self._values.append(value)
            if len(self._values) == rule.steps and math.isfinite(value := fmean(self._values)):
                limit = None if self._best is None else self._best - rule.drops * abs(self._best)
                self._best = value if self._best is None else max(self._best, value)
        elif rule.spikes is not None:
            middle = median(self._values) if len(self._values) >= FEWEST else 0.0
            limit = rule.spikes * middle if middle > 0 else None
            if math.isfinite(value):
                self._values.append(value)
        return value, limit

    def _fire(self, step: int, value: float, limit: float | None) -> Firing:
        rule = self.rule
        why = ""
        what = rule.metric if rule.drops is None else f"the mean of {rule.metric} over {rule.steps} steps"
        if rule.drops is not None:
            why = f" (its best mean less {rule.drops:.0%})"
        elif rule.spikes is not None:
            why = f" ({rule.spikes:g} times the median of the steps before)"
        if rule.steps > 1 and rule.drops is None:
            why += f", for {rule.steps} steps"
        found = value if math.isfinite(value) else None
        side = "above" if rule.upper else "below"
        how = "not finite" if found is None or limit is None else f"{found:.6g}, {side} {limit:.6g}{why}"
        text = f"{self.name}: {what} was {how} at step {step}"
        return Firing(rule=self.name, metric=rule.metric, step=step, value=found, limit=limit, do=rule.do, text=text)


def judged_value(line: Metrics, metric: str) -> float | None:
    """The metric in a line; NaN where it was not finite, None where the line lacks it or trained no token of it."""
    if isinstance(line, StepMetrics) and metric in OF_TRAINED and not line.tokens_trained:
        return None
    return value_of(line, metric)
