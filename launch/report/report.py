"""slipstream report RUN: a table on the terminal, RUN/report/summary.json and RUN/report/*.png."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from common.errors import SlipstreamError, UsageError
from common.process.run_dir import RunDir, write_json
from launch.observe import sft_status, waste_view
from launch.observe.advisor import advice_for
from launch.observe.metrics_tail import LAST_STEPS, MetricsTail, ends, mean
from launch.observe.sft_status import warm_start_of
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


def command(args: argparse.Namespace) -> int:
    """Print the table and write the plots of a finished or running job."""
    run = find_run(args.run)
    tail = MetricsTail(run.metrics)
    tail.update()
    if not tail.lines:
        raise SlipstreamError(f"{run.metrics} has no steps yet")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which the extra 'report' brings; launch/setup.sh cpu installs it")
    warm = warm_start_of(run)
    summary = sft_status.summarise(warm, tail) if warm else summarise(run, tail)
    write_json(run.report / "summary.json", summary)
    from launch.report.plots import draw_all, draw_warm_start

    written = draw_warm_start(tail, run.report) if warm else draw_all(tail, config_of(run), run.report)
    show(summary, written)
    return 0


def summarise(run: RunDir, tail: MetricsTail) -> dict[str, Any]:
    """The figures of the whole run: {section: {name: number}}; sections are those of the table."""
    config, last = config_of(run), tail.lines[-1]
    rewards, seconds = tail.series("reward_mean"), wall_clock_s(tail)
    if not rewards:
        raise SlipstreamError(f"{run.metrics} is not that of an RL job: no line has a reward_mean")
    trained = sum(tail.series("tokens_trained"))
    out: dict[str, Any] = {
        "run": {
            "name": config.run.name if config else run.path.name,
            "steps": len(tail.lines),
            "seconds": seconds,
            "incarnations": int(last.get("incarnation", 0)) + 1,
        },
        "reward": {
            **ends(rewards),
            "best_step": max(rewards),
            "steps_to_0.9": first_above(rewards, 0.9),
        },
        "staleness": {
            "allowed": config.staleness.max if config else None,
            "mean": mean(tail.series("staleness_mean")),
            "max": max(tail.series("staleness_max"), default=None),
            "tokens_expired": sum(tail.series("tokens_expired")),
        },
        "time_per_step_s": {name: mean(tail.series(metric)) for name, metric in STEP_TIMES.items()},
        "tokens": {name: last.get(f"tokens_{name}_total") for name in ("generated", "trained", "wasted")}
        | {"trained_per_s": trained / seconds if seconds else None},
        "advice": advice_section(tail, config.staleness.max if config else 0),
        "wasted": waste_view.of_report(last),
        "failed_samples": waste_view.summed(line.get("samples_failed_by_reason", {}) for line in tail.lines),
        "off_policy": {"ratio_max": max(tail.series("ratio_max"), default=None)}
        | {name: mean(tail.series(name)) for name in OFF_POLICY}
        | {
            "entropy_last_10": mean(tail.series("entropy")[-LAST_STEPS:]),
            "kl_last_10": mean(tail.series("kl_mean")[-LAST_STEPS:]),
        },
    }
    optional = {"mismatch_by_staleness": mismatch_by_age(tail), "held_out": read_evaluation(run)}
    return out | {section: figures for section, figures in optional.items() if figures}


def advice_section(tail: MetricsTail, staleness: int) -> dict[str, Any]:
    """The advisor's line on the newest steps, and its figures; {} when there are too few."""
    found = advice_for(tail.lines, staleness)
    if found is None:
        return {}
    return {
        "text": found.text,
        "nodes": found.nodes or None,
        "learner_idle_share": found.idle,
        "speedup": found.speedup,
    }


def mismatch_by_age(tail: MetricsTail) -> dict[str, float]:
    """Mean |difference of log-probabilities| per token of each class of staleness that was trained on."""
    out: dict[str, float] = {}
    for place, name in enumerate(AGES):
        pairs = [
            (line["mismatch_by_age"][place], line["tokens_by_age"][place]) for line in tail.lines if has_ages(line)
        ]
        tokens = sum(count for _, count in pairs)
        if tokens:
            out[name] = sum(value * count for value, count in pairs) / tokens
    return out


def has_ages(line: dict[str, Any]) -> bool:
    return len(line.get("mismatch_by_age", [])) == len(line.get("tokens_by_age", [])) == len(AGES)


def wall_clock_s(tail: MetricsTail) -> float:
    """From the start of the first step to the end of the last, restarts included."""
    first, last = tail.lines[0], tail.lines[-1]
    return float(last.get("time_s", 0.0)) - float(first.get("time_s", 0.0)) + float(first.get("step_s", 0.0))


def first_above(values: list[float], limit: float, window: int = 3) -> int | None:
    """Steps until the mean of `window` successive values reaches `limit`; None when it never does."""
    for end in range(window, len(values) + 1):
        if sum(values[end - window : end]) / window >= limit:
            return end
    return None


def read_evaluation(run: RunDir) -> dict[str, float] | None:
    """RUN/eval.json as `slipstream eval` left it."""
    try:
        return msgspec.json.decode((run.path / "eval.json").read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return None


def show(summary: dict[str, Any], written: list[Path]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(justify="right")
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
