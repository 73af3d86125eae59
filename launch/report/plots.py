"""The PNG plots of a run, one file each and all of them in overview.png."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no display; before pyplot is imported
import matplotlib.pyplot as plt

from common.config.schema import Config
from launch.observe.metrics_tail import MetricsTail

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120
SMOOTHING_STEPS = 5


@dataclass(frozen=True)
class Plot:
    """Metrics that share one pair of axes; `smooth` adds a running mean."""

    name: str
    title: str
    label: str
    metrics: tuple[tuple[str, str], ...]  # (metric, legend)
    smooth: bool = False
    logarithmic: bool = False


PLOTS = (
    Plot("reward", "Reward", "mean reward", (("reward_mean", "reward"),), smooth=True),
    Plot(
        "staleness",
        "Staleness of trained tokens",
        "versions behind",
        (("staleness_mean", "mean"), ("staleness_max", "max")),
    ),
    Plot(
        "step_time",
        "Where the learner's time goes",
        "seconds per step",
        (
            ("step_s", "whole step"),
            ("learner_idle_s", "waiting for groups"),
            ("train_s", "training"),
            ("publish_s", "publish"),
        ),
    ),
    Plot("entropy", "Entropy", "nat per token", (("entropy", "entropy"),)),
    Plot(
        "ratio",
        "Importance ratio, policy over sampler",
        "ratio",
        (
            ("ratio_max", "max"),
            ("ratio_p99", "99 %"),
            ("ratio_mean", "mean"),
            ("ratio_p50", "half"),
            ("ratio_p1", "1 %"),
        ),
        logarithmic=True,
    ),
    Plot(
        "correction",
        "What corrections do to tokens",
        "share of trained tokens",
        (
            ("effective_sample_fraction", "effective sample"),
            ("correction_clip_fraction", "weight truncated"),
            ("correction_masked_fraction", "weight out of bounds"),
            ("veto_fraction", "vetoed"),
            ("objective_clip_fraction", "objective clipped"),
        ),
    ),
    Plot(
        "mismatch",
        "Learner and sampler log-probabilities",
        "mean |difference|, nat",
        (("mismatch_abs_mean", "same version"), ("drift_abs_mean", "all trained tokens")),
        logarithmic=True,
    ),
)

VERSIONS = Plot(
    "versions",
    "Samples that span several versions",
    "share of samples",
    (("mixed_version_fraction", "weights changed in flight"),),
    smooth=True,
)

WARM_START_PLOTS = (
    Plot("loss", "Loss", "nat per trained token", (("loss", "cross-entropy"),), smooth=True),
    Plot("grad_norm", "Gradient norm", "before clipping", (("grad_norm", "norm"),), logarithmic=True),
    Plot("lr", "Learning rate", "learning rate", (("lr", "rate"),)),
    Plot("step_time", "Step", "seconds per step", (("step_s", "whole step"),)),
)


def draw_warm_start(tail: MetricsTail, folder: Path) -> list[Path]:
    """The plots of a warm start; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _single(plot.name, folder, lambda axes, plot=plot: _draw(plot, tail, None, axes)) for plot in WARM_START_PLOTS
    ]


def draw_all(tail: MetricsTail, config: Config | None, folder: Path) -> list[Path]:
    """Write every plot that the metrics allow and the overview; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    overview, grid = plt.subplots(4, 3, figsize=(15, 14.5))
    panels = list(grid.flat)
    for plot, panel in zip(PLOTS, panels, strict=False):
        _draw(plot, tail, config, panel)
        written.append(_single(plot.name, folder, lambda axes, plot=plot: _draw(plot, tail, config, axes)))
    _draw_rates(tail, panels[len(PLOTS)])
    written.append(_single("tokens_per_s", folder, lambda axes: _draw_rates(tail, axes)))
    _draw_reward_over_time(tail, panels[len(PLOTS) + 1])
    written.append(_single("reward_over_time", folder, lambda axes: _draw_reward_over_time(tail, axes)))
    _draw(VERSIONS, tail, config, panels[len(PLOTS) + 2])
    written.append(_single(VERSIONS.name, folder, lambda axes: _draw(VERSIONS, tail, config, axes)))
    for panel in panels[len(PLOTS) + 3 :]:
        panel.set_axis_off()
    if config is not None:
        overview.suptitle(f"{config.run.name}, seed {config.run.seed}, staleness at most {config.staleness.max}")
    written.insert(0, _save(overview, folder / "overview.png"))
    return written


def _single(name: str, folder: Path, draw: "Callable[[Axes], None]") -> Path:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    draw(axes)
    return _save(figure, folder / f"{name}.png")


def _save(figure: "Figure", path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path


def _draw(plot: Plot, tail: MetricsTail, config: Config | None, axes: "Axes") -> None:
    for metric, legend in plot.metrics:
        points = [(line["step"], line[metric]) for line in tail.lines if isinstance(line.get(metric), int | float)]
        if plot.logarithmic:
            points = [(step, value) for step, value in points if value > 0]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=legend, alpha=0.45 if plot.smooth else 1.0, linewidth=1.3)
            if plot.smooth:
                axes.plot(steps, running_mean(values, SMOOTHING_STEPS), label=f"mean of {SMOOTHING_STEPS}", linewidth=2)
    if plot.name == "staleness" and config is not None:
        axes.axhline(config.staleness.max, color="black", linestyle=":", label="bound")
    if plot.logarithmic and axes.lines:
        axes.set_yscale("log")
    _finish(axes, plot.title, "step", plot.label)


def _draw_rates(tail: MetricsTail, axes: "Axes") -> None:
    """Tokens per second between successive steps, from the totals."""
    for metric, legend in (("tokens_generated_total", "generated"), ("tokens_trained_total", "trained")):
        points = rates(tail, metric)
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, running_mean(values, SMOOTHING_STEPS), label=legend)
    _finish(axes, f"Throughput, mean of {SMOOTHING_STEPS} steps", "step", "tokens/s")


def _draw_reward_over_time(tail: MetricsTail, axes: "Axes") -> None:
    start = tail.lines[0]["time_s"] - tail.lines[0].get("step_s", 0.0)
    times = [line["time_s"] - start for line in tail.lines]
    axes.plot(times, running_mean(tail.series("reward_mean"), SMOOTHING_STEPS), linewidth=2, label="reward")
    _finish(axes, f"Reward over time, mean of {SMOOTHING_STEPS} steps", "seconds of training", "mean reward")


def _finish(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def rates(tail: MetricsTail, total: str) -> list[tuple[int, float]]:
    """(step, increase of a running total per second) between successive lines; a total that restarts is left out."""
    out: list[tuple[int, float]] = []
    for before, line in zip(tail.lines, tail.lines[1:], strict=False):
        seconds = line["time_s"] - before["time_s"]
        grown = line.get(total, 0) - before.get(total, 0)
        if seconds > 0 and grown >= 0:
            out.append((line["step"], grown / seconds))
    return out


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """[n] mean of each value and up to `window` - 1 before it."""
    out: list[float] = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        out.append(sum(part) / len(part))
    return out
