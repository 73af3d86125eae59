"""slipstream report RUN [RUN ...]: a table on the terminal; pictures, a page and summary.json in a folder."""

import argparse
import importlib.util
import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from common.config.schema import Config, SftConfig
from common.errors import SlipstreamError, UsageError
from common.process.run_dir import RunDir, differences, unwritable, write_json
from common.waste import WASTE_REASONS
from launch.observe import waste_view
from launch.observe.advisor import advice_for
from launch.observe.metrics_tail import LATEST, MetricsTail, ends
from launch.resolve_target import any_config_of, find_run
from launch.results.comparison import Compared, grouped

STEP_TIMES = {"step": "step_s", "waiting_for_groups": "learner_idle_s", "training": "train_s"}
STEP_TIMES |= {"publish": "publish_s", "generation_stall": "generation_stall_s"}
OFF_POLICY = (
    "ratio_p1", "ratio_p99", "effective_sample_fraction", "correction_clip_fraction", "correction_masked_fraction",
    "veto_fraction", "objective_clip_fraction", "mismatch_abs_mean",
)  # fmt: skip
AGES = ("0", "1", "2", "3-4", "5-8", "9 and more")  # the classes of StepMetrics.mismatch_by_age
Figures = dict[str, dict[str, Any]]  # section of the table: name: number
Named = tuple[str, RunDir, Config | SftConfig | None]  # a run, as it was named, too


def command(args: argparse.Namespace) -> int:
    """Write figures, pictures and a page of a finished or running job, or of several side by side.

    Raises UsageError for warm starts beside jobs.
    """
    named = ((word, find_run(word)) for word in args.runs)
    found = {run.path.resolve(): (word, run, any_config_of(run)) for word, run in named}
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which the extra 'report' brings; launch/setup.sh cpu installs it")
    kinds = {isinstance(config, SftConfig): word for word, _, config in found.values()}
    if len(kinds) > 1:
        raise UsageError(f"{kinds[True]} is a warm start and {kinds[False]} an RL job: their metrics are not the same")
    alone = next(iter(found.values()))[1] if len(args.runs) == 1 else None
    folder = Path(args.out) if args.out else alone.report if alone else new_folder(found)
    runs, summaries, notes = read(list(found.values()), alone is not None)
    differing = [] if alone else difference_rows({each.label: each.config for each in runs})
    rows = summary_rows(summaries)
    document = summaries[runs[0].label] if alone else {"runs": summaries, "differences": differing}
    from launch.results.page import write_page
    from launch.results.plots import draw_all

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: expected a folder, or a place for one, found {folder}: {error.strerror}") from None
    try:
        write_json(folder / "summary.json", document)
        files, pictures = draw_all(runs, folder)
        written = [write_page(folder / "report.html", ", ".join(summaries), notes, differing, rows, pictures), *files]
    except OSError as error:
        raise unwritable("--out", folder, error) from None
    columns = [Column(no_wrap=True), *(Column(overflow="fold") for _ in runs)]
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    for row in [*differing, [""], *rows]:
        table.add_row(*map(Text, row))
    Console().print(table, *notes, "written: " + ", ".join(map(str, written)), sep="\n", soft_wrap=True, markup=False)
    return 0


def read(found: list[Named], alone: bool) -> tuple[list[Compared], dict[str, Figures], list[str]]:
    """The runs that have steps, their summaries by label, and notes. Raises SlipstreamError when there is none."""
    names = [run.path.resolve().name if config is None else config.run.name for _, run, config in found]
    runs: list[Compared] = []
    summaries: dict[str, Figures] = {}
    notes: list[str] = []
    for (word, run, config), name in zip(found, names, strict=True):
        tail = MetricsTail.of(run)  # one at a time: a long run takes much memory
        if not tail.lines and alone:
            raise SlipstreamError(f"{run.metrics} has no steps yet")
        if not tail.lines:
            notes.append(f"{word} has no steps yet.")
            continue
        label = name if names.count(name) == 1 else f"{name} ({word})"
        warm = isinstance(config, SftConfig)
        summaries[label] = summarise_warm_start(config, tail) if warm else summarise(run, tail, config)
        runs.append(Compared.of(label, config, tail, alone))
        if runs[-1].size > 1:
            notes.append(f"{label}: every point is the mean of {runs[-1].size} steps, or of a maximum the largest.")
    if not runs:
        raise SlipstreamError("none of these runs has steps yet")
    if len(grouped(runs)) < len(runs):
        notes.append("A curve of several seeds is their mean; its band reaches from the least to the largest of them.")
    return runs, summaries, notes


