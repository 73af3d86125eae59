"""One role in this process: slipstream broker / learner / rollout / sft / eval."""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from broker.client.connect import ask_status, connect_observer
from broker.contract import BrokerStatus
from common.config.checks import downloaded
from common.config.loading import load_config, load_either
from common.config.network_checks import fixed_address, split_address
from common.config.schema import BaseConfig, SftConfig
from common.errors import BrokerUnreachable, ConfigError, UsageError, meant
from common.process.install import need_packages
from common.process.logs import log_path, setup_logging
from common.process.run_dir import RunDir, find_broker, known_broker, write_json
from common.security.credentials import own_node_id
from launch.certificates import first_line
from launch.cluster.interface import keep_gloo_here, use_for_weights
from launch.resolve_target import (
    check_address,
    check_same_job,
    checked,
    config_file,
    job_of,
    load_job,
    need_broker_library,
    warn_of_unused,
)
from launch.sinks.process import by_hand
from launch.up.devices import check_devices, rounding_problems
from launch.up.learner_machine import run_machine
from launch.up.ranks import become_torchrun, slurm_machines, thread_environment
from learner.loop.run_files import read_record, went_on
from learner.loss import plugins


def broker(args: argparse.Namespace) -> int:
    found = load_either(Path(args.config), args.overrides)
    config, run = checked(found, args.config, environment=False, reader="broker")
    served = config.served
    need_broker_library(served)
    given = Path(args.config).resolve() != run.config.resolve()  # else a role, `up` for one, has checked the job
    if config.rl is not None and given and not run.began:
        for problem in plugins.ask(config.rl, elsewhere=True):
            raise ConfigError.of(args.config, problem)
    run.check_spares(args.config)
    run.prepare(config)
    setup_logging("broker", "0", run.logs, config.telemetry.log_level)
    from broker.main import run_broker

    return run_broker(served, msgspec.json.encode(config))


def learner(args: argparse.Namespace) -> int:
    """Become torchrun with one process per rank, which does not return; or one launcher of a learner of several."""
    need_packages("learner")
    args.overrides = [*_machines_override(), *args.overrides]
    config, run, address, _ = job_of(args, "learner")
    return run_ranks(args, config, run, address)


def sft(args: argparse.Namespace) -> int:
    """The supervised warm start: as `learner`, with a broker only where it has several machines."""
    need_packages("learner")
    overrides = [*_machines_override(), *args.overrides, *_credentials_override(args)]
    config = load_config(Path(args.config), overrides, SftConfig)
    config, run = checked(config, args.config, environment=False)
    warn_of_unused(config)
    return run_ranks(args, config, run)


def _machines_override() -> list[str]:
    machines = slurm_machines()
    return [f"learner.machines={machines}"] if machines else []


def _credentials_override(args: argparse.Namespace) -> list[str]:
    return [f"broker.credentials={Path(args.credentials).expanduser().resolve()}"] if args.credentials else []


