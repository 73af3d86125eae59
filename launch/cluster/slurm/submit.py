"""slipstream slurm CONFIG: broker, learner and fleet of a run as jobs of Slurm. See docs/slurm.md.

The batch scripts are RUN/slurm/ROLE.sbatch: one job each for broker and learner, an array for the fleet.

slipstream scale RUN: more or fewer nodes for such a run, by hand or as the advisor says.
"""

import argparse
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.config.checks import resolve_paths
from common.config.loading import load_config
from common.config.network_checks import COLLECTIVES_ARE_OPEN, is_loopback, is_wildcard, split_address
from common.config.schema import Config
from common.errors import EXIT_DONE, ConfigError, SlipstreamError, UsageError
from common.process.run_dir import RunDir, write_atomic, write_json
from common.run_reader import RecentTail, read_recent
from common.security.credentials import KeyFolder
from launch.certificates import first_line
from launch.checks.review import review
from launch.cluster.slurm import container
from launch.cluster.slurm.jobs import Jobs, end_run, leave, read_jobs, slurm, tasks_of
from launch.keys import make
from launch.observe.advisor import Advice, advice_for
from launch.observe.observation import outcome_of
from launch.resolve_target import config_of, find_run, warn_of_unused
from launch.sinks.process import by_hand
from launch.up.devices import interpreter

NODE_KEY = "fleet"  # the credential that all nodes share
ROLES = ("broker", "learner", "fleet")
LOOK_EVERY_S = 10.0
SRUN = 'srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"'
Options = dict[str, str | None]  # sbatch's, without the dashes; None: the option has no value
SCRIPT = """#!/usr/bin/env bash
# Job {name}. `slipstream slurm` writes this file again at each submission.
{options}
{setup}
# role_job starts the role again after a crash, passes signals on, and ends the run's other jobs when the run is over.
# It puts the address of this host in place of {{host}}, and that of the run's broker in place of {{broker}}.
export PYTHONPATH={path}
exec {python} -P -m launch.cluster.slurm.role_job {run} {role} -- \\
  {command}
"""


class Chosen(NamedTuple):
    """The choices of a command for a role's jobs; `options` replace those that follow from the config."""

    options: Options
    setup: list[str]  # shell lines that run first
    image: str  # its container's; '' for none


def command(args: argparse.Namespace) -> int:
    if args.cancel:
        run = find_run(args.config)
        end_run(run, print)
        print(f"{run.path} has no jobs; `slipstream slurm CONFIG` continues it from its newest checkpoint")
        return EXIT_DONE
    chosen = choices(args)
    if not args.dry_run:
        slurm("sbatch", "--version")
    submit_run(*prepared(args.config, args.overrides), chosen, args.dry_run)
    return EXIT_DONE


def submit_run(config: Config, run: RunDir, chosen: Mapping[str, Chosen], dry_run: bool) -> None:
    """Write the scripts of a run and submit them, or print them; of a finished run, say only that.

    Raises UsageError when its jobs have not ended, or when Slurm refuses.
    """
    reached = outcome_of(run, config, read_recent(run.metrics))
    if not dry_run and reached.finished:
        print(f"{run.path} is {reached.sentence()}")
        return
    if not dry_run and (tasks := tasks_of(read_jobs(run).ids)):
        ids = " ".join(task.id for task in tasks)
        raise UsageError(f"{run.path}: its jobs {ids} have not ended; `slipstream slurm RUN --cancel` ends them")
    for role, text in render(config, run, chosen).items():
        write_atomic(script(run, role), text.encode(), mode=0o755)
        print(f"--- {script(run, role)}\n{text}" if dry_run else script(run, role))
    if not dry_run:
        jobs = submit(run, config.rollout.nodes)
        print(f"broker {jobs.broker}, learner {jobs.learner}, fleet {' '.join(jobs.fleet) or 'of no nodes'}")


