"""slipstream report RUN: a table on the terminal, RUN/report/summary.json and RUN/report/*.png."""

import argparse
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table

from common.config.schema import SftConfig
from common.errors import SlipstreamError, UsageError
from common.process.run_dir import RunDir, write_json
from launch.observe import waste_view
from launch.observe.advisor import advice_for
from launch.observe.metrics_tail import LATEST, MetricsTail, ends
from launch.resolve_target import config_of, find_run

STEP_TIMES = {
    "step": "step_s",
    "waiting_for_groups": "learner_idle_s",
    "training": "train_s",
    "publish": "publish_s",
    "generation_stall": "generation_stall_s",
}
OFF_POLICY = (
    "ratio_p1", "ratio_p99", "effective_sample_fraction", "correction_clip_fraction", "correction_masked_fraction",
    "veto_fraction", "objective_clip_fraction", "mismatch_abs_mean",
)  # fmt: skip
AGES = ("0", "1", "2", "3-4", "5-8", "9 and more")  # the classes of StepMetrics.mismatch_by_age
Figures = dict[str, dict[str, Any]]  # section of the table: name: number


def command(args: argparse.Namespace) -> int:
    """Print the table and write the plots of a finished or running job."""
    run = find_run(args.run)
    tail = MetricsTail.of(run)
    if not tail.lines:
        raise SlipstreamError(f"{run.metrics} has no steps yet")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which the extra 'report' brings; launch/setup.sh cpu installs it")
    warm = config_of(run, SftConfig)
    summary = summarise_warm_start(warm, tail) if warm else summarise(run, tail)
    write_json(run.report / "summary.json", summary)
    from launch.results.plots import PLOTS, WARM_START_PLOTS, draw_all

    show(summary, draw_all(WARM_START_PLOTS if warm else PLOTS, tail, config_of(run), run.report))
    return 0


def summarise(run: RunDir, tail: MetricsTail) -> Figures:
    config, last = config_of(run), tail.last
    rewards, first = tail.series("reward_mean"), tail.lines[0]
    if not rewards:
        raise SlipstreamError(f"{run.metrics} is not that of an RL job: no line has a reward_mean")
    seconds = float(last["time_s"] - first["time_s"] + first.get("step_s", 0.0))  # restarts included
    trained = sum(tail.series("tokens_trained"))
    advice: dict[str, Any] = {}
    if found := advice_for(tail.lines, config.staleness.max if config else 0):
        advice = {"text": found.text, "nodes": found.nodes or None}
        advice |= {"learner_idle_share": found.idle, "speedup": found.speedup}
    summary: Figures = {
        "run": {
            "name": config.run.name if config else run.path.name,
            "steps": len(tail.lines),
            "seconds": seconds,
            "incarnations": int(last.get("incarnation", 0)) + 1,
        },
        "reward": {**ends(rewards), "best_step": max(rewards), "steps_to_0.9": first_above(rewards, 0.9)},
        "staleness": {
            "allowed": config.staleness.max if config else None,
            "mean": tail.mean("staleness_mean"),
            "max": max(tail.series("staleness_max"), default=None),
            "tokens_expired": sum(tail.series("tokens_expired")),
        },
        "time_per_step_s": {name: tail.mean(metric) for name, metric in STEP_TIMES.items()},
        "tokens": {name: last.get(f"tokens_{name}_total") for name in ("generated", "trained", "wasted")}
        | {"trained_per_s": trained / seconds if seconds else None},
        "advice": advice,
        "wasted": waste_view.of_report(last),
        "failed_samples": waste_view.summed(line.get("samples_failed_by_reason", {}) for line in tail.lines),
        "off_policy": {"ratio_max": max(tail.series("ratio_max"), default=None)}
        | {name: tail.mean(name) for name in OFF_POLICY}
        | {"entropy_last_10": tail.mean("entropy", LATEST), "kl_last_10": tail.mean("kl_mean", LATEST)},
    }
    if by_age := mismatch_by_age(tail):
        summary["mismatch_by_staleness"] = by_age
    with suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode((run.path / "eval.json").read_bytes(), type=dict[str, Any])
        summary["held_out"] = {name: value for name, value in found.items() if name != "datasets"}
    return summary


def summarise_warm_start(config: SftConfig, tail: MetricsTail) -> Figures:
    losses, seconds = tail.series("loss"), sum(tail.series("step_s"))
    trained = sum(tail.series("tokens_trained"))
    return {
        "run": {"name": config.run.name, "steps": len(tail.lines), "seconds": seconds},
        "loss": {**ends(losses), "lowest": min(losses, default=None)},
        "time_per_step_s": {"step": tail.mean("step_s")},
        "tokens": {
            "trained": trained,
            "processed": sum(tail.series("sequence_tokens")),
            "trained_per_s": trained / seconds if seconds else None,
        },
    }


def mismatch_by_age(tail: MetricsTail) -> dict[str, float]:
    """Mean |difference of log-probabilities| per token of each class of staleness that was trained on."""
    names = ("mismatch_by_age", "tokens_by_age")
    lines = [[line.get(name, []) for name in names] for line in tail.lines]
    known = [zip(*both, strict=True) for both in lines if all(len(values) == len(AGES) for values in both)]
    out: dict[str, float] = {}
    for age, pairs in zip(AGES, zip(*known, strict=True), strict=False):
        if tokens := sum(count for _, count in pairs):
            out[age] = sum(value * count for value, count in pairs) / tokens
    return out


def first_above(values: list[float], limit: float, window: int = 3) -> int | None:
    """Steps until the mean of `window` successive values reaches `limit`; None when it never does."""
    for end in range(window, len(values) + 1):
        if sum(values[end - window : end]) / window >= limit:
            return end
    return None


def show(summary: Figures, written: list[Path]) -> None:
    columns = (Column(style="bold"), Column(), Column(justify="right"))
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    for section, figures in summary.items():
        title = section.replace("_", " ")
        for name, value in figures.items():
            table.add_row(title, name.replace("_", " "), format_figure(value))
            title = ""
    console = Console()
    console.print(table)
    console.print("plots: " + ", ".join(str(path) for path in written), soft_wrap=True)


def format_figure(value: object) -> str:
    """A number as a person reads it; '-' of None."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.3f}" if abs(value) >= 0.001 else f"{value:.2e}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
