"""Watch rules as state machines over the lines of RUN/metrics.jsonl; docs/watch.md. No clock and no files.

    line -> the metric's value -> well, or astray -> astray for `steps` lines: the rule acts, once
                                  well again: it may act again

The state follows from the lines alone, so a learner that is started again reads them and continues as if never killed.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from common.config.observing import WatchRule
from common.metrics import Metrics, StepMetrics, value_of
from common.rollouts import Group, Sample
from learner.backend_protocol import NOTHING_TRAINED
from learner.batch.batch import TRUNCATED, TrainingBatch
from learner.loop.step_metrics import loss_figures

MEDIAN_OF = 50  # values before the one that is judged
FEWEST = 10  # values before, without which nothing counts as a spike
OF_TRAINED = {"loss", "grad_norm", "staleness_mean", *loss_figures(NOTHING_TRAINED)}  # 0 in a step that trains no token
SHOWN = 5  # groups with the largest contributions, from what the lead rank has of each sample
# From |advantage|, log-probabilities and staleness of a sample's trained tokens; docs/watch.md says what it means.
OF_TOKENS: dict[str, Callable[[float, np.ndarray, np.ndarray], float]] = {
    "grad_norm": lambda advantage, logprobs, age: advantage * (1 - np.exp(logprobs)).sum(),
    "entropy": lambda advantage, logprobs, age: -logprobs.sum(),
    "ratio_max": lambda advantage, logprobs, age: -logprobs.min(),
    "staleness_mean": lambda advantage, logprobs, age: age.sum(),
}
OF_SAMPLES: dict[str, Callable[[Sample], float]] = {
    "truncated_fraction": lambda sample: sample.stop_reason in TRUNCATED,
    "samples_failed": lambda sample: sample.error is not None,
    "reward_mean": lambda sample: sample.reward if sample.error is None else 0.0,
    "length_mean": lambda sample: (sample.loss_mask.numpy() > 0).sum(),
}
LIKE = {
    **{"loss": "grad_norm", "veto_fraction": "ratio_max", "length_max": "length_mean"},
    **dict.fromkeys(("ratio_mean", "ratio_p99", "mismatch_abs_mean", "drift_abs_mean", "kl_mean"), "entropy"),
    **dict.fromkeys(("correction_clip_fraction", "correction_masked_fraction", "objective_clip_fraction"), "entropy"),
}
LARGEST = {"ratio_max", "veto_fraction", "length_max"}  # a group counts by its largest part, elsewhere by the sum


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
    value = value_of(line, metric)
    return math.nan if value is not None and not math.isfinite(value) else value


def largest(metric: str, batch: TrainingBatch, groups: Sequence[Group]) -> list[dict[str, float]]:
    """The groups with the largest contributions, largest first; [] for a metric that groups do not make."""
    kind = LIKE.get(metric, metric)
    parts = defaultdict[int, list[float]](list)
    for document in batch.documents if kind in OF_TOKENS else ():
        trained = document.loss_mask > 0
        assert document.behavior_logprobs is not None and document.staleness is not None
        figures = abs(document.advantage), document.behavior_logprobs[trained], document.staleness[trained]
        parts[document.serial].append(float(OF_TOKENS[kind](*figures)))
    for group in groups if kind in OF_SAMPLES else ():
        parts[group.serial] = [float(OF_SAMPLES[kind](sample)) for sample in group.samples]
    reduce = max if metric in LARGEST else sum
    found = sorted(((reduce(values), serial) for serial, values in parts.items()), reverse=True)
    return [{"serial": serial, "contribution": value} for value, serial in found[:SHOWN] if value > 0]