def run_ranks(args: argparse.Namespace, config: BaseConfig, run: RunDir, address: str = "") -> int:
    """Become torchrun, which does not return, or one launcher of several machines."""
    key = "learner.world_size / learner.machines" if config.learner.machines > 1 else "learner.world_size"
    check_devices(config.learner.world_size // config.learner.machines, key)
    said, found = first_line(config, args.config or str(run.config))
    print(said, flush=True)
    if args.config is not None:
        run.check_spares(args.config)
    run.check_agrees(config)
    found.keep(run)
    if config.rl is None or args.config is None or Path(args.config).resolve() != run.config.resolve():
        by_hand(config, run)  # `up` gives its learner RUN/config.yaml, and `slurm` has said it
    if config.learner.machines == 1:
        check_served(args, config, address or fixed_address(config))
        return become_torchrun(config, run, address)
    address, status = answering_broker(args, config, run)
    check_same_job(config, args.config or "this machine", status.run, address)
    return run_machine(config, run, address)


def check_served(args: argparse.Namespace, config: BaseConfig, address: str | None) -> None:
    """Raise UsageError when the broker at an address that no run folder gave serves another job.

    Without an answer the lead rank asks again, and says in the end that no broker is there.
    """
    if config.rl is None or not address:
        return
    try:
        with connect_observer(address, args.join_timeout_s, config.broker.credentials) as client:
            served = client.status().run
    except BrokerUnreachable:
        return
    check_same_job(config, args.config or "this machine", served, address)


def rollout(args: argparse.Namespace) -> int:
    """Run a node until the job is done or it is told to stop."""
    need_packages("rollout")
    config, run, address, run_id = job_of(args, "node")
    for wrong in rounding_problems(config):
        raise ConfigError.of(args.config or f"the job at {args.join}", wrong)
    check_devices(config.rollout.engine.devices, "rollout.engine.tensor_parallel x pipeline_parallel")
    if args.config is not None:
        run.check_agrees(config)
        address, status = answering_broker(args, config, run)
        check_same_job(config, args.config, status.run, address)
        run_id = status.run.run_id
    node_id = own_node_id(config.broker.credentials, args.node_id or f"{socket.gethostname()}-{os.getpid()}")
    setup_logging("rollout", node_id, run.logs, config.telemetry.log_level)
    os.environ.update(thread_environment(config.rollout.threads))
    keep_gloo_here()
    use_for_weights(config, split_address(address.split(",")[0])[0])
    from rollout_fleet.main import run_node

    return run_node(downloaded(config, "node"), address, node_id, args.pool or "", run_id)


def scorer(args: argparse.Namespace) -> int:
    """Serve the model of a scorer until told to stop. It reports to the run's broker whenever there is one."""
    need_packages("rollout")
    if args.join is not None:
        check_address(args.join, "--join")
    config, run = load_job(args.config, [*args.overrides, *_credentials_override(args)], reader="broker")
    found = config.scorers.get(args.name)
    if found is None:
        hint = meant(args.name, config.scorers, f"the config has {', '.join(config.scorers) or 'none'}")
        raise UsageError(f"{args.config}: scorers has no '{args.name}'; {hint}")
    if variable := found.problem_of_key:
        key = f"scorers.{args.name}.api_key_env"
        raise ConfigError(args.config, key, "a variable that is set", f"{variable}, which is not")
    setup_logging("scorer", args.name, run.logs, config.telemetry.log_level)
    keep_gloo_here()
    from rollout_fleet.scorers.reports import Reports
    from rollout_fleet.scorers.server import serve

    reports = Reports(
        args.name,
        found.url,
        log_path(run.logs, "scorer", args.name),
        lambda: args.join or known_broker(config, run),
        credentials=config.broker.credentials,
        run="" if args.join else config.run.name,
    )
    return serve(args.name, found, file=args.config, log=run.logs / f"vllm-{args.name}.log", reports=reports)


def answering_broker(args: argparse.Namespace, config: BaseConfig, run: RunDir) -> tuple[str, BrokerStatus]:
    """The address and the status of the broker at --join, else of the run's; raises UsageError when none answers."""
    try:
        address = args.join or find_broker(config, run, args.join_timeout_s)
    except BrokerUnreachable as error:
        raise UsageError(str(error)) from None
    return address, ask_status(address, args.join_timeout_s, config.broker.credentials)


def evaluate(args: argparse.Namespace) -> int:
    """Accuracy of a model on held-out problems through the same engine and environment as training."""
    need_packages("rollout")
    file = config_file(args.config)
    if load_either(file).rl is None:
        raise UsageError(f"{file} is a warm start's config; eval needs an RL job's, for its environment")
    config, run = load_job(str(file), args.overrides, environment=True)
    if not config.evaluation.paths:
        how = f"`slipstream eval {args.config} 'evaluation.datasets=[FILE]'` measures those of FILE"
        raise UsageError(f"{file}: evaluation.datasets names no held-out problems; {how}")
    if not args.model and went_on(run) and (run.model / "config.json").is_file():
        how = f"`slipstream export {run.path} DIR` writes its newest checkpoint; --model DIR evaluates that"
        raise UsageError(f"{run.model} may be of an earlier step, as the run went on and is not done; {how}")
    model = Path(args.model) if args.model else run.model
    record = read_record(run)  # before the measurement, in whose time the run may go on
    final = record is not None and record.state == "done" and model.resolve() == run.model.resolve()
    setup_logging("eval", "0", run.logs, config.telemetry.log_level)
    os.environ.update(thread_environment(config.rollout.threads))
    with output_to(log_path(run.logs, "eval", "0")) as terminal:
        from rollout_fleet.engine.engine import import_ahead
        from rollout_fleet.node.evaluate import run_eval

        import_ahead(config, model)
        result = run_eval(downloaded(config), model, None if args.json else terminal)
    result = msgspec.structs.replace(result, policy_version=record.policy_version if record and final else None)
    write_json(run.path / "eval.json", result)
    if args.json:
        print(msgspec.json.encode(result).decode())
        return 0
    for name, part in {**result.datasets, str(model): result}.items():
        accuracy = f"greedy accuracy {part.greedy_accuracy:.3f}, sampled {part.sampled_accuracy:.3f}"
        failed = f", {part.failed} episodes failed" if part.failed else ""
        print(f"{name}: {accuracy} on {part.problems} held-out problems{failed}")
    return 0


@contextmanager
def output_to(path: Path) -> Iterator[TextIO]:
    """Send what this process and its children print to a file, so that libraries do not talk over the result.

    It gives stderr as it was, for progress.
    """
    saved = {number: os.dup(number) for number in (1, 2)}
    sys.stdout.flush()
    try:
        with path.open("ab") as log:
            for number in saved:
                os.dup2(log.fileno(), number)
        with os.fdopen(os.dup(saved[2]), "w") as terminal:
            yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in saved.items():
            os.dup2(before, number)


def role_command(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """`slipstream WORDS` with this interpreter, or the one named, whatever PATH says.

    As in all commands for children, -P keeps a common.py in the job's folder from being imported as ours.
    """
    return [python, "-P", "-m", "launch.cli", *words]