def prepared(file: str, overrides: list[str]) -> tuple[Config, RunDir]:
    """The config of a run on many hosts after all checks, with keys, written to its run folder; raises UsageError."""
    config, run, keys = reviewed(file, overrides)
    if keys is not None:
        make(keys, [NODE_KEY])
        print(f"made keys in {keys.path}")
    said, found = first_line(config, file)
    print(said, flush=True)
    warn_of_unused(config)
    by_hand(config, run)
    if not run.began:  # a dry run left it, or jobs that Slurm refused
        run.config.unlink(missing_ok=True)
    run.prepare(config)
    found.keep(run)
    return config, run


def reviewed(file: str, overrides: Sequence[str]) -> tuple[Config, RunDir, KeyFolder | None]:
    """As `prepared`, with nothing written: the third is the folder of the keys, None when they are there."""
    config = resolve_paths(load_config(Path(file), overrides))
    if config.weights.transport != "relay" and config.weights.network != "trusted":
        hint = f"the jobs run on several hosts; {COLLECTIVES_ARE_OPEN}"
        raise ConfigError(file, "weights.transport", "relay", config.weights.transport, hint)
    keys = KeyFolder(config.broker.credentials or Path(config.run.dir) / "keys")
    no_keys = not keys.path.is_file() and not keys.server.exists()
    config = resolve_paths(load_config(Path(file), [*overrides, f"broker.credentials={keys.path}"]))
    asked = max(config.learner.world_size // config.learner.machines, config.rollout.engine.devices)
    found = review(config, file, gpus_per_node=asked, libraries=False)  # Slurm itself knows the largest host
    for problem in (*found.refused, *found.missing):
        if not (no_keys and problem.key == "broker.credentials"):
            raise ConfigError.of(file, problem)
    run = RunDir.of(config)
    run.check_spares(file)
    if run.began:
        run.check_agrees(config)
    return config, run, keys if no_keys else None


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
        write_json(run.slurm_jobs, jobs)
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
    write_json(run.slurm_jobs, jobs)
    return jobs.fleet[-1]


def sbatch(run: RunDir, role: str, *options: str) -> str:
    """Submit a role's script; returns the job's id. Raises SlurmError."""
    return slurm("sbatch", "--parsable", *options, str(script(run, role))).partition(";")[0]


def script(run: RunDir, role: str) -> Path:
    return run.path / "slurm" / f"{role}.sbatch"


def choices(args: argparse.Namespace) -> dict[str, Chosen]:
    """By role, from --sbatch, --setup and --container. Raises UsageError."""
    options = parse_options(args.sbatch)
    setup, images = by_role(args.setup), by_role(args.container)
    for image in {image for words in images.values() for image in words if image}:
        container.check(image)
    return {role: Chosen(options[role], setup[role], (images[role] or [""])[-1]) for role in ROLES}


def by_role(words: Sequence[str]) -> dict[str, list[str]]:
    """The words [ROLE:]TEXT of each role; without a role a word is for all of them."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for word in words:
        role, _, text = word.partition(":")
        for each in [role] if role in ROLES else ROLES:
            found[each].append(text if role in ROLES else word)
    return found


def parse_options(words: Sequence[str]) -> dict[str, Options]:
    """By role, from words [ROLE:]OPTION[=VALUE]; an empty value leaves an option out. Raises UsageError."""
    found: dict[str, Options] = {role: {} for role in ROLES}
    for word in words:
        match = re.fullmatch(rf"(?:({'|'.join(ROLES)}):)?([a-z][a-z0-9-]+)(?:=(.*))?", word)
        if match is None:
            expected = f"[ROLE:]OPTION[=VALUE], where ROLE is one of {', '.join(ROLES)}"
            raise UsageError(f"--sbatch: expected {expected}, found {word!r}; for example learner:partition=gpu")
        for role in ROLES if match[1] is None else (match[1],):
            found[role][match[2]] = match[3]
    return found


def render(config: Config, run: RunDir, chosen: Mapping[str, Chosen]) -> dict[str, str]:
    """The script of each role."""
    return {role: _script(config, run, role, chosen[role]) for role in ROLES}


def _script(config: Config, run: RunDir, role: str, chosen: Chosen) -> str:
    options = _options(config, run, role) | chosen.options
    given = [(name, value) for name, value in options.items() if value != ""]
    python = shlex.quote(interpreter("rollout" if role == "fleet" else "learner")[1])
    lines = "\n".join(f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in given)
    setup = "".join(f"{line}\n" for line in ("", "set -e", *chosen.setup)) if chosen.setup else ""
    words = {"path": shlex.quote(os.environ.get("PYTHONPATH", "")), "run": shlex.quote(str(run.path))}
    words |= {"name": options["job-name"], "role": role, "python": python}
    start = f"{python} -P -m launch.cli"
    srun = SRUN if role == "learner" and config.learner.machines > 1 else ""
    if chosen.image:
        start, mounted = container.SLIPSTREAM, container.paths(config, run)
        if container.by_apptainer(chosen.image):
            start = f"{container.apptainer(chosen.image, mounted, gpus=role != 'broker')} {start}"
        else:
            srun = f"{SRUN} {container.pyxis(chosen.image, mounted)}"
    begin = f"{srun} {start}".lstrip()
    command = _command(config, role, lambda name: f"{begin} {name} {shlex.quote(str(run.config))}")
    return SCRIPT.format(**words, options=lines, setup=setup, command=command)


def _options(config: Config, run: RunDir, role: str) -> Options:
    """The options that follow from the config: machines, CPUs, GPUs, logs, and that the job may be requeued."""
    learner, rollout = config.learner, config.rollout
    ranks = learner.world_size // learner.machines
    sizes: dict[str, dict[str, int]] = {
        "broker": {"nodes": 1, "cpus-per-task": 2},
        "learner": {"nodes": learner.machines, "cpus-per-task": ranks * learner.threads + 1, "gpus-per-node": ranks},
        "fleet": {"nodes": 1, "cpus-per-task": rollout.threads + 1, "gpus-per-node": rollout.engine.devices},
    }
    log = f"{str(run.logs).replace('%', '%%')}/slurm-{role}-{'%A_%a' if role == 'fleet' else '%j'}.log"
    name = re.sub(r"[^\w.-]+", "-", f"{config.run.name}-{role}")
    size = {"ntasks-per-node": "1"} | {key: str(value) for key, value in sizes[role].items()}
    how = {"requeue": None, "signal": "B:TERM@60", "chdir": os.getcwd(), "output": log, "open-mode": "append"}
    return {"job-name": name, **size, **how}


def _command(config: Config, role: str, slipstream: Callable[[str], str]) -> str:
    """The role's command, as the shell reads it; `slipstream` gives the words up to the config."""
    if role == "fleet":
        node = '--node-id "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
        return f"{slipstream('rollout')} --join '{{broker}}' {node}"
    if role == "learner":
        moves = config.learner.machines == 1 and is_loopback(config.weights.address)
        return f"{slipstream('learner')} --join '{{broker}}'" + " 'weights.address={host}'" * moves
    host, port = split_address(config.broker.addresses[0])
    moves = len(config.broker.addresses) == 1 and (not host or is_loopback(host) or is_wildcard(host))
    return slipstream("broker") + (f" 'broker.address=tcp://{{host}}:{port or 0}'" if moves else "")


# ---------------------------------------------------------------- slipstream scale


def scale_command(args: argparse.Namespace) -> int:
    run = find_run(args.run)
    config = config_of(run)
    if config is None or not read_jobs(run).learner:
        raise UsageError(f"{run.path} has no jobs of Slurm: `slipstream slurm CONFIG` submits them")
    if args.follow_advice is None:
        print(scale(run, args.rollouts))
        return EXIT_DONE
    bounds = parse_bounds(args.follow_advice)
    tail = RecentTail(run.metrics)
    while tasks_of([read_jobs(run).learner]):
        tail.update()
        nodes = sum(task.stays for task in tasks_of(read_jobs(run).fleet))
        advice = advice_for(tail.lines, config.staleness.max)
        if (wanted := wanted_nodes(advice, tail.last.nodes_live if tail.last else 0, nodes, bounds)) != nodes:
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


def wanted_nodes(advice: Advice | None, live: int, nodes: int, bounds: tuple[int, int]) -> int:
    """How many nodes there should be of `nodes`; the advice is about steps that `live` nodes made."""
    if advice is not None and live == nodes and advice.change in ("more_nodes", "fewer_nodes"):
        nodes = advice.nodes
    return min(max(nodes, bounds[0]), bounds[1])
