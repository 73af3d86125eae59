"""slipstream report RUN [RUN ...]: one page on the terminal; pictures, report.html and summary.json in a folder.

The page of a job says whether it learned, where time went and what to change. Several runs give a table.
"""

import argparse
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from common.config.schema import BaseConfig, Config
from common.errors import SlipstreamError, UsageError
from common.metrics import AGE_NAMES, OptFloat, SftMetrics, StepMetrics, judged
from common.process.install import advice
from common.process.run_dir import RunDir, differences, unwritable, write_json
from common.run_reader import LATEST, MetricsTail, ends, known, mean, read_tail
from common.waste import WASTE_REASONS
from launch.observe.advisor import advice_for
from launch.observe.observation import dead_tasks, measured_of, summed
from launch.resolve_target import any_config_of, find_run
from launch.results.comparison import Compared, grouped
from launch.results.one_page import page_rows, rewards_of, series, text_of

STEP_TIMES: dict[str, Callable[[StepMetrics], OptFloat]] = {
    "step": lambda line: line.step_s,
    "waiting_for_groups": lambda line: line.learner_idle_s,
    "training": lambda line: line.train_s,
    "publish": lambda line: line.publish_s,
    "generation_stall": lambda line: line.generation_stall_s,
}
OFF_POLICY = (
    "ratio_p1", "ratio_p99", "effective_sample_fraction", "correction_clip_fraction", "correction_masked_fraction",
    "veto_fraction", "objective_clip_fraction", "mismatch_abs_mean",
)  # fmt: skip
Figures = dict[str, dict[str, Any]]  # section of the table: name: number
Named = tuple[str, RunDir, BaseConfig | None]  # a run, as it was named, too


def command(args: argparse.Namespace) -> int:
    write_report(args.runs, args.out)
    return 0


def write_report(words: Sequence[str], out: str | None) -> None:
    """Write figures, pictures and a page of a finished or running job, or of several side by side, and print a table.

    `words`: runs as a person names them; `out`: the folder, if it is not the usual one. Raises UsageError for warm
    starts beside jobs.
    """
    named = ((word, find_run(word)) for word in words)
    found = {run.path.resolve(): (word, run, any_config_of(run)) for word, run in named}
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"plots need matplotlib, not installed here; {advice('report')}")
    kinds = {config is not None and config.rl is None: word for word, _, config in found.values()}
    if len(kinds) > 1:
        raise UsageError(f"{kinds[True]} is a warm start and {kinds[False]} an RL job: their metrics are not the same")
    alone = next(iter(found.values()))[1] if len(words) == 1 else None
    folder = Path(out) if out else alone.report if alone else new_folder(found)
    runs, summaries, notes, first = read(list(found.values()), alone is not None)
    differing = [] if alone else difference_rows({each.label: each.config for each in runs})
    rows = summary_rows(summaries)
    document = summaries[runs[0].label] if alone else {"runs": summaries, "differences": differing}
    from launch.results.plots import draw_all, write_page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: expected a folder, or a place for one, found {folder}: {error.strerror}") from None
    try:
        write_json(folder / "summary.json", document)
        files, pictures = draw_all(runs, folder)
        title = ", ".join(summaries)
        written = [write_page(folder / "report.html", title, first, notes, differing, rows, pictures), *files]
    except OSError as error:
        raise unwritable("--out", folder, error) from None
    columns = [Column(no_wrap=True), *(Column(overflow="fold") for _ in runs)]
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    for row in [*differing, [""], *rows]:
        table.add_row(*map(Text, row))
    Console().print(
        Text(first) if first else table,
        *notes,
        "written: " + ", ".join(map(str, written)),
        sep="\n",
        soft_wrap=True,
        markup=False,
    )


def read(found: list[Named], alone: bool) -> tuple[list[Compared], dict[str, Figures], list[str], str]:
    """The runs that have steps, their summaries by label, notes, and of one job its first page.

    Raises SlipstreamError when no run has steps.
    """
    names = [run.path.resolve().name if config is None else config.run.name for _, run, config in found]
    runs: list[Compared] = []
    summaries: dict[str, Figures] = {}
    notes: list[str] = []
    first = ""
    for (word, run, config), name in zip(found, names, strict=True):
        tail = read_tail(run.metrics, StepMetrics if config is None else config.step_metrics)
        if not tail.lines and alone:
            raise SlipstreamError(f"{run.metrics} has no steps yet")
        if not tail.lines:
            notes.append(f"{word} has no steps yet.")
            continue
        label = name if names.count(name) == 1 else f"{name} ({word})"
        if config is not None and config.rl is None:
            summaries[label] = summarise_warm_start(config, cast("MetricsTail[SftMetrics]", tail))
        else:
            job, steps = config.rl if config else None, cast("MetricsTail[StepMetrics]", tail)
            summaries[label] = summarise(run, steps, job)
            first = text_of(label, page_rows(summaries[label], steps, job)) if alone else ""
        runs.append(Compared.of(label, config, tail, alone))
        if runs[-1].size > 1:
            notes.append(f"{label}: every point is the mean of {runs[-1].size} steps, or of a maximum the largest.")
    if not runs:
        raise SlipstreamError("none of these runs has steps yet")
    if len(grouped(runs)) < len(runs):
        notes.append("A curve of several seeds is their mean; its band reaches from the least to the largest of them.")
    return runs, summaries, notes, first


