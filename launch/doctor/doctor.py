"""slipstream doctor [CONFIG|RUN]: what this machine can run, what is missing for a config, why a job stands still.

It needs neither torch nor a GPU. Every finding says what was found, why it matters and how to repair it.
docs/doctor.md lists the findings.
Exit codes: 0 nothing in the way (warnings may be there), 1 a problem, 2 bad usage.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from common.config.checks import resolve_paths
from common.config.loading import load_either
from common.config.schema import BaseConfig
from common.errors import EXIT_DONE, EXIT_FAILED, UsageError
from common.process.run_dir import RunDir
from launch.doctor import packages, resources
from launch.doctor.config_files import check_config_and_files
from launch.doctor.findings import Finding
from launch.doctor.machine import Machine, look
from launch.doctor.network import check_network
from launch.doctor.run_state import check_run
from launch.plan.review import GPUS_PER_NODE, review
from launch.resolve_target import config_file

SIGNS = {"problem": ("✗", "red"), "warning": ("!", "yellow"), "fine": ("✓", "green")}


def command(args: argparse.Namespace) -> int:
    """Print what was found; exit code 1 when there is a problem."""
    config, file = None, ""
    if args.config is not None:
        file = str(config_file(args.config))
        config = resolve_paths(load_either(Path(file), args.overrides))  # without the checks of a launch
    elif args.overrides:
        raise UsageError(f"{args.overrides[0]} overrides a key of no config; name one: slipstream doctor CONFIG")
    machine = look()
    findings = list(examine(machine, args.role or packages.role_of(machine), config, file))
    if args.json:
        print(msgspec.json.encode(findings).decode())
    else:
        show(findings)
    return EXIT_FAILED if any(f.level == "problem" for f in findings) else EXIT_DONE


def examine(machine: Machine, role: str, config: BaseConfig | None, file: str) -> Iterable[Finding]:
    """Every finding: the machine, with the packages of `role`; then the config named `file`; then its run."""
    gpus = max(len(machine.gpus), GPUS_PER_NODE)
    reviewed = None if config is None else review(config, file, gpus)
    plan = None if reviewed is None else reviewed.plan
    yield packages.check_python(machine)
    yield from packages.check_packages(machine, role, packages.pins_of(role))
    yield from packages.check_environments()
    yield from packages.check_torch(machine, config)
    yield resources.check_cores(machine, config)
    yield resources.check_memory(machine, config, plan)
    yield resources.check_shm(machine, config)
    yield resources.check_open_files(machine, config)
    yield resources.check_clock(machine, config)
    if config is None or reviewed is None:
        return
    yield from check_config_and_files(reviewed)
    run = RunDir.of(config)
    yield from resources.check_disk(run.path, config, plan)
    found, running = check_run(run, config)
    if config.rl is not None:
        yield from check_network(config.rl, running)
    yield from found


def show(findings: Iterable[Finding]) -> None:
    """Problems and warnings with reasons, the rest in a line each."""
    console = Console()
    counts = dict.fromkeys(SIGNS, 0)
    for finding in findings:
        sign, colour = SIGNS[finding.level]
        counts[finding.level] += 1
        console.print(Text.assemble((f"{sign} {finding.check}: ", colour), finding.what), soft_wrap=True)
        if finding.level != "fine":
            console.print(f"    why:  {finding.why}", soft_wrap=True, markup=False)
            console.print(f"    fix:  {finding.fix}", soft_wrap=True, markup=False)
    plural = "" if counts["problem"] == 1 else "s"
    console.print(f"{counts['problem']} problem{plural}, {counts['warning']} warnings, {counts['fine']} fine")
