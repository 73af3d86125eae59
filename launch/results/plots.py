"""The plots of a run: one PNG file each, all of them in overview.png, and as SVG for the page."""

import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

from common.config.schema import Config, SftConfig
from launch.observe.metrics_tail import MetricsTail

INK = "#1f2328"  # text and lines of pictures; the page puts its own colour there
COLOURS = ("#3d85d8", "#e07b39", "#38a169", "#d6539b", "#8f6fd8", "#b08a1f", "#26a3b8", "#d9534f", "#7f8a96", "#8c9a2b")
matplotlib.rcParams |= {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    **{"axes.labelcolor": INK, "axes.edgecolor": INK, "axes.prop_cycle": matplotlib.cycler(color=COLOURS)},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none"},
    **{"font.family": "sans-serif", "axes.formatter.limits": (-2, 5)},
}
MOST_POINTS = 1000  # points of a curve; more steps become means of as many successive ones
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
    Plot(
        "loss",
        "Loss",
        "nat per trained token",
        _curves(loss="cross-entropy", validation_loss="held-out rows"),
        smooth=True,
    ),
    Plot("grad_norm", "Gradient norm", "before clipping", _curves(grad_norm="norm"), logarithmic=True),
    Plot("lr", "Learning rate", "learning rate", _curves(lr="rate")),
    Plot("step_time", "Step", "seconds per step", _curves(step_s="whole step"), first_steps=False),
)


def draw_all(
    plots: Iterable[Plot], tail: MetricsTail, config: Config | SftConfig | None, folder: Path
) -> tuple[list[Path], list[str]]:
    """Write every plot that has points, and the overview; returns the files, and the plots as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [(plot, [curve for curve in drawn_points(plot, tail.lines) if curve[1]]) for plot in plots]
    draws = [(plot.name, partial(_draw, plot, curves, config)) for plot, curves in found if curves]
    draws += [
        (f"evaluation_{number}", partial(_draw_evaluation, dataset, lines))
        for number, (dataset, lines) in enumerate(evaluations_of(tail.evaluations).items(), start=1)
    ]
    rows = -(-len(draws) // COLUMNS)
    overview = plt.figure(figsize=(15, 3.6 * rows))
    single: list[Path] = []
    drawn: list[str] = []
    for (name, draw), cell in zip(draws, cells(len(draws)), strict=True):
        draw(overview.add_subplot(GridSpec(rows, 2 * COLUMNS)[cell]))
        figure, axes = plt.subplots(figsize=(6, 3.7))
        draw(axes)
        figure.tight_layout()
        single.append(save(figure, folder / f"{name}.png", close=False))
        drawn.append(svg_of(figure, name))
    if isinstance(config, Config):
        overview.suptitle(plain(f"{config.run.name}, seed {config.run.seed}, staleness at most {config.staleness.max}"))
    overview.tight_layout()
    return [save(overview, folder / "overview.png"), *single], drawn


def evaluations_of(lines: Lines) -> dict[str, list[Mapping[str, Any]]]:
    """The lines of evaluations by dataset, in the order of their versions."""
    named = [line for line in lines if isinstance(line.get("mean_reward"), int | float) and "policy_version" in line]
    ordered = sorted(named, key=lambda line: line["policy_version"])
    return {
        name: [x for x in ordered if x.get("dataset") == name] for name in {str(x.get("dataset")): 0 for x in named}
    }


def interval(line: Mapping[str, Any]) -> tuple[float, float]:
    """The confidence interval of an evaluation; of no width where it has none."""
    low, high = line.get("mean_reward_low"), line.get("mean_reward_high")
    return (line["mean_reward"] if low is None else low), (line["mean_reward"] if high is None else high)


def thinned(points: Points, largest: bool = False) -> Points:
    """At most MOST_POINTS: the mean, or the largest value, of as many successive ones, at the last one's place."""
    size = -(-len(points) // MOST_POINTS)
    parts = (points[at : at + size] for at in range(0, len(points), size)) if size > 1 else ()
    return [(part[-1][0], (max if largest else mean)(y for _, y in part)) for part in parts] or points


def plain(text: str) -> str:
    """Text for matplotlib that begins no formula; `text` is a name from a config or a file."""
    return text.replace("$", r"\$")


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
    return [(legend, thinned(points, legend == "max")) for legend, points in found]


def running_mean(points: Points) -> Points:
    """Each value becomes the mean of itself and up to SMOOTHING_STEPS - 1 values before it."""
    parts = [points[max(0, end - SMOOTHING_STEPS) : end] for end in range(1, len(points) + 1)]
    return [(part[-1][0], mean(y for _, y in part)) for part in parts]


def save(figure: Figure, path: Path, close: bool = True) -> Path:
    """Write a figure as PNG."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name with signs that the font lacks
        figure.savefig(path, dpi=DOTS_PER_INCH)
    if close:
        plt.close(figure)
    return path


def svg_of(figure: Figure, name: str) -> str:
    """A figure as SVG, whose ids depend on `name`: a page has several."""
    drawn = io.StringIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True)
    plt.close(figure)
    return drawn.getvalue()


def finish(axes: Axes, title: str, x_label: str, label: str, legend: bool = True) -> None:
    """Titles, grid and legend of one pair of axes."""
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)
    axes.grid(alpha=0.2)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _draw(plot: Plot, curves: list[tuple[str, Points]], config: Config | SftConfig | None, axes: Axes) -> None:
    for number, (legend, points) in enumerate(curves):
        smooth, style = plot.smooth and not number, "o-" if plot.smooth and number else "-"
        axes.plot(*zip(*points, strict=True), style, ms=4, label=legend, alpha=0.4 if smooth else 1.0, linewidth=1.3)
        if smooth:
            axes.plot(*zip(*running_mean(points), strict=True), label=f"mean of {SMOOTHING_STEPS}", linewidth=2)
    if plot.name == "staleness" and isinstance(config, Config):
        axes.axhline(config.staleness.max, color=INK, linestyle=":", label="bound")
    if plot.logarithmic and axes.lines:
        axes.set_yscale("log")
    finish(axes, plot.title, plot.x_label, plot.label)


def _draw_evaluation(dataset: str, lines: Lines, axes: Axes) -> None:
    versions, rewards = zip(*((line["policy_version"], line["mean_reward"]) for line in lines), strict=True)
    errors = [[abs(end - line["mean_reward"]) for end in interval(line)] for line in lines]
    bars = list(zip(*errors, strict=True))
    axes.errorbar(versions, rewards, yerr=bars, marker="o", ms=4, capsize=3, label="mean reward")
    for k in dict.fromkeys(k for line in lines for k in line.get("pass_at") or {} if k != "1"):
        known = [(line["policy_version"], line["pass_at"][k]) for line in lines if k in (line.get("pass_at") or {})]
        axes.plot(*zip(*known, strict=True), "o--", ms=3, label=f"pass@{k}")
    finish(axes, plain(f"Evaluation on {dataset}"), "policy version", "with its confidence interval")
