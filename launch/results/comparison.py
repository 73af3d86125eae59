"""slipstream report RUN RUN ...: several runs over steps, samples, tokens and seconds, with bands over seeds.

A long run is read, summed up and thinned before the next one is read. Runs whose configs differ only in SEED_KEYS form
one curve: their mean, with a band from the least to the largest of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from common.config.schema import Config, SftConfig
from launch.observe.metrics_tail import MetricsTail
from launch.results.page import Key, Rows, write_page
from launch.results.plots import COLOURS, COLUMNS, evaluations_of, finish, interval, plain, save, svg_of

SEED_KEYS = ("run.seed", "run.name", "run.dir")
AXES = {"steps": "optimizer steps", "samples": "samples", "tokens": "trained tokens", "seconds": "seconds of training"}
PANELS = {
    "reward_mean": "Reward", "loss": "Loss", "validation_loss": "Loss of held-out rows, nat per token",
    "entropy": "Entropy, nat per token", "grad_norm": "Gradient norm", "staleness_mean": "Staleness, versions behind",
    "effective_sample_fraction": "Effective sample, share of tokens", "kl_mean": "Divergence from the reference",
    "mismatch_abs_mean": "|learner - sampler| log-probability, nat", "length_mean": "Sampled tokens per sample",
    "step_s": "Seconds per step", "tokens_per_s": "Trained tokens per second",
}  # fmt: skip
TIMES = ("step_s", "tokens_per_s")  # the first step of a learner process includes one-time work
POINTS = 120  # points of a curve
DASHES = {"-": "", "--": "6 3", ":": "2 3", "-.": "6 3 2 3"}
Array = np.ndarray[Any, np.dtype[np.float64]]
Curve = tuple[Array, Array, Array, Array]  # x, mean, least and largest


@dataclass(frozen=True)
class Compared:
    """One run, as far as it is compared."""

    label: str
    config: Config | SftConfig | None
    summary: dict[str, dict[str, Any]]
    columns: Mapping[str, Array]  # [steps] of each of PANELS and AXES, NaN where a line has no value
    evaluations: Mapping[str, Sequence[Mapping[str, Any]]]

    @classmethod
    def of(
        cls, label: str, config: Config | SftConfig | None, summary: dict[str, dict[str, Any]], tail: MetricsTail
    ) -> "Compared":
        """Totals over steps are NaN from the first line on that lacks the number, as those of older versions do."""

        def column(name: str) -> Array:
            found = (line.get(name) for line in tail.lines)
            return np.array([x if isinstance(x, int | float) else np.nan for x in found], dtype=np.float64)

        columns = {name: column(name) for name in PANELS if name != "tokens_per_s"}
        tokens, samples = column("tokens_trained"), column("samples")
        if isinstance(config, SftConfig):
            samples = np.full(len(samples), float(config.learner.sequences_per_step))
        columns["tokens_per_s"] = tokens / np.where(columns["step_s"] > 0, columns["step_s"], np.nan)
        totals = {"samples": samples, "tokens": tokens, "seconds": columns["step_s"]}
        columns |= {"steps": column("step") + 1} | {name: np.cumsum(values) for name, values in totals.items()}
        starts = np.diff(np.nan_to_num(column("incarnation")), prepend=-1.0) != 0
        for name in TIMES if not starts.all() else ():
            columns[name] = np.where(starts, np.nan, columns[name])
        return cls(label, config, summary, columns, evaluations_of(tail.evaluations))


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


def curve_of(group: Sequence[Compared], axis: str, name: str, size: int) -> Curve | None:
    """The runs of a group, each thinned to means of `size` steps, as one curve over `axis`; None: no points."""
    parts = [_thinned(run.columns[axis], run.columns[name], size) for run in group]
    parts = [(x, y) for x, y in parts if len(x)]
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0][0], parts[0][1], parts[0][1], parts[0][1]
    grid = np.unique(np.concatenate([x for x, _ in parts]))
    if len(grid) > 2 * POINTS:
        grid = np.linspace(grid[0], grid[-1], POINTS)
    rows = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in parts])
    known = ~np.isnan(rows).all(axis=0)
    grid, rows = grid[known], rows[:, known]
    return grid, np.nanmean(rows, axis=0), np.nanmin(rows, axis=0), np.nanmax(rows, axis=0)


def _thinned(x: Array, y: Array, size: int) -> tuple[Array, Array]:
    """Means of `size` successive steps at the last one's place, without those that have no value."""
    starts = np.arange(0, len(x), size)
    counts = np.add.reduceat(np.isfinite(y), starts)
    sums, ends = np.add.reduceat(np.nan_to_num(y, posinf=0.0, neginf=0.0), starts), np.append(starts[1:], len(x)) - 1
    kept = (counts > 0) & np.isfinite(x[ends])
    return x[ends][kept], sums[kept] / counts[kept]


