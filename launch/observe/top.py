"""slipstream top RUN: the live view, attached to a running job. It only reads; leaving it stops nothing."""

import argparse
import sys
import time

from common.config.schema import Config
from common.errors import EXIT_FAILED, SlipstreamError
from common.process.run_dir import RunDir
from launch.observe.display import open_display
from launch.observe.metrics_tail import MetricsTail
from launch.observe.observation import Observation, observe
from launch.resolve_target import config_of, find_run


def command(args: argparse.Namespace) -> int:
    """Show the view until the job ends or Ctrl-C."""
    run = find_run(args.run)
    config = config_of(run)
    if config is None:
        raise SlipstreamError(f"{run.path} is not the folder of an RL job")
    try:
        return _follow(run, config, args.plain)
    except KeyboardInterrupt:
        return 0


def _follow(run: RunDir, config: Config, plain: bool) -> int:
    tail = MetricsTail(run.metrics)
    seen: Observation | None = None
    with open_display(config, tail, plain) as display:
        while True:
            try:
                seen = observe(run)
            except SlipstreamError as error:
                print(f"slipstream top: {error}", file=sys.stderr)
                return EXIT_FAILED
            tail.update()
            display.show(seen)
            if not seen.live:
                break
            time.sleep(config.telemetry.refresh_s)
    print(seen.note)
    return 0
