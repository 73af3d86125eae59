"""slipstream doctor [CONFIG|RUN]: what this machine can run, what is missing for a config, why a job stands still.

It needs neither torch nor a GPU. Every finding says what was found, why it matters and how to repair it.
docs/doctor.md lists the findings.
Exit codes: 0 nothing in the way (warnings may be there), 1 a problem, 2 bad usage.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from common.config.checks import resolve_paths
from common.config.loading import load_either
from common.config.schema import BaseConfig
from common.errors import SlipstreamError, UsageError
from common.process.lock_file import is_locked, lock_holder
from common.process.run_dir import RunDir
from launch.checks import job, machine
from launch.checks.findings import Finding, exit_code, fine, problem, show, warning
from launch.checks.machine import Machine, look
from launch.checks.review import GPUS_PER_NODE, Review, review
from launch.observe.job_view import STOPPING, stall_sentence, stalls_of
from launch.observe.observation import Observation, observe
from launch.resolve_target import Target, config_file
from learner.loop.run_files import read_record

# ---------------------------------------------------------------- the run folder


LOCKS = ("up.lock", "store/lock")
LONG_S = 60.0  # a wait of this length is worth a warning
ANSWER_S = 3.0


def check_run(run: RunDir, config: BaseConfig) -> tuple[list[Finding], bool]:
    """(findings, whether a broker of this run answers)."""
    found: list[Finding] = []
    try:
        run.check_agrees(config)
        run.check_checkpoints(config, run.run_id)
    except UsageError as error:
        why = "a run continues with the config that it began with"
        found.append(problem("run", "other_config", str(error), why=why, fix="another folder, or remove it"))
    if not os.path.isdir(run.path):
        return found or [fine("run", f"{run.path} does not exist yet")], False
    seen = None
    with suppress(SlipstreamError):
        seen = observe(Target(run, config.broker.credentials), ANSWER_S)
    running = seen is not None and seen.live
    if seen is not None and (seen.live or seen.unreachable):
        found += _stalls(seen)
    if not running:
        found += [*_stale_broker(run), *_remains(run)]
    record = read_record(run)
    if record is not None and record.state == "running" and not record.runs_here:
        what = f"learner {record.pid} did not say how it ended"
        why = f"it was killed at version {record.policy_version} or later (or runs on another machine)"
        fix = "`slipstream up CONFIG` continues from the newest checkpoint"
        found.append(warning("run", "learner_killed", what, why=why, fix=fix))
    return found or [fine("run", f"{run.path}: nothing in the way")], running


def _stalls(seen: Observation) -> list[Finding]:
    found: list[Finding] = []
    for stall in stalls_of(seen):
        fix = stall.advice
        if stall.kind in STOPPING:
            found.append(problem("stall", stall.kind, stall_sentence(stall), why="the job makes no progress", fix=fix))
        elif (stall.since_s or 0.0) > LONG_S:
            found.append(warning("stall", stall.kind, stall_sentence(stall), why="that is long", fix=fix))
        else:
            found.append(fine("stall", stall_sentence(stall)))
    return found or [fine("run", f"runs, broker {seen.status.pid} at {seen.status.address}; no process waits for long")]


def _stale_broker(run: RunDir) -> Iterator[Finding]:
    file = run.broker()
    if file is None:
        return
    if file.runs_here:
        state = ""
        with suppress(psutil.Error):
            state = psutil.Process(file.pid).status()
        what = f"broker {file.pid} at {file.address} does not answer{f' ({state})' if state else ''}"
        fix = f"kill -CONT {file.pid}" if state == "stopped" else f"RUN/logs/broker-0.log; then kill {file.pid}"
        yield problem("run", "broker_silent", what, why="a second broker is kept out while it lives", fix=fix)
    elif not file.ended:
        what = f"broker {file.pid} of {file.host} at {file.address} does not answer"
        why = "whether it has ended is not visible here: it runs, or ran, on another machine or in another container"
        yield warning("run", "broker_elsewhere", what, why=why, fix="RUN/logs/broker-0.log; `slipstream status` there")
    else:
        what = f"{run.broker_json} was left by broker {file.pid}, which is gone"
        why = "it was killed; learner and nodes that are started by hand would wait for it"
        fix = "nothing: `slipstream up` and `slipstream broker` replace it"
        yield warning("run", "broker_killed", what, why=why, fix=fix)


def _remains(run: RunDir) -> Iterator[Finding]:
    """Locks of other processes, and learners and nodes of this run without a broker."""
    for path in (run.path / name for name in LOCKS):
        if is_locked(path):
            pid = lock_holder(path)
            what = f"{path} is locked by process {pid or 'unknown (of another user or machine)'}"
            why = "another job works on this folder, or what is left of one"
            yield problem("run", "locked", what, why=why, fix=f"stop process {pid}" if pid else f"fuser {path} as root")
    config = os.fspath(run.config.resolve())
    left: dict[int, str] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if config in words and process.pid != os.getpid() and "doctor" not in words:
            left[process.pid] = next((word for word in words if word in ("learner", "rollout", "broker")), "role")
    if left:
        named = ", ".join(f"{pid} ({role})" for pid, role in [*left.items()][:6])
        what = f"processes of this run without a broker: {named}"
        why = "they take memory and cores, and would join the next job of this folder"
        yield problem("run", "roles_left", what, why=why, fix=f"kill {min(left)}, ...")


# ---------------------------------------------------------------- certificate


def check_certificate(reviewed: Review) -> Iterator[Finding]:
    """Whether the job's numbers are proven. A job without a certificate has no finding, unless it is refused."""
    found = reviewed.standing
    refuses = reviewed.config.model.uncertified == "refuse"
    if found is None or not (refuses or found.file.exists()):
        return
    if not found.why:
        yield fine("certificate", found.sentence)
        return
    why = "layout, adapters, critic, loss and precision of this job were not compared with Hugging Face together"
    why += "; model.uncertified: refuse ends such a job" * refuses
    code = "none" if found.certificate is None else "lapsed"
    level = problem if refuses else warning
    yield level("certificate", code, found.why, why=why, fix=f"slipstream certify {reviewed.file}")


# ---------------------------------------------------------------- command


def command(args: argparse.Namespace) -> int:
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
    yield from check_certificate(reviewed)
    run = RunDir.of(config)
    yield from job.check_disk(run.path, config, plan)
    found, running = check_run(run, config)
    if config.rl is not None:
        yield from job.check_network(config.rl, running)
    yield from found
