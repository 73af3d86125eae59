"""The runs of a report as curves over steps, samples, tokens and seconds, with bands over seeds.

A run is thinned when it is read. Runs whose configs differ only in name, folder and seed form one curve. It is their
mean, with a band from the least to the largest of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from common.config.schema import BaseConfig, SftConfig
from common.metrics import DERIVED, PANELS, EvaluationMetrics, SftMetrics, StepMetrics
from common.run_reader import MetricsTail, known
from launch.observe.curves import Array, Curves, columns

AXES = {"steps": "optimizer steps", "samples": "samples", "tokens": "trained tokens", "seconds": "seconds of training"}
POINTS = 512  # most points of a curve; more steps become means of as many successive ones
TIMES = ("step_s", "learner_idle_s", "train_s", "publish_s", *DERIVED)
OWN = "environment/"  # before the names of an environment's own numbers
Curve = tuple[Array, Array, Array, Array]  # x, mean, least and largest


@dataclass(frozen=True)
class Compared:
    """One run, as far as it is drawn."""

    label: str
    config: BaseConfig | None
    columns: Mapping[str, Array]  # [points] of each axis and metric, NaN where the lines have no value
    evaluations: Sequence[EvaluationMetrics]
    size: int  # steps of a point

    @classmethod
    def of(
        cls,
        label: str,
        config: BaseConfig | None,
        tail: MetricsTail[StepMetrics] | MetricsTail[SftMetrics] | MetricsTail[StepMetrics | SftMetrics],
        alone: bool = True,
        points: int = POINTS,
    ) -> "Compared":
        """Totals over steps are NaN from the first line on that lacks the number, as those of older versions do.

        `alone`: with all metrics of the panels, not only the first ones.
        """
        lines: Sequence[StepMetrics | SftMetrics] = tail.lines
        steps_of_rl = [line for line in lines if isinstance(line, StepMetrics)]
        own = {f"{OWN}{name}" for line in steps_of_rl for name in line.environment}
        own |= {f"sources/{name}" for line in steps_of_rl for name in line.sources}
        drawn_names = (name for panel in PANELS for name in (panel.lines if alone else [panel.first]))
        names = list(dict.fromkeys([*drawn_names, *sorted(own)]))
        steps = np.array([line.step for line in lines])
        totals = columns(lines, ("samples", "tokens_trained", "step_s"))
        if isinstance(config, SftConfig):
            totals["samples"] = np.full(len(lines), float(config.learner.sequences_per_step))
        counted = Curves(("step", *totals), points)
        counted.fold(steps - steps.min(), np.stack([steps.astype(np.float64), *totals.values()], axis=1))
        there = counted.counts()[:, 0] > 0  # buckets with steps
        whole = counted.counts() == counted.counts()[:, :1]
        grown = np.cumsum(np.where(whole, counted.sums(), np.nan), axis=0)[there]
        axes = {"steps": counted.largest()[there, 0] + 1, "samples": grown[:, 1], "tokens": grown[:, 2]}
        axes["seconds"] = grown[:, 3]

        drawn = Curves(names, points)
        drawn.fold(steps - steps.min(), np.stack([*drawn_columns(lines, names, totals["step_s"]).values()], axis=1))
        metrics = dict(zip(names, drawn.reduced()[there].T, strict=True))
        complete = [line for line in tail.evaluations if line.dataset and not np.isnan(line.mean_reward)]
        return cls(label, config, {**axes, **metrics}, complete, drawn.width)


def drawn_columns(lines: Sequence[StepMetrics | SftMetrics], names: Sequence[str], step_s: Array) -> dict[str, Array]:
    """[lines] of each metric as it is drawn: without values that mean something else in their steps."""
    found = columns(lines, names)
    if "mismatch_abs_mean" in found:  # a step without tokens of its version includes drift
        stale = [isinstance(line, StepMetrics) and (line.tokens_by_age or [1])[0] == 0 for line in lines]
        found["mismatch_abs_mean"][stale] = np.nan
    more = columns(lines, ("tokens_trained", "tokens_generated_total", "incarnation"))
    grown = np.diff(more["tokens_generated_total"], prepend=np.nan)
    totals = (more["tokens_trained"], np.where(grown < 0, np.nan, grown))
    seconds = np.where(step_s > 0, step_s, np.nan)
    found |= {name: total / seconds for name, total in zip(DERIVED, totals, strict=True) if name in found}
    starts = np.diff(np.nan_to_num(more["incarnation"]), prepend=-1.0) != 0
    if not starts.all():  # a learner's first step includes one-time work
        for name in found.keys() & TIMES:
            found[name][starts] = np.nan
    return found


def grouped(runs: Sequence[Compared]) -> list[list[Compared]]:
    """Runs that form one curve; a run without a config stays alone."""
    found: dict[bytes, list[Compared]] = {}
    for run in runs:
        key = run.label.encode()
        if (config := run.config) is not None:
            alike = msgspec.structs.replace(config.run, name="", dir="", seed=0)
            key = msgspec.json.encode(msgspec.structs.replace(config, run=alike))
        found.setdefault(key, []).append(run)
    return list(found.values())


def curve_of(group: Sequence[Compared], axis: str, name: str) -> Curve | None:
    """The runs of a group as one curve over `axis`; None: no points."""
    both = [(run.columns[axis], run.columns[name]) for run in group if name in run.columns]
    parts = [(x[there], y[there]) for x, y in both if (there := np.isfinite(x) & np.isfinite(y)).any()]
    if not parts:
        return None
    grid = np.unique(np.concatenate([x for x, _ in parts]))
    if len(grid) > 2 * POINTS:
        grid = np.linspace(grid[0], grid[-1], POINTS)
    rows = np.ma.masked_invalid([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in parts])
    mean, least, largest = (
        np.ma.filled(each, np.nan) for each in (rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0))
    )
    return grid, mean, least, largest


def evaluated(group: Sequence[Compared], axis: str, dataset: str) -> Curve | None:
    """Mean rewards over `axis`; least and largest are a run's confidence interval, or those of several runs' means."""
    found: dict[int, list[tuple[float, EvaluationMetrics]]] = {}
    for run in group:
        steps, places = (np.append(0.0, run.columns[name]) for name in ("steps", axis))
        for line in run.evaluations:
            at = float(np.interp(line.policy_version, steps, places))
            if line.dataset == dataset and np.isfinite(at):
                found.setdefault(line.policy_version, []).append((at, line))
    points: list[tuple[float, ...]] = []
    for _, each in sorted(found.items()):
        ends = rewards = [line.mean_reward for _, line in each]
        if len(each) == 1:  # an evaluation may lack its interval
            ends = [*rewards, *known([each[0][1].mean_reward_low, each[0][1].mean_reward_high])]
        points.append((float(np.mean([at for at, _ in each])), float(np.mean(rewards)), min(ends), max(ends)))
    if not points:
        return None
    x, mean, low, high = np.array(points).T
    return x, mean, low, high
