"""slipstream up CONFIG: the whole job on this machine. This module decides whether to run it; job.py runs it."""

import argparse
from typing import IO

from common.config.schema import Config
from common.errors import EXIT_DONE, ConfigError, UsageError
from common.process.broker_address import running_broker
from common.process.lock_file import AlreadyLocked, take_lock
from common.process.run_dir import RunDir
from launch.resolve_target import load_job, need_broker_library
from launch.up.devices import assign, table
from launch.up.job import Job
from learner.loop.run_files import read_record


def command(args: argparse.Namespace) -> int:
    """Run the job to its end, or until it is told to stop; the same command continues a stopped one."""
    config, run = load_job(args.config, args.overrides, environment=True)
    if config.learner.machines > 1:
        hint = "`up` starts one machine; docs/machines.md says how to start a learner of several"
        raise ConfigError(args.config, "learner.machines", "1", str(config.learner.machines), hint)
    run.check_agrees(config)
    need_broker_library(config)
    with only_one(run):
        if finished(run, config):
            print(f"{run.path} is finished: {config.run.steps} steps, the model is in {run.model}")
            return EXIT_DONE
        address = running_broker(run)
        if address is not None:
            raise UsageError(f"{run.path}: a broker already runs at {address}; stop that job first")
        places = assign(config)
        run.prepare(config)
        for stale in (run.broker_json, run.status_json):
            stale.unlink(missing_ok=True)
        if places:
            print("GPUs of each role:", *table(places), sep="\n", flush=True)
        return Job(config, run, places).run(args.plain)


def finished(run: RunDir, config: Config) -> bool:
    """Whether the run has done all its steps and has its model."""
    record = read_record(run)
    done = record is not None and record.state == "done" and record.policy_version >= config.run.steps
    return done and (run.model / "config.json").is_file()


def only_one(run: RunDir) -> IO[str]:
    """Take RUN/up.lock, which the kernel releases when this process ends; raises UsageError when another has it."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        return take_lock(run.path / "up.lock")
    except AlreadyLocked as error:
        raise UsageError(f"{run.path}: another `slipstream up` (pid {error.holder}) runs this job") from None
    except OSError as error:
        raise UsageError(f"run.dir: {run.path} cannot be created: {error}") from None
