"""The pictures of a report, one per axis, and report.html, which needs neither a script nor another host."""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from string import Template

import matplotlib

matplotlib.use("Agg")  # no display; before pyplot is imported
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from common.metrics import PANELS, Panel
from launch.results.comparison import AXES, OWN, Compared, Curve, curve_of, evaluated, grouped

INK = "#1f2328"  # text and lines of pictures; the page puts its own colour there
Rows = Sequence[Sequence[str]]
COLOURS = ("#3d85d8", "#e07b39", "#38a169", "#d6539b", "#8f6fd8", "#b08a1f", "#26a3b8", "#d9534f", "#7f8a96", "#8c9a2b")
DASHES = ("-", "--", ":", "-.")
matplotlib.rcParams |= {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    **{"axes.labelcolor": INK, "axes.edgecolor": INK, "axes.grid": True, "grid.alpha": 0.2},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none"},
    **{"font.family": "sans-serif", "axes.formatter.limits": (-2, 5), "legend.fontsize": "small"},
    "axes.titley": 1.0,  # a place that is found anew in every drawing costs a fifth of it
}
DOTS_PER_INCH = 120
SMOOTHING = 5  # points of the running mean
COLUMNS = 3
Style = tuple[str, str, str]  # legend, colour, line
Draw = Callable[[Axes], None]


