"""slipstream resume RUN: a job that a watch rule paused or stopped may continue; docs/watch.md."""

import argparse

from common.errors import UsageError
from common.process.run_dir import write_json
from launch.observe.metrics_tail import MetricsTail
from launch.resolve_target import find_run


def command(args: argparse.Namespace) -> int:
    """Say up to which step rules have been answered. A learner that is paused looks about once a second."""
    run = find_run(args.run)
    step = MetricsTail.of(run).last.get("step")
    if step is None:
        raise UsageError(f"{run.path} has trained no step: no rule can have acted")
    write_json(run.resume_json, {"step": step})
    print(f"rules that acted up to step {step} no longer pause or stop {run.path}; start the job if it has ended")
    return 0
