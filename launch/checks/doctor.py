"""slipstream doctor [CONFIG|RUN]: what this machine can run, what is missing for a config, why a job stands still.

It needs neither torch nor a GPU. Every finding says what was found, why it matters and how to repair it.
docs/doctor.md lists the findings.
Exit codes: 0 nothing in the way (warnings may be there), 1 a problem, 2 bad usage.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.config.checks import resolve_paths
from common.config.loading import load_either
from common.config.schema import BaseConfig
from common.errors import UsageError
from common.process.run_dir import RunDir
from launch.checks import job, machine
from launch.checks.findings import Finding, exit_code, show
from launch.checks.machine import Machine, look
from launch.checks.review import GPUS_PER_NODE, review
from launch.checks.run_folder import check_run
from launch.resolve_target import config_file


def command(args: argparse.Namespace) -> int:
    """Print what was found; exit code 1 when there is a problem."""
    config = None
    file = ""
    if args.config is not None:
        file = str(config_file(args.config))
        config = resolve_paths(load_either(Path(file), args.overrides))  # without the checks of a launch
    elif args.overrides:
        raise UsageError(f"{args.overrides[0]} overrides a key of no config; name one: slipstream doctor CONFIG")
    here = look()
    findings = list(examine(here, args.role or machine.role_of(here), config, file))
    if args.json:
        print(msgspec.json.encode(findings).decode())
    else:
        show(findings)
    return exit_code(findings)


def examine(here: Machine, role: str, config: BaseConfig | None, file: str) -> Iterator[Finding]:
    """Every finding: the machine, with the packages of `role`; then the config named `file`; then its run."""
    reviewed = None if config is None else review(config, file, max(len(here.gpus), GPUS_PER_NODE))
    plan = None if reviewed is None else reviewed.plan
    yield machine.check_python(here)
    yield from machine.check_packages(here, role, machine.pins_of(role))
    yield from machine.check_environments()
    yield from machine.check_torch(here, config)
    yield machine.check_cores(here, config)
    yield machine.check_memory(here, config, plan)
    yield machine.check_shm(here, config)
    yield machine.check_open_files(here, config)
    yield machine.check_clock(here, config)
    if config is None or reviewed is None:
        return
    yield from job.check_config_and_files(reviewed)
    run = RunDir.of(config)
    yield from job.check_disk(run.path, config, plan)
    found, running = check_run(run, config)
    if config.rl is not None:
        yield from job.check_network(config.rl, running)
    yield from found
