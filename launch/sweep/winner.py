"""The winner of a sweep: a number for each finished run, its mean over the seeds of an arm, and a verdict.

The number is the mean of a metric over the last steps of a run, or the best value of its held-out evaluations. A winner
is clear only if the worst of its seeds is better than the best seed of every other arm. An arm that lacks the value of
a seed is no clear winner, because that seed may be its worst one. Nor is one that runs of other arms may yet overtake.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.config.checks import metric_names, source_metrics
from common.config.schema import BaseConfig
from common.errors import ConfigError, meant
from common.evaluation import dataset_names
from common.metrics import comparable, judged
from common.process.run_dir import RunDir
from common.run_reader import read_tail

LAST_STEPS = 10
VALIDATION = "validation_loss"
EVALUATION = "evaluation/"
# The least value of these is the best by default.
LOWER = ("loss", VALIDATION, "value_loss", "kl_mean", "teacher_kl_mean", "batch_kl")
State = Literal["finished", "failed", "unfinished", "not_started"]
# docs/sweep.md has their meanings.
Verdict = Literal["clear", "one_seed", "incomplete", "within_spread", "tie", "alone", "no_values"]


class Rule(msgspec.Struct, frozen=True):
    metric: str
    better: Literal["max", "min"]
    last: int  # so many steps or evaluations count, with their mean; 0: the best value counts


class Score(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    seed: int
    state: State
    value: float | None  # None: it has none by the rule


class Arm(msgspec.Struct, frozen=True):
    name: str
    values: dict[str, Any]
    runs: list[Score]
    mean: float | None  # over the seeds that have a value
    least: float | None
    largest: float | None

    @classmethod
    def of(cls, name: str, values: dict[str, Any], runs: list[Score]) -> "Arm":
        known = [run.value for run in runs if run.value is not None]
        mean = math.fsum(known) / len(known) if known else None
        return cls(name, values, runs, mean, min(known, default=None), max(known, default=None))


class Decision(msgspec.Struct, frozen=True):
    verdict: Verdict
    winner: str | None  # only of clear and one_seed
    best: list[str]  # arms with the best mean


def parse_rule(word: str | None, config: BaseConfig) -> Rule:
    """METRIC[:max|min][:last N]; None: the held-out evaluation if there is one, else reward or loss.

    Raises ConfigError, which names the nearest metric.
    """
    text = word or _usual_metric(config)
    match = re.fullmatch(r"(.+?)(?::(max|min))?(?::last ?([1-9]\d*))?", text)
    metric, better, last = match.groups() if match else (text, None, None)
    known = metric_names(config) + source_metrics(config)
    if metric not in known and not metric.startswith("environment/"):
        hint = meant(metric, known, "docs/metrics.md lists them")
        raise ConfigError("slipstream sweep", "--winner", "METRIC[:max|min][:last N]", repr(text), hint)
    least = (better or ("min" if metric in LOWER else "max")) == "min"
    usual = 0 if metric == VALIDATION or metric.startswith(EVALUATION) else LAST_STEPS
    return Rule(metric, "min" if least else "max", int(last or usual))


def _usual_metric(config: BaseConfig) -> str:
    if config.rl is None:
        return VALIDATION if config.evaluation.every else "loss"
    if not config.evaluation.every:
        return "reward_mean"
    return f"{EVALUATION}{dataset_names(config.rl.evaluation.paths)[0]}/mean_reward"


def value_by(rule: Rule, run: RunDir, config: BaseConfig) -> float | None:
    """The number of a run; None when it has none, or when one of those that count is not finite.

    A step that trained nothing does not count where it has no value by common.metrics.judged. Nor does an evaluation
    that was made otherwise than the newest one.
    """
    tail = read_tail(run.metrics, config.step_metrics)
    lines = tail.evaluations if rule.metric.startswith(EVALUATION) else tail.lines
    found = [(line, value) for line in lines if (value := judged(line, rule.metric)) is not None]
    values = [value for line, value in found if comparable(line, found[-1][0])][-rule.last :]
    if not values or not all(map(math.isfinite, values)):
        return None
    best = max if rule.better == "max" else min
    return math.fsum(values) / len(values) if rule.last else best(values)


def decide(arms: Sequence[Arm], rule: Rule) -> Decision:
    """The winner by the rule at the top of this file."""
    sign = 1 if rule.better == "max" else -1
    means = {arm.name: sign * arm.mean for arm in arms if arm.mean is not None}
    seeds = {arm.name: [sign * run.value for run in arm.runs if run.value is not None] for arm in arms}
    first, *others = sorted(means, key=lambda name: -means[name]) or [""]
    best = [name for name in means if means[name] == means[first]]
    if not others:
        return Decision("alone" if best else "no_values", None, best)
    if len(best) > 1:
        return Decision("tie", None, best)
    if min(seeds[first]) <= max(max(seeds[name]) for name in others):
        return Decision("within_spread", None, best)
    late = ("unfinished", "not_started")
    if any(run.value is None for arm in arms for run in arm.runs if arm.name == first or run.state in late):
        return Decision("incomplete", None, best)
    single = min(len(seeds[first]), len(seeds[others[0]])) == 1
    return Decision("one_seed" if single else "clear", first, best)
