"""slipstream status RUN [--json]: who is alive, on which version, waiting on what and since when."""

import argparse
import json
from dataclasses import asdict

import msgspec

from launch.observe import sft_status, stall_text
from launch.observe.advisor import advice_for
from launch.observe.metrics_tail import MetricsTail
from launch.observe.observation import as_json, observe
from launch.observe.sft_status import warm_start_of
from launch.resolve_target import find_run


def command(args: argparse.Namespace) -> int:
    """Print the status; of a finished job, the last one that is known."""
    run = find_run(args.run)
    if (warm := warm_start_of(run)) is not None:
        status = sft_status.as_json(run, warm)
        print(json.dumps(status) if args.json else sft_status.line(status))
        return 0
    seen = observe(run)
    tail = MetricsTail(run.metrics)
    tail.update()
    advice = advice_for(tail.lines, seen.status.run.max_staleness)
    if args.json:
        found = {**as_json(run, seen), "stalls": msgspec.to_builtins(stall_text.stalls_of(seen))}
        print(json.dumps({**found, "advice": asdict(advice) if advice else None}))
        return 0
    from rich.console import Console

    from launch.observe.job_view import render_status

    Console().print(render_status(run, seen, advice))
    return 0
