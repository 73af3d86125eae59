"""slipstream resume RUN: a job that a watch rule paused or stopped may continue; docs/watch.md."""

import argparse

from common.errors import UsageError
from common.process.run_dir import write_json
from launch.observe.metrics_tail import MetricsTail
from launch.resolve_target import find_run


def command(args: argparse.Namespace) -> int:
    """Say up to which step rules have been answered. A learner that is paused looks about once a second."""
    run = find_run(args.run)
    metrics = MetricsTail.of(run)
    step = metrics.last.get("step")
    if step is None:
        raise UsageError(f"{run.path} has trained no step: no rule can have acted")
    answered = {"step": step}
    if versions := [line["step"] for line in metrics.evaluations if "step" in line]:
        answered["evaluation"] = versions[-1]  # the version that the last step made is one more than that
    write_json(run.resume_json, answered)
    print(f"rules that acted up to step {step} no longer pause or stop {run.path}; start the job if it has ended")
    return 0