def draw_all(runs: Sequence[Compared], folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Write a PNG file per axis; returns the files, and the same pictures as SVG by axis."""
    pictures: dict[str, str] = {}
    files: list[Path] = []
    places: list[Bbox] = []  # panels of the first picture have these: to find them takes as long as to draw
    for axis in AXES:
        if draws := list(_panels(grouped(runs), axis)):  # perhaps no run counts samples
            figure = _figure(draws, len(runs) > 1, max(run.size for run in runs))
            places = _lay_out(figure, places)
            path = folder / f"over_{axis}.png"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a name with signs that the font lacks
                FigureCanvasAgg(figure).print_png(path)  # savefig would draw everything twice
            for part in (figure, *figure.axes):
                part.patch.set_facecolor("none")
            drawn = io.StringIO()
            with plt.rc_context({"svg.hashsalt": axis}):  # no two pictures of the page share an id
                FigureCanvasSVG(figure).print_svg(drawn)
            plt.close(figure)
            files.append(path)
            pictures[f"over {axis}"] = drawn.getvalue()
    return files, pictures


def _lay_out(figure: Figure, places: list[Bbox]) -> list[Bbox]:
    """Give the panels the `places` of an earlier picture that has as many and no heading; returns their places."""
    if len(places) == len(figure.axes) and not figure.get_suptitle():
        for axes, place in zip(figure.axes, places, strict=True):
            axes.set_position(place)
    elif engine := figure.get_layout_engine():
        engine.execute(figure)
    figure.set_layout_engine("none")
    return [axes.get_position() for axes in figure.axes]


def _figure(draws: Sequence[Draw], legend: bool, size: int) -> Figure:
    """All panels, with the legend of several runs below them, and above them how many steps a point has at most."""
    rows = -(-len(draws) // COLUMNS)
    figure = plt.figure(figsize=(5 * COLUMNS, 3.5 * rows + 0.6), layout="constrained", dpi=DOTS_PER_INCH)
    for number, draw in enumerate(draws, start=1):
        draw(figure.add_subplot(rows, COLUMNS, number))
    if size > 1:
        upto = "up to " * legend
        figure.suptitle(f"every point is the mean of {upto}{size} steps, or of a maximum the largest", size="medium")
    if legend:
        legends = [axes.get_legend_handles_labels() for axes in figure.axes]
        known = {name: line for both in legends for line, name in zip(*both, strict=True)}
        figure.legend(known.values(), known, loc="outside lower center", ncols=COLUMNS)
    return figure


def _style(number: int, legend: str) -> Style:
    return legend, COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _label(group: Sequence[Compared]) -> str:
    seeds = ", ".join(str(run.config.run.seed) for run in group if run.config is not None)
    return group[0].label if len(group) == 1 else f"{group[0].label} and {len(group) - 1} more, seeds {seeds}"


def _panels(groups: list[list[Compared]], axis: str) -> Iterator[Draw]:
    """The panels that have points. One run has every metric of a panel, several have its first one."""
    runs = [run for group in groups for run in group]
    alone = len(runs) == 1
    config = runs[0].config
    styles = [_style(n, _label(group)) for n, group in enumerate(groups)]
    own = sorted({name for run in runs for name in run.columns if name.startswith(OWN)})
    for panel in (*PANELS, *(Panel(title=_plain(name.removeprefix(OWN)), lines={name: "mean"}) for name in own)):
        first = panel.first
        sources = [(style, group, first) for style, group in zip(styles, groups, strict=True)]
        if alone:
            drawn = [name for name in panel.lines if name in runs[0].columns]
            sources = [(_style(n, panel.lines[name]), runs, name) for n, name in enumerate(drawn)]
        found = [(style, curve) for style, group, each in sources if (curve := curve_of(group, axis, each))]
        if any(curve[1].any() for _, curve in found) or (found and first == "reward_mean"):
            job = config.rl if config is not None and alone and panel.bound else None
            bound = job.staleness.max if job else None
            yield partial(_draw, panel, AXES[axis], found, alone, bound)
    for dataset in dict.fromkeys(line.dataset for run in runs for line in run.evaluations):
        curves = [evaluated(group, axis, dataset) for group in groups]
        if found := [(style, curve) for style, curve in zip(styles, curves, strict=True) if curve]:
            panel = Panel(title=_plain(f"Evaluation on {dataset}"), unit="mean reward", lines={}, evaluations=True)
            yield partial(_draw, panel, AXES[axis], found, alone, None)


def _plain(text: str) -> str:
    """Text for matplotlib that begins no formula; `text` is a name from a config or a file."""
    return text.replace("$", r"\$")


def _draw(
    panel: Panel, x_label: str, curves: list[tuple[Style, Curve]], alone: bool, bound: int | None, axes: Axes
) -> None:
    bars = not panel.lines  # the points are evaluations
    for (legend, colour, line), (x, y, low, high) in curves:
        smooth = len(curves) == 1 and alone and not bars and len(x) > SMOOTHING
        style = {"color": colour, "label": _plain(legend), "marker": "o" if bars or len(x) == 1 else "", "ms": 4}
        axes.plot(x, y, line, lw=1.5, alpha=0.4 if smooth else 1.0, **style)
        if smooth:
            mean = np.convolve(y, np.full(SMOOTHING, 1 / SMOOTHING), "valid")
            axes.plot(x[SMOOTHING - 1 :], mean, color=colour, label=f"mean of {SMOOTHING} points", lw=2)
        if bars:
            axes.errorbar(x, y, np.maximum([y - low, high - y], 0.0), color=colour, fmt="none", capsize=3)
        elif (high > low).any():
            axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axes.set(title=panel.title, xlabel=x_label, ylabel=panel.unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if bound is not None:
        axes.axhline(bound, color=INK, linestyle=":", label="bound")
    if alone and not bars:
        axes.set_yscale("log" if panel.logarithmic else "linear")
        axes.legend()


def write_page(
    path: Path,
    title: str,
    first: str,
    notes: Sequence[str],
    differences: Rows,
    summary: Rows,
    pictures: Mapping[str, str],
) -> Path:
    """Tables have a head; without `differences` there is no such table. `pictures`: SVG by axis; the reader chooses.

    `first`: the text that the page begins with, '' for none.
    """
    tabs = figures = shown = ""
    for n, (axis, svg) in enumerate(pictures.items()):
        chosen = " checked" * (n == 0)
        tabs += f'<label><input type="radio" name="axis" id="axis-{n}"{chosen}>{escape(axis)}</label>'
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg.replace(INK, "currentColor"), flags=re.DOTALL)
        svg = re.sub(r'^.*?<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', svg, count=1, flags=re.DOTALL)
        figures += f'<figure class="wide" id="picture-{n}">{svg}</figure>'
        shown += f"body:has(#axis-{n}:not(:checked)) #picture-{n} {{ display: none; }}\n"
    text = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title),
        first=f'<pre class="wide">{escape(first)}</pre>' if first else "",
        notes="".join(f"<p>{escape(note)}</p>" for note in notes),
        differences="<h2>Differences of the configs</h2>" + _table(differences) if differences else "",
        summary=_table(summary),
        shown=shown,
        pictures=tabs + figures,
    )
    path.write_text(text)
    return path


def _table(rows: Rows) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{body}</table></div>'
