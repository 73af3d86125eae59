"""The pictures of a report: a PNG file per axis, for one run also per panel, and SVG for the page."""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display; before pyplot is imported
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from common.config.schema import Config
from launch.results.comparison import AXES, PANELS, Compared, Curve, curve_of, evaluated, grouped
from launch.results.page import INK, Key

COLOURS = ("#3d85d8", "#e07b39", "#38a169", "#d6539b", "#8f6fd8", "#b08a1f", "#26a3b8", "#d9534f", "#7f8a96", "#8c9a2b")
DASHES = {"-": "", "--": "6 3", ":": "2 3", "-.": "6 3 2 3"}
matplotlib.rcParams |= {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    **{"axes.labelcolor": INK, "axes.edgecolor": INK, "axes.grid": True, "grid.alpha": 0.2},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none"},
    **{"font.family": "sans-serif", "axes.formatter.limits": (-2, 5), "legend.fontsize": "small"},
}
DOTS_PER_INCH = 120
SMOOTHING = 5  # points of the running mean
COLUMNS = 3
Style = tuple[str, str, str]  # legend, colour, line
Draw = Callable[[Axes], None]


def draw_all(runs: Sequence[Compared], folder: Path) -> tuple[list[Path], dict[str, list[str]], list[Key]]:
    """Write the files; returns them, the panels as SVG by axis, and the key of the curves of several runs."""
    groups = grouped(runs)
    styles = [_style(n, _label(group)) for n, group in enumerate(groups)]
    pictures: dict[str, list[str]] = {}
    files: list[Path] = []
    for axis in AXES:
        draws = dict(_panels(groups, styles, axis))
        if not draws:
            continue  # no run counts samples
        if len(runs) == 1 and axis == "steps":
            files += [_save(_figure(draw), folder / f"{name}.png") for name, draw in draws.items()]
        pictures[f"over {axis}"] = [_svg_of(_figure(draw), f"{axis} {name}") for name, draw in draws.items()]
        files.append(_overview(list(draws.values()), len(runs) > 1, folder / f"over_{axis}.png"))
    keys = [(label, colour, DASHES[line]) for label, colour, line in styles] if len(runs) > 1 else []
    return files, pictures, keys


def _style(number: int, legend: str) -> Style:
    return legend, COLOURS[number % len(COLOURS)], list(DASHES)[number // len(COLOURS) % len(DASHES)]


def _label(group: Sequence[Compared]) -> str:
    seeds = ", ".join(str(run.config.run.seed) for run in group if run.config is not None)
    return group[0].label if len(group) == 1 else f"{group[0].label} and {len(group) - 1} more, seeds {seeds}"


def _panels(groups: list[list[Compared]], styles: list[Style], axis: str) -> Iterator[tuple[str, Draw]]:
    """The panels that have points, by name. One run has every metric of a panel, several have its first one."""
    runs = [run for group in groups for run in group]
    for name, panel in PANELS.items():
        first, *_ = panel.metrics
        sources = [(style, group, first) for style, group in zip(styles, groups, strict=True)]
        if len(runs) == 1:
            sources = [(_style(n, panel.metrics[each]), runs, each) for n, each in enumerate(panel.metrics)]
        found = [(style, curve) for style, group, each in sources if (curve := curve_of(group, axis, each))]
        if any(curve[1].any() for _, curve in found) or (found and name == "reward"):
            config = runs[0].config
            bound = (
                config.staleness.max if (len(runs), name) == (1, "staleness") and isinstance(config, Config) else None
            )
            yield name, partial(_draw, panel.title, AXES[axis], found, len(runs) == 1, panel.logarithmic, bound)
    for number, dataset in enumerate(dict.fromkeys(line["dataset"] for run in runs for line in run.evaluations), 1):
        curves = [evaluated(group, axis, dataset) for group in groups]
        found = [(style, curve) for style, curve in zip(styles, curves, strict=True) if curve]
        if found:
            title = _plain(f"Evaluation on {dataset}: mean reward")
            yield f"evaluation_{number}", partial(_draw_evaluation, title, AXES[axis], found)


def _plain(text: str) -> str:
    """Text for matplotlib that begins no formula; `text` is a name from a config or a file."""
    return text.replace("$", r"\$")


def _finish(axes: Axes, title: str, x_label: str) -> None:
    axes.set(title=title, xlabel=x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw(
    title: str, x_label: str, curves: list[tuple[Style, Curve]], alone: bool, logarithmic: bool, bound: int | None,
    axes: Axes,
) -> None:  # fmt: skip
    for (legend, colour, line), (x, y, low, high) in curves:
        smooth = len(curves) == 1 and alone and len(x) > SMOOTHING
        marker, strength = "o" if len(x) == 1 else "", 0.4 if smooth else 1.0
        axes.plot(x, y, line, color=colour, label=_plain(legend), lw=1.5, ms=4, marker=marker, alpha=strength)
        if smooth:
            mean = np.convolve(y, np.full(SMOOTHING, 1 / SMOOTHING), "valid")
            axes.plot(x[SMOOTHING - 1 :], mean, color=colour, label=f"mean of {SMOOTHING}", lw=2)
        if (high > low).any():
            axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    if bound is not None:
        axes.axhline(bound, color=INK, linestyle=":", label="bound")
    if logarithmic and alone:
        axes.set_yscale("log")
    if alone:
        axes.legend()
    _finish(axes, title, x_label)


def _draw_evaluation(title: str, x_label: str, curves: list[tuple[Style, Curve]], axes: Axes) -> None:
    for (legend, colour, line), (x, y, low, high) in curves:
        bars = np.maximum([y - low, high - y], 0.0)
        axes.errorbar(x, y, bars, fmt=f"o{line}", color=colour, label=_plain(legend), lw=1.5, ms=4, capsize=3)
    _finish(axes, title, x_label)


def _figure(draw: Draw) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 3.5))
    draw(axes)
    figure.subplots_adjust(left=0.13, right=0.98, top=0.92, bottom=0.14)
    return figure


def _overview(draws: Sequence[Draw], legend: bool, path: Path) -> Path:
    """All panels in one picture, with the legend of several runs below them."""
    rows = -(-len(draws) // COLUMNS)
    figure = plt.figure(figsize=(5 * COLUMNS, 3.5 * rows + 0.6), layout="constrained")
    for number, draw in enumerate(draws, start=1):
        draw(figure.add_subplot(rows, COLUMNS, number))
    if legend:
        known = {
            name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(known.values(), known, loc="outside lower center", ncols=COLUMNS)
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name with signs that the font lacks
        figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path


def _svg_of(figure: Figure, name: str) -> str:
    """A figure as SVG, whose ids depend on `name`: a page has several."""
    drawn = io.StringIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True)
    plt.close(figure)
    return drawn.getvalue()
