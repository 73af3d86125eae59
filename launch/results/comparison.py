"""The runs of a report as curves over steps, samples, tokens and seconds, with bands over seeds.

A run is thinned when it is read. Runs whose configs differ only in name, folder and seed form one curve. It is their
mean, with a band from the least to the largest of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from common.config.schema import BaseConfig
from launch.observe.metrics_tail import MetricsTail

AXES = {"steps": "optimizer steps", "samples": "samples", "tokens": "trained tokens", "seconds": "seconds of training"}
POINTS = 400  # most points of a curve; more steps become means of as many successive ones
TIMES = ("step_s", "learner_idle_s", "train_s", "publish_s", "tokens_per_s", "tokens_generated_per_s")
Array = np.ndarray[Any, np.dtype[np.float64]]
Curve = tuple[Array, Array, Array, Array]  # x, mean, least and largest


@dataclass(frozen=True)
class Panel:
    """Curves that share one pair of axes: all `metrics` of one run, or the first one of several runs."""

    title: str
    metrics: Mapping[str, str]  # column: legend; none for evaluations
    logarithmic: bool = False


PANELS = (
    Panel("Reward", {"reward_mean": "reward"}),
    Panel("Loss", {"loss": "loss"}),
    Panel("Loss of held-out rows, nat per token", {"validation_loss": "held-out rows"}),
    Panel("Staleness, versions behind", {"staleness_mean": "mean", "staleness_max": "max"}),
    Panel("Seconds per step, without first steps", {
        "step_s": "whole step", "learner_idle_s": "waiting for groups", "train_s": "training", "publish_s": "publish"}),
    Panel("Entropy, nat per token", {"entropy": "entropy"}),
    Panel("Gradient norm, before clipping", {"grad_norm": "norm"}),
    Panel("Importance ratio, policy over sampler", {
        "ratio_max": "max", "ratio_p99": "99 %", "ratio_mean": "mean", "ratio_p50": "median", "ratio_p1": "1 %"}, True),
    Panel("Effect of corrections, share of tokens", {
        "effective_sample_fraction": "effective sample", "correction_clip_fraction": "weight truncated",
        "correction_masked_fraction": "weight out of bounds", "veto_fraction": "vetoed",
        "objective_clip_fraction": "objective clipped"}),
    Panel("|learner - sampler| log-probability, nat", {
        "mismatch_abs_mean": "same version", "drift_abs_mean": "all trained tokens"}, True),
    Panel("Divergence from the reference", {"kl_mean": "divergence"}),
    Panel("Sampled tokens per sample", {"length_mean": "tokens"}),
    Panel("Tokens per second", {"tokens_per_s": "trained", "tokens_generated_per_s": "generated"}),
    Panel("Share of samples with several versions", {"mixed_version_fraction": "share"}),
    Panel("Learning rate", {"lr": "rate"}),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One run, as far as it is drawn."""

    label: str
    config: BaseConfig | None
    columns: Mapping[str, Array]  # [points] of each axis and metric, NaN where the lines have no value
    evaluations: Sequence[Mapping[str, Any]]
    size: int  # steps of a point

    @classmethod
    def of(
        cls, label: str, config: BaseConfig | None, tail: MetricsTail, alone: bool = True, points: int = POINTS
    ) -> "Compared":
        """Totals over steps are NaN from the first line on that lacks the number, as those of older versions do.

        `alone`: with all metrics of the panels, not only the first ones.
        """

        def column(name: str) -> Array:
            found = (line.get(name) for line in tail.lines)
            return np.array([x if isinstance(x, int | float) else np.nan for x in found], dtype=np.float64)

        size = -(-len(tail.lines) // points)
        step_s, tokens, generated = column("step_s"), column("tokens_trained"), column("tokens_generated_total")
        samples = column("samples")
        if config is not None and config.rl is None:
            samples = np.full(len(samples), float(config.learner.rows_per_step))
        totals = {"samples": samples, "tokens": tokens, "seconds": step_s}
        axes = {"steps": column("step") + 1} | {name: np.cumsum(values) for name, values in totals.items()}
        seconds, grown = np.where(step_s > 0, step_s, np.nan), np.diff(generated, prepend=np.nan)
        rates = {"tokens_per_s": tokens, "tokens_generated_per_s": np.where(grown < 0, np.nan, grown)}
        stale = np.array([(line.get("tokens_by_age") or [1])[0] == 0 for line in tail.lines])  # so drift is included
        starts = np.diff(np.nan_to_num(column("incarnation")), prepend=-1.0) != 0
        last = np.minimum(np.arange(size, len(samples) + size, size), len(samples)) - 1  # the last line of each point
        columns = {name: values[last] for name, values in axes.items()}
        for name in (name for panel in PANELS for name in list(panel.metrics)[: None if alone else 1]):
            values = column(name) if name not in rates else rates[name] / seconds
            if name == "mismatch_abs_mean":
                values = np.where(stale, np.nan, values)
            if name in TIMES and not starts.all():  # a learner's first step includes one-time work
                values = np.where(starts, np.nan, values)
            columns[name] = _thinned(values, size, name.endswith("_max"))
        known = {"dataset", "policy_version", "mean_reward"}
        complete = [line for line in tail.evaluations if known <= line.keys() and line["mean_reward"] is not None]
        return cls(label, config, columns, complete, size)


def _thinned(values: Array, size: int, largest: bool) -> Array:
    """The mean, or the largest, of the values among `size` successive ones; NaN where there is none."""
    padded = np.pad(values, (0, -len(values) % size), constant_values=np.nan)
    rows = np.ma.masked_invalid(padded.reshape(-1, size))
    return np.ma.filled(rows.max(axis=1) if largest else rows.mean(axis=1), np.nan)


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
    both = [(run.columns[axis], run.columns[name]) for run in group]
    parts = [(x[known], y[known]) for x, y in both if (known := np.isfinite(x) & np.isfinite(y)).any()]
    if not parts:
        return None
    grid = np.unique(np.concatenate([x for x, _ in parts]))
    if len(grid) > 2 * POINTS:
        grid = np.linspace(grid[0], grid[-1], POINTS)
    rows = np.ma.masked_invalid([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in parts])
    return grid, *(np.ma.filled(each, np.nan) for each in (rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)))


def evaluated(group: Sequence[Compared], axis: str, dataset: str) -> Curve | None:
    """Mean rewards over `axis`; least and largest are a run's confidence interval, or those of several runs' means."""
    found: dict[float, list[tuple[float, Mapping[str, Any]]]] = {}
    for run in group:
        steps, places = (np.append(0.0, run.columns[name]) for name in ("steps", axis))
        for line in run.evaluations:
            at = float(np.interp(line["policy_version"], steps, places))
            if line["dataset"] == dataset and np.isfinite(at):
                found.setdefault(line["policy_version"], []).append((at, line))
    points: list[tuple[float, ...]] = []
    for _, each in sorted(found.items()):
        ends = rewards = [line["mean_reward"] for _, line in each]
        if len(each) == 1:  # an evaluation may lack its interval
            interval = (each[0][1].get(f"mean_reward_{end}") for end in ("low", "high"))
            ends = [*rewards, *(end for end in interval if end is not None)]
        points.append((float(np.mean([at for at, _ in each])), float(np.mean(rewards)), min(ends), max(ends)))
    return tuple(np.array(points).T) if points else None  # type: ignore[return-value]
