"""slipstream scale RUN: more or fewer nodes for a run on Slurm, by hand or as the advisor says."""

import argparse
import re
import time

from common.errors import EXIT_DONE, UsageError
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import MetricsTail
from launch.cluster.slurm.jobs import leave, read_jobs, tasks_of
from launch.cluster.slurm.submit import submit_fleet
from launch.observe.advisor import Advice, advice_for
from launch.resolve_target import config_of, find_run

LOOK_EVERY_S = 10.0


def command(args: argparse.Namespace) -> int:
    """Change the fleet once, or follow the advisor until the learner's job has ended."""
    run = find_run(args.run)
    config = config_of(run)
    if config is None or not read_jobs(run).learner:
        raise UsageError(f"{run.path} has no jobs of Slurm: `slipstream slurm CONFIG` submits them")
    if args.follow_advice is None:
        print(scale(run, args.rollouts))
        return EXIT_DONE
    bounds, tail = parse_bounds(args.follow_advice), MetricsTail(run.metrics, StepMetrics)
    while tasks_of([read_jobs(run).learner]):
        tail.update()
        nodes = sum(task.stays for task in tasks_of(read_jobs(run).fleet))
        advice = advice_for(tail.lines, config.staleness.max)
        if (wanted := target(advice, tail.last.nodes_live if tail.last else 0, nodes, bounds)) != nodes:
            print(scale(run, wanted), flush=True)
        time.sleep(LOOK_EVERY_S)
    return EXIT_DONE


def scale(run: RunDir, nodes: int) -> str:
    """Submit an array of the missing nodes, or let the newest ones leave; returns a line about it.

    Raises UsageError when the run has ended, SlurmError when Slurm refuses.
    """
    jobs = read_jobs(run)
    if nodes < 0 or not tasks_of([jobs.learner]):
        raise UsageError(f"--rollouts {nodes}: expected at least 0 nodes, for a run whose learner has a job in Slurm")
    fleet = [task for task in tasks_of(jobs.fleet) if task.stays]
    if nodes > len(fleet):
        return f"{len(fleet)} -> {nodes} nodes: submitted array {submit_fleet(run, jobs, nodes - len(fleet))}"
    waiting_last = sorted(fleet, key=lambda task: (task.state != "RUNNING", task))
    leave(waiting_last[nodes:])
    return f"{len(fleet)} -> {nodes} nodes; leaving: {' '.join(task.id for task in waiting_last[nodes:]) or 'none'}"


def parse_bounds(word: str) -> tuple[int, int]:
    """(fewest, most) nodes of 'MIN..MAX'; raises UsageError."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", word)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--follow-advice: expected MIN..MAX with 1 <= MIN <= MAX, such as 1..16, found {word!r}")
    return int(match[1]), int(match[2])


def target(advice: Advice | None, live: int, nodes: int, bounds: tuple[int, int]) -> int:
    """How many nodes there should be of `nodes`; the advice is about steps that `live` nodes made."""
    follows = advice is not None and live == nodes and advice.change in ("more_nodes", "fewer_nodes")
    return min(max(advice.nodes if follows else nodes, bounds[0]), bounds[1])
