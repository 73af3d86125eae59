"""slipstream status RUN [--json]: who is alive, on which version, waiting on what and since when."""

import argparse
import json
from dataclasses import asdict

from launch import stalls, warm_start
from launch.advisor import advice_for
from launch.metrics_tail import MetricsTail
from launch.observe import as_json, observe
from launch.targets import find_run
from launch.warm_start import warm_start_of


def command(args: argparse.Namespace) -> int:
    """Print the status; of a finished job, the last one that is known."""
    run = find_run(args.run)
    if (warm := warm_start_of(run)) is not None:
        status = warm_start.as_json(run, warm)
        print(json.dumps(status) if args.json else warm_start.line(status))
        return 0
    seen = observe(run)
    tail = MetricsTail(run.metrics)
    tail.update()
    advice = advice_for(tail.lines, seen.status.run.max_staleness)
    if args.json:
        found = {**as_json(run, seen), "stalls": stalls.as_json(stalls.stalls_of(seen))}
        print(json.dumps({**found, "advice": asdict(advice) if advice else None}))
        return 0
    from rich.console import Console

    from launch.view import render_status

    Console().print(render_status(run, seen, advice))
    return 0
