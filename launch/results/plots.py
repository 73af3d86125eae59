"""The PNG plots of a run, one file each and all of them in overview.png."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display; before pyplot is imported
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from common.config.schema import Config
from launch.observe.metrics_tail import MetricsTail

DOTS_PER_INCH = 120
SMOOTHING_STEPS = 5
COLUMNS = 3

Lines = Sequence[Mapping[str, Any]]
Points = list[tuple[float, float]]
Curve = Callable[[Lines], Points]


@dataclass(frozen=True)
class Plot:
    """Curves that share one pair of axes."""

    name: str
    title: str
    label: str
    curves: tuple[tuple[str, Curve], ...]  # (legend, points from the lines of the metrics file)
    smooth: bool = False  # also draw a running mean
    logarithmic: bool = False
    first_steps: bool = True  # False leaves out the first step of each learner process, which includes one-time work
    x_label: str = "step"


def metric(name: str) -> Curve:
    return lambda lines: [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def rate(total: str) -> Curve:
    """Increase per second of a running total between successive lines, smoothed; decreases are left out."""

    def rates(lines: Lines) -> Iterable[tuple[float, float]]:
        for before, line in pairwise(lines):
            seconds, grown = line["time_s"] - before["time_s"], line.get(total, 0) - before.get(total, 0)
            if seconds > 0 and grown >= 0:
                yield line["step"], grown / seconds

    return lambda lines: running_mean(list(rates(lines)))


def same_version(lines: Lines) -> Points:
    """The mismatch of steps with tokens of their own version; in other steps it includes the policy's drift."""
    return metric("mismatch_abs_mean")([line for line in lines if (line.get("tokens_by_age") or [1])[0] > 0])


def reward_over_time(lines: Lines) -> Points:
    start = lines[0]["time_s"] - lines[0].get("step_s", 0.0)
    time_of = {line["step"]: line["time_s"] - start for line in lines}
    return running_mean([(time_of[step], reward) for step, reward in metric("reward_mean")(lines)])


def _curves(**legends: str) -> tuple[tuple[str, Curve], ...]:
    return tuple((legend, metric(name)) for name, legend in legends.items())


PLOTS = (
    Plot("reward", "Reward", "mean reward", _curves(reward_mean="reward"), smooth=True),
    Plot("staleness", "Staleness of tokens", "versions behind", _curves(staleness_mean="mean", staleness_max="max")),
    Plot("step_time", "Where the learner's time goes, without first steps", "seconds per step",
         _curves(step_s="whole step", learner_idle_s="waiting for groups", train_s="training", publish_s="publish"),
         first_steps=False),
    Plot("entropy", "Entropy", "nat per token", _curves(entropy="entropy")),
    Plot("ratio", "Importance ratio, policy over sampler", "ratio",
         _curves(ratio_max="max", ratio_p99="99 %", ratio_mean="mean", ratio_p50="median", ratio_p1="1 %"),
         logarithmic=True),
    Plot("correction", "Effect of corrections on tokens", "share of trained tokens",
         _curves(effective_sample_fraction="effective sample", correction_clip_fraction="weight truncated",
                 correction_masked_fraction="weight out of bounds", veto_fraction="vetoed",
                 objective_clip_fraction="objective clipped")),
    Plot("mismatch", "Learner and sampler log-probabilities", "mean |difference|, nat",
         (("same version", same_version), ("all trained tokens", metric("drift_abs_mean"))), logarithmic=True),
    Plot("tokens_per_s", f"Throughput, mean of {SMOOTHING_STEPS} steps", "tokens/s",
         (("generated", rate("tokens_generated_total")), ("trained", rate("tokens_trained_total")))),
    Plot("reward_over_time", f"Reward over time, mean of {SMOOTHING_STEPS} steps", "mean reward",
         (("reward", reward_over_time),), x_label="seconds of training"),
    Plot("versions", "Samples that span several versions", "share of samples",
         _curves(mixed_version_fraction="weights changed in flight"), smooth=True),
)  # fmt: skip

WARM_START_PLOTS = (
    Plot("loss", "Loss", "nat per trained token", _curves(loss="cross-entropy"), smooth=True),
    Plot("grad_norm", "Gradient norm", "before clipping", _curves(grad_norm="norm"), logarithmic=True),
    Plot("lr", "Learning rate", "learning rate", _curves(lr="rate")),
    Plot("step_time", "Step", "seconds per step", _curves(step_s="whole step"), first_steps=False),
)


def draw_all(plots: Iterable[Plot], tail: MetricsTail, config: Config | None, folder: Path) -> list[Path]:
    """Write every plot that has points, and the overview; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = [plot for plot in plots if any(points for _, points in drawn_points(plot, tail.lines))]
    rows = -(-len(shown) // COLUMNS)
    overview = plt.figure(figsize=(15, 3.6 * rows))
    single: list[Path] = []
    for plot, cell in zip(shown, cells(len(shown)), strict=True):
        _draw(plot, tail, config, overview.add_subplot(GridSpec(rows, 2 * COLUMNS)[cell]))
        figure, axes = plt.subplots(figsize=(7, 4.2))
        _draw(plot, tail, config, axes)
        single.append(_save(figure, folder / f"{plot.name}.png"))
    if config is not None:
        overview.suptitle(f"{config.run.name}, seed {config.run.seed}, staleness at most {config.staleness.max}")
    return [_save(overview, folder / "overview.png"), *single]


def cells(count: int) -> Iterable[tuple[int, slice]]:
    """Row and columns of each plot in a grid of six columns; the plots of the last row share its whole width."""
    for n in range(count):
        row, column = divmod(n, COLUMNS)
        width = 2 * COLUMNS // min(COLUMNS, count - row * COLUMNS)
        yield row, slice(column * width, (column + 1) * width)


def drawn_points(plot: Plot, lines: Lines) -> list[tuple[str, Points]]:
    if not plot.first_steps:
        starts = [None, *(line.get("incarnation", 0) for line in lines)]
        later = [line for line, before in zip(lines, starts, strict=False) if line.get("incarnation", 0) == before]
        lines = later or lines
    found = [(legend, curve(lines)) for legend, curve in plot.curves]
    if plot.logarithmic:
        found = [(legend, [(x, y) for x, y in points if y > 0]) for legend, points in found]
    return found


def running_mean(points: Points) -> Points:
    """Each value becomes the mean of itself and up to SMOOTHING_STEPS - 1 values before it."""
    parts = [points[max(0, end - SMOOTHING_STEPS) : end] for end in range(1, len(points) + 1)]
    return [(part[-1][0], mean(y for _, y in part)) for part in parts]


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path


def _draw(plot: Plot, tail: MetricsTail, config: Config | None, axes: Axes) -> None:
    for legend, points in drawn_points(plot, tail.lines):
        if points:
            axes.plot(*zip(*points, strict=True), label=legend, alpha=0.45 if plot.smooth else 1.0, linewidth=1.3)
            if plot.smooth:
                smoothed = zip(*running_mean(points), strict=True)
                axes.plot(*smoothed, label=f"mean of {SMOOTHING_STEPS}", linewidth=2)
    if plot.name == "staleness" and config is not None:
        axes.axhline(config.staleness.max, color="black", linestyle=":", label="bound")
    if plot.logarithmic and axes.lines:
        axes.set_yscale("log")
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