def evaluated(group: Sequence[Compared], axis: str, dataset: str) -> Curve | None:
    """Mean rewards over `axis`; least and largest are a run's confidence interval, or those of several runs' means."""
    found: dict[float, list[tuple[float, Mapping[str, Any]]]] = {}
    for run in group:
        for line in run.evaluations.get(dataset, ()):
            at = float(np.interp(line["policy_version"], run.columns["steps"], run.columns[axis], left=0.0))
            if np.isfinite(at):
                found.setdefault(line["policy_version"], []).append((at, line))
    points: list[tuple[float, ...]] = []
    for _, each in sorted(found.items()):
        rewards = [line["mean_reward"] for _, line in each]
        low, high = interval(each[0][1]) if len(each) == 1 else (min(rewards), max(rewards))
        points.append((float(np.mean([at for at, _ in each])), float(np.mean(rewards)), low, high))
    return tuple(np.array(points).T) if points else None  # type: ignore[return-value]


def compare(runs: Sequence[Compared], tables: Mapping[str, Rows], notes: Sequence[str], folder: Path) -> list[Path]:
    """Write the pictures and the page with these `tables`; returns their paths."""
    groups = grouped(runs)
    styles = [(COLOURS[n % len(COLOURS)], list(DASHES)[n // len(COLOURS) % len(DASHES)]) for n in range(len(groups))]
    labels = [_label(group) for group in groups]
    keys: list[Key] = [(label, colour, DASHES[line]) for label, (colour, line) in zip(labels, styles, strict=True)]
    size = -(-max(len(run.columns["steps"]) for run in runs) // POINTS)
    datasets = dict.fromkeys(name for run in runs for name in run.evaluations)
    pictures: dict[str, list[str]] = {}
    files: list[Path] = []
    for axis, x_label in AXES.items():
        panels: list[tuple[str, list[Curve | None], bool]] = []
        for name, title in PANELS.items():
            curves = [curve_of(group, axis, name, size) for group in groups]
            if any(curve is not None and curve[1].any() for curve in curves):
                panels.append((title, curves, False))
        for dataset in datasets:
            curves = [evaluated(group, axis, dataset) for group in groups]
            panels.append((plain(f"Evaluation on {dataset}: mean reward"), curves, True))
        if not any(curve for _, curves, _ in panels for curve in curves):
            continue  # no run counts samples
        draws = [partial(_draw, title, x_label, curves, bars, labels, styles) for title, curves, bars in panels]
        pictures[f"over {axis}"] = [_panel(draw, f"{axis} {number}") for number, draw in enumerate(draws)]
        files.append(_overview(draws, folder / f"over_{axis}.png"))
    text = [*notes, f"Every point is the mean of {size} steps."] if size > 1 else [*notes]
    if len(groups) < len(runs):
        text.append("A curve of several seeds is their mean; its band reaches from the least to the largest of them.")
    title = "Comparison of " + ", ".join(run.label for run in runs)
    return [write_page(folder / "report.html", title, text, tables, pictures, keys), *files]


def _label(group: Sequence[Compared]) -> str:
    seeds = ", ".join(str(run.config.run.seed) for run in group if run.config is not None)
    return group[0].label if len(group) == 1 else f"{group[0].label} and {len(group) - 1} more, seeds {seeds}"


def _draw(
    title: str, x_label: str, curves: list[Curve | None], bars: bool, labels: list[str], styles: list[tuple[str, str]],
    axes: Axes,
) -> None:  # fmt: skip
    for curve, label, (colour, line) in zip(curves, labels, styles, strict=True):
        if curve is None:
            continue
        x, y, low, high = curve
        axes.plot(x, y, line, color=colour, label=plain(label), lw=1.5, marker="o" if bars or len(x) == 1 else "", ms=4)
        if bars:
            axes.errorbar(x, y, yerr=np.maximum([y - low, high - y], 0.0), color=colour, fmt="none", capsize=3)
        elif (high > low).any():
            axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    finish(axes, title, x_label, "", legend=False)


def _panel(draw: Callable[[Axes], None], name: str) -> str:
    figure, axes = plt.subplots(figsize=(6, 3.5))
    draw(axes)
    figure.subplots_adjust(left=0.13, right=0.98, top=0.92, bottom=0.14)
    return svg_of(figure, name)


def _overview(draws: Sequence[Callable[[Axes], None]], path: Path) -> Path:
    """All panels in one picture, with the legend below them."""
    rows = -(-len(draws) // COLUMNS)
    figure = plt.figure(figsize=(5 * COLUMNS, 3.5 * rows + 0.6))
    for number, draw in enumerate(draws, start=1):
        draw(figure.add_subplot(rows, COLUMNS, number))
    known = {
        label: handle
        for axes in figure.axes[::-1]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.tight_layout(rect=(0, 0.6 / (3.5 * rows + 0.6), 1, 1))
    figure.legend(known.values(), known, loc="lower center", ncols=COLUMNS, fontsize="small")
    return save(figure, path)