def new_folder(runs: Iterable[Path]) -> Path:
    """report, report-2, ... in the current folder; raises UsageError when that is inside of one of `runs`."""
    for run in runs:
        if Path.cwd().is_relative_to(run):
            raise UsageError(f"the current folder is inside of the run {run}; name a folder with --out")
    names = (Path("report" if n == 1 else f"report-{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def difference_rows(configs: Mapping[str, BaseConfig | None]) -> list[list[str]]:
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


def summarise(run: RunDir, tail: MetricsTail[StepMetrics], config: Config | None) -> Figures:
    lines = tail.lines
    last = tail.lines[-1]
    rewards = rewards_of(tail)
    if not rewards:
        raise SlipstreamError(f"{run.metrics} is not that of an RL job: no line has a reward_mean")
    seconds = sum(tail.series(lambda line: line.step_s)) or None  # neither pauses nor steps of a clock count
    trained = sum(line.tokens_trained for line in lines)
    advice: dict[str, Any] = {}
    if found := advice_for(lines, config.staleness.max if config else 0):
        advice = {"text": found.text, "nodes": found.nodes or None}
        advice |= {"learner_idle_share": found.idle, "speedup": found.speedup}
    kinds = [(unit, reason) for reason in WASTE_REASONS for unit in ("tokens", "seconds")]
    wasted = {f"{unit}_{reason}": known([getattr(last, f"{unit}_wasted_{reason}", None)]) for unit, reason in kinds}
    reached = first_above(rewards, 0.9)
    counted = [at for at, line in enumerate(lines, 1) if known([judged(line, "reward_mean")])]
    summary: Figures = {
        "run": {
            "name": config.run.name if config else run.path.name,
            "steps": len(lines),
            "seconds": seconds,
            "incarnations": (last.incarnation or 0) + 1,
            "tasks_given_up": dead_tasks(run),
        },
        "reward": {**ends(rewards), "best_step": max(rewards), "steps_to_0.9": reached and counted[reached - 1]},
        "staleness": {
            "allowed": config.staleness.max if config else None,
            "mean": mean(series(tail, "staleness_mean")),
            "max": max(line.staleness_max for line in lines),
            "tokens_expired": float(sum(line.tokens_expired for line in lines)),
        },
        "time_per_step_s": {name: tail.mean(metric) for name, metric in STEP_TIMES.items()},
        "tokens": {
            "generated": last.tokens_generated_total,
            "trained": last.tokens_trained_total,
            "wasted": last.tokens_wasted_total,
            "trained_per_s": trained / seconds if seconds else None,
        },
        "advice": advice,
        "wasted": {name: lost[0] for name, lost in wasted.items() if any(lost)},
        "failed_samples": summed(line.samples_failed_by_reason for line in lines),
        "off_policy": {
            "ratio_max": max(tail.series(lambda line: line.ratio_max), default=None),
            **{name: mean(series(tail, name)) for name in OFF_POLICY},
            "entropy_last_10": mean(series(tail, "entropy")[LATEST]),
            "kl_last_10": mean(series(tail, "kl_mean")[LATEST]),
        },
    }
    if by_age := mismatch_by_age(lines):
        summary["mismatch_by_staleness"] = by_age
    if measured := measured_of(run, last.policy_version):
        figures = msgspec.to_builtins(measured)
        summary["held_out"] = {name: figures[name] for name in figures if name not in ("datasets", "policy_version")}
    return summary


def summarise_warm_start(config: BaseConfig, tail: MetricsTail[SftMetrics]) -> Figures:
    validated = tail.series(lambda line: line.validation_loss)
    losses = tail.series(lambda line: line.loss)
    seconds = sum(tail.series(lambda line: line.step_s))
    trained = float(sum(line.tokens_trained for line in tail.lines))
    processed = float(sum(line.sequence_tokens for line in tail.lines))
    return {
        "run": {"name": config.run.name, "steps": len(tail.lines), "seconds": seconds},
        "loss": {**ends(losses), "lowest": min(losses, default=None)},
        **({"validation_loss": {"last": validated[-1], "lowest": min(validated)}} if validated else {}),
        "time_per_step_s": {"step": tail.mean(lambda line: line.step_s)},
        "tokens": {"trained": trained, "processed": processed, "trained_per_s": trained / seconds if seconds else None},
    }


def mismatch_by_age(lines: Sequence[StepMetrics]) -> dict[str, float]:
    """Mean |difference of log-probabilities| per token of each class of staleness that was trained on."""
    found = [(line.mismatch_by_age, line.tokens_by_age) for line in lines]
    whole = [both for both in found if all(len(values) == len(AGE_NAMES) for values in both)]
    values, tokens = np.array(whole, dtype=np.float64).reshape(-1, 2, len(AGE_NAMES)).swapaxes(0, 1)
    sums = zip(AGE_NAMES, (values * tokens).sum(0), tokens.sum(0), strict=True)
    return {age: float(total / count) for age, total, count in sums if count}


def first_above(values: list[float], limit: float) -> int | None:
    """Values until the mean of three successive ones reaches `limit`; None when it never does."""
    return next((end for end in range(3, len(values) + 1) if sum(values[end - 3 : end]) / 3 >= limit), None)


def format_figure(value: object) -> str:
    """A number as a person reads it; '-' of None."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.3f}" if abs(value) >= 0.001 else f"{value:.2e}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
