"""slipstream slurm CONFIG: broker, learner and fleet of a run as jobs of Slurm. See docs/slurm.md."""

import argparse
from pathlib import Path

from common.config.checks import resolve_paths
from common.config.loading import load_config
from common.config.schema import Config
from common.errors import EXIT_DONE, ConfigError, SlipstreamError, UsageError
from common.process.run_dir import RunDir, write_atomic, write_json
from common.security.credentials import KeyFolder
from launch.cluster.slurm.jobs import Jobs, end_run, jobs_file, read_jobs, slurm, tasks_of
from launch.cluster.slurm.scripts import ROLES, parse_options, render
from launch.keys import make
from launch.plan.review import review
from launch.resolve_target import find_run
from launch.up.up import finished

NODE_KEY = "fleet"  # the credential that all nodes share


def command(args: argparse.Namespace) -> int:
    """Write the scripts and submit them, or end the jobs of a run."""
    if args.cancel:
        run = find_run(args.config)
        end_run(run, print)
        print(f"{run.path} has no jobs; `slipstream slurm CONFIG` continues it from its newest checkpoint")
        return EXIT_DONE
    options = parse_options(args.sbatch)
    if not args.dry_run:
        slurm("sbatch", "--version")
    config, run = prepared(args.config, args.overrides)
    if not args.dry_run and finished(run, config):
        print(f"{run.path} is finished: {config.run.steps} steps, the model is in {run.model}")
        return EXIT_DONE
    if not args.dry_run and (tasks := tasks_of(read_jobs(run).ids)):
        ids = " ".join(task.id for task in tasks)
        raise UsageError(f"{run.path}: its jobs {ids} have not ended; `slipstream slurm RUN --cancel` ends them")
    for role, text in render(config, run, options).items():
        write_atomic(script(run, role), text.encode(), mode=0o755)
        print(f"--- {script(run, role)}\n{text}" if args.dry_run else script(run, role))
    if not args.dry_run:
        jobs = submit(run, config.rollout.nodes)
        print(f"broker {jobs.broker}, learner {jobs.learner}, fleet {' '.join(jobs.fleet) or 'of no nodes'}")
    return EXIT_DONE


def prepared(file: str, overrides: list[str]) -> tuple[Config, RunDir]:
    """The checked config of a run on many hosts, with keys, written to its run folder; raises UsageError."""
    config = resolve_paths(load_config(Path(file), overrides))
    if config.weights.transport != "relay":
        hint = "the jobs run on several hosts, and only relay is authenticated between hosts"
        raise ConfigError(file, "weights.transport", "relay", config.weights.transport, hint)
    keys = KeyFolder(config.broker.credentials or Path(config.run.dir) / "keys")
    if not keys.path.is_file() and not keys.server.exists():
        make(keys, [NODE_KEY])
        print(f"made keys in {keys.path}")
    config = resolve_paths(load_config(Path(file), [*overrides, f"broker.credentials={keys.path}"]))
    found = review(config, file, libraries=False)
    for problem in (*found.refused, *found.missing):
        raise ConfigError(file, *problem)
    run = RunDir.of(config)
    run.prepare(config)
    return config, run


def submit(run: RunDir, nodes: int) -> Jobs:
    """Submit the jobs, the fleet with `nodes` tasks, after Slurm has found that they can run.

    Raises UsageError with Slurm's reason; then nothing stays submitted.
    """
    jobs = Jobs()
    try:
        for role in ROLES if nodes else ROLES[:2]:
            slurm("sbatch", "--test-only", str(script(run, role)))
        jobs.broker = sbatch(run, "broker")
        jobs.learner = sbatch(run, "learner", f"--dependency=after:{jobs.broker}")
        write_json(jobs_file(run), jobs)
        if nodes:
            submit_fleet(run, jobs, nodes)
        return jobs
    except SlipstreamError as error:
        if jobs.ids:
            slurm("scancel", "--quiet", *jobs.ids)
        raise UsageError(f"Slurm refused: {error}; nothing stays submitted") from None


def submit_fleet(run: RunDir, jobs: Jobs, nodes: int) -> str:
    """Submit an array of that many nodes and add it to the run's jobs; returns its id. Raises SlurmError."""
    jobs.fleet.append(sbatch(run, "fleet", f"--array=0-{nodes - 1}", f"--dependency=after:{jobs.broker}"))
    write_json(jobs_file(run), jobs)
    return jobs.fleet[-1]


def sbatch(run: RunDir, role: str, *options: str) -> str:
    """Submit a role's script; returns the job's id. Raises SlurmError."""
    return slurm("sbatch", "--parsable", *options, str(script(run, role))).partition(";")[0]


def script(run: RunDir, role: str) -> Path:
    return run.path / "slurm" / f"{role}.sbatch"
