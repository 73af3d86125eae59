"""slipstream status and slipstream top: who is alive, on which version, waiting on what and since when."""

import argparse
import json
import time
from contextlib import suppress
from dataclasses import asdict

import msgspec

from common.config.schema import SftConfig
from common.errors import SlipstreamError
from launch.observe import sft_status, stall_text
from launch.observe.advisor import advice_for
from launch.observe.display import open_display
from launch.observe.metrics_tail import MetricsTail
from launch.observe.observation import as_json, observe
from launch.resolve_target import config_of, find_run


def command(args: argparse.Namespace) -> int:
    """Print the status; of a finished job, the last one that is known."""
    run = find_run(args.run)
    if (warm := config_of(run, SftConfig)) is not None:
        status = sft_status.as_json(run, warm)
        print(json.dumps(status) if args.json else sft_status.line(status))
        return 0
    seen = observe(run)
    advice = advice_for(MetricsTail.of(run).lines, seen.status.run.max_staleness)
    if args.json:
        found = {**as_json(run, seen), "stalls": msgspec.to_builtins(stall_text.stalls_of(seen))}
        print(json.dumps({**found, "advice": asdict(advice) if advice else None}))
        return 0
    from rich.console import Console

    from launch.observe.job_view import render_status

    Console().print(render_status(run, seen, advice))
    return 0


def top(args: argparse.Namespace) -> int:
    """Show the live view until the job ends or Ctrl-C; it only reads, so leaving it stops nothing."""
    run = find_run(args.run)
    config = config_of(run)
    if config is None:
        raise SlipstreamError(f"{run.path} is not the folder of an RL job")
    tail = MetricsTail(run.metrics)
    with suppress(KeyboardInterrupt):
        with open_display(config, tail, args.plain) as display:
            while True:
                seen = observe(run)
                tail.update()
                display.show(seen)
                if not seen.live:
                    break
                time.sleep(config.telemetry.refresh_s)
        print(seen.note)
    return 0