def new_folder(runs: Iterable[Path]) -> Path:
    """report, report-2, ... in the current folder; raises UsageError when that is inside of one of `runs`."""
    for run in runs:
        if Path.cwd().is_relative_to(run):
            raise UsageError(f"the current folder is inside of the run {run}; name a folder with --out")
    names = (Path("report" if n == 1 else f"report-{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def difference_rows(configs: Mapping[str, Config | SftConfig | None]) -> list[list[str]]:
    """A head with the names of runs, and the keys in which their configs differ with every run's value."""
    documents = [None if config is None else msgspec.to_builtins(config) for config in configs.values()]
    first, *others = [document for document in documents if document is not None] or [{}]
    keys = dict.fromkeys(key for other in others for key, _, _ in differences(first, other))

    def value(document: Any, key: str) -> str:
        found = reduce(lambda at, part: at.get(part) if isinstance(at, dict) else None, key.split("."), document)
        return "-" if document is None else "unset" if found is None else msgspec.json.encode(found).decode().strip('"')

    rows = [[key, *(value(each, key) for each in documents)] for key in keys if key not in ("run.name", "run.dir")]
    return [["", *configs], *rows]


def summary_rows(summaries: Mapping[str, Figures]) -> list[list[str]]:
    """A head with the names of runs, and every figure of any summary with every run's value."""
    names = dict.fromkeys((section, name) for each in summaries.values() for section in each for name in each[section])
    rows = [["", *summaries]]
    for section, name in names:
        figures = [format_figure(each.get(section, {}).get(name)) for each in summaries.values()]
        rows.append([f"{section}: {name}".replace("_", " "), *figures])
    return rows


def summarise(run: RunDir, tail: MetricsTail, config: Config | None) -> Figures:
    last = tail.last
    rewards, times = tail.series("reward_mean"), tail.series("time_s")
    if not rewards:
        raise SlipstreamError(f"{run.metrics} is not that of an RL job: no line has a reward_mean")
    seconds = times[-1] - times[0] + (tail.lines[0].get("step_s") or 0.0) if times else None  # restarts included
    trained = tail.total("tokens_trained")
    advice: dict[str, Any] = {}
    if found := advice_for(tail.lines, config.staleness.max if config else 0):
        advice = {"text": found.text, "nodes": found.nodes or None}
        advice |= {"learner_idle_share": found.idle, "speedup": found.speedup}
    staleness = {"mean": tail.mean("staleness_mean"), "max": max(tail.series("staleness_max"), default=None)}
    staleness |= {"tokens_expired": tail.total("tokens_expired")}
    kinds = [(unit, reason) for reason in WASTE_REASONS for unit in ("tokens", "seconds")]
    about = {"name": config.run.name if config else run.path.name, "steps": len(tail.lines), "seconds": seconds}
    summary: Figures = {
        "run": about | {"incarnations": int(last.get("incarnation", 0)) + 1},
        "reward": {**ends(rewards), "best_step": max(rewards), "steps_to_0.9": first_above(rewards, 0.9)},
        "staleness": {"allowed": config.staleness.max if config else None, **staleness},
        "time_per_step_s": {name: tail.mean(metric) for name, metric in STEP_TIMES.items()},
        "tokens": {name: last.get(f"tokens_{name}_total") for name in ("generated", "trained", "wasted")}
        | {"trained_per_s": trained / seconds if seconds else None},
        "advice": advice,
        "wasted": {f"{unit}_{reason}": lost for unit, reason in kinds if (lost := last.get(f"{unit}_wasted_{reason}"))},
        "failed_samples": waste_view.summed(line.get("samples_failed_by_reason", {}) for line in tail.lines),
        "off_policy": {"ratio_max": max(tail.series("ratio_max"), default=None)}
        | {name: tail.mean(name) for name in OFF_POLICY}
        | {"entropy_last_10": tail.mean("entropy", LATEST), "kl_last_10": tail.mean("kl_mean", LATEST)},
    }
    if by_age := mismatch_by_age(tail):
        summary["mismatch_by_staleness"] = by_age
    with suppress(OSError, ValueError):
        found = msgspec.json.decode((run.path / "eval.json").read_bytes(), type=dict[str, Any])
        summary["held_out"] = {name: value for name, value in found.items() if name != "datasets"}
    return summary


def summarise_warm_start(config: SftConfig, tail: MetricsTail) -> Figures:
    validated = tail.series("validation_loss")
    losses, seconds = tail.series("loss"), sum(tail.series("step_s"))
    trained = sum(tail.series("tokens_trained"))
    tokens = {"trained": trained, "processed": tail.total("sequence_tokens")}
    return {
        "run": {"name": config.run.name, "steps": len(tail.lines), "seconds": seconds},
        "loss": {**ends(losses), "lowest": min(losses, default=None)},
        **({"validation_loss": {"last": validated[-1], "lowest": min(validated)}} if validated else {}),
        "time_per_step_s": {"step": tail.mean("step_s")},
        "tokens": tokens | {"trained_per_s": trained / seconds if seconds else None},
    }


def mismatch_by_age(tail: MetricsTail) -> dict[str, float]:
    """Mean |difference of log-probabilities| per token of each class of staleness that was trained on."""
    found = [[line.get(name) or [] for name in ("mismatch_by_age", "tokens_by_age")] for line in tail.lines]
    known = [both for both in found if all(len(values) == len(AGES) for values in both)]
    values, tokens = np.array(known, dtype=np.float64).reshape(-1, 2, len(AGES)).swapaxes(0, 1)
    sums = zip(AGES, (values * tokens).sum(0), tokens.sum(0), strict=True)
    return {age: float(total / count) for age, total, count in sums if count}


def first_above(values: list[float], limit: float) -> int | None:
    """Steps until the mean of three successive values reaches `limit`; None when it never does."""
    return next((end for end in range(3, len(values) + 1) if sum(values[end - 3 : end]) / 3 >= limit), None)


def format_figure(value: object) -> str:
    """A number as a person reads it; '-' of None."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.3f}" if abs(value) >= 0.001 else f"{value:.2e}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
