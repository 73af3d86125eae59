"""slipstream resume RUN: a job that a watch rule paused or stopped may continue; docs/watch.md."""

import argparse

from common.errors import UsageError
from common.process.run_dir import write_json
from launch.observe.metrics_tail import MetricsTail
from launch.resolve_target import find_run


def command(args: argparse.Namespace) -> int:
    """Say up to which step and evaluation rules have been answered. A paused learner looks about once a second."""
    run = find_run(args.run)
    tail = MetricsTail.of(run)
    newest = {"step": tail.last, "evaluation": tail.evaluations[-1] if tail.evaluations else {}}
    answered = {kind: line["step"] for kind, line in newest.items() if "step" in line}
    if not answered:
        raise UsageError(f"{run.path} has trained no step: no rule can have acted")
    write_json(run.resume_json, answered)
    upto = ", ".join(f"{kind} {number}" for kind, number in answered.items())
    print(f"rules that acted up to {upto} no longer pause or stop {run.path}; start the job if it has ended")
    return 0
