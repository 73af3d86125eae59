"""One role in this process: slipstream broker / learner / rollout / sft / eval."""

import argparse
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from broker.client.connect import ask_status
from broker.contract import BrokerStatus
from common.config.checks import downloaded
from common.config.loading import load_config, load_either
from common.config.schema import Config, SftConfig
from common.errors import BrokerUnreachable, UsageError
from common.process.broker_address import find_broker
from common.process.logs import log_path, setup_logging
from common.process.run_dir import RunDir, write_json
from common.process.versions import INSTALL_BRIDGE, versions
from common.security.credentials import own_node_id
from launch.cluster.interface import LOOPBACK, routed
from launch.resolve_target import check_same_job, checked, config_file, job_of, load_job, need_broker_library
from launch.up.devices import compute_capability

# torchrun kills ranks that are still busy this long after SIGTERM: a step and a checkpoint must fit in.
SHUTDOWN_TIMEOUT_S = 300
BLACKWELL = 10.0  # compute capability
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def broker(args: argparse.Namespace) -> int:
    """Run the broker until it is told to stop."""
    found = load_either(Path(args.config), args.overrides)
    config, run = checked(found, args.config, environment=False, reader="broker")
    served = config.meeting if isinstance(config, SftConfig) else config
    need_broker_library(served)
    run.prepare(config)
    setup_logging("broker", "0", run.logs, config.telemetry.log_level)
    from broker.main import run_broker

    return run_broker(served, msgspec.json.encode(config))


def learner(args: argparse.Namespace) -> int:
    """Become torchrun with one process per rank, which does not return; or one launcher of a learner of several."""
    args.overrides = [*slurm_machines(), *args.overrides]
    config, run, address = job_of(args, "learner")
    return run_ranks(args, config, run, address)


def slurm_machines() -> list[str]:
    """The override for a step of Slurm that runs one task on each of several machines."""
    machines, tasks = (os.environ.get(f"SLURM_STEP_NUM_{name}", "") for name in ("NODES", "TASKS"))
    several = machines == tasks and machines.isdecimal() and int(machines) > 1
    return [f"learner.machines={machines}"] if several else []


def sft(args: argparse.Namespace) -> int:
    """The supervised warm start: as `learner`, with a broker only where it has several machines."""
    own = [f"broker.credentials={Path(args.credentials).expanduser().resolve()}"] if args.credentials else []
    config = load_config(Path(args.config), [*slurm_machines(), *args.overrides, *own], SftConfig)
    return run_ranks(args, *checked(config, args.config, environment=False))


def run_ranks(args: argparse.Namespace, config: Config | SftConfig, run: RunDir, address: str = "") -> int:
    """Become torchrun, which does not return, or one launcher of several machines."""
    if config.learner.machines == 1:
        return become_torchrun(config, run, address)
    from launch.cluster.learner_machine import run_machine

    address, status = answering_broker(args, config, run)
    check_same_job(config, args.config or "this machine", status.run.config, address)
    return run_machine(config, run, address)


def rollout(args: argparse.Namespace) -> int:
    """Run a node until the job is done or it is told to stop."""
    config, run, address = job_of(args, "node")
    if args.config is not None:
        run.check_agrees(config)
        address, _ = answering_broker(args, config, run)
    node_id = own_node_id(config.broker.credentials, args.node_id or f"{socket.gethostname()}-{os.getpid()}")
    setup_logging("rollout", node_id, run.logs, config.telemetry.log_level)
    os.environ.update(thread_environment(config.rollout.threads))
    from rollout_fleet.main import run_node

    return run_node(downloaded(config, "node"), address, node_id, args.pool or "")


def answering_broker(args: argparse.Namespace, config: Config | SftConfig, run: RunDir) -> tuple[str, BrokerStatus]:
    """The address and the status of the broker at --join, else of the run's; raises UsageError when none answers."""
    try:
        address = args.join or find_broker(config, run, args.join_timeout_s)
    except BrokerUnreachable as error:
        raise UsageError(str(error)) from None
    return address, ask_status(address, args.join_timeout_s, config.broker.credentials)


def evaluate(args: argparse.Namespace) -> int:
    """Accuracy of a model on held-out problems through the same engine and environment as training."""
    file = config_file(args.config)
    if not isinstance(load_either(file), Config):
        raise UsageError(f"{file} is a warm start's config; eval needs an RL job's, for its environment")
    config, run = load_job(str(file), args.overrides, environment=True)
    if not config.evaluation.datasets:
        raise UsageError(f"{file}: evaluation.datasets names no held-out problems")
    model = Path(args.model) if args.model else run.model
    setup_logging("eval", "0", run.logs, config.telemetry.log_level)
    os.environ.update(thread_environment(config.rollout.threads))
    with output_to(log_path(run.logs, "eval", "0")):
        from rollout_fleet.node.evaluate import run_eval

        result = run_eval(downloaded(config), model)
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
def output_to(path: Path) -> Iterator[None]:
    """Send what this process and its children print to a file, so that libraries do not talk over the result."""
    saved = {number: os.dup(number) for number in (1, 2)}
    sys.stdout.flush()
    try:
        with path.open("ab") as log:
            for number in saved:
                os.dup2(log.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in saved.items():
            os.dup2(before, number)


def become_torchrun(config: Config | SftConfig, run: RunDir, broker: str = "") -> NoReturn:
    """Replace this process, so that signals and exit codes are torchrun's own."""
    need_learner_packages()
    run.prepare(config)
    ranks = str(config.learner.world_size)
    command = torchrun(run, ["--nproc-per-node", ranks], ["--broker", broker] if broker else [])
    with suppress(UsageError):  # else gloo listens at the address that the host's name leads to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", routed(LOOPBACK).name)
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, **learner_environment(config)})


def need_learner_packages() -> None:
    """Raise UsageError for a package without which no rank starts."""
    here = versions()
    for name in ("torch", "megatron-core"):
        if not here[name]:
            raise UsageError(f"{name} is not installed in this environment; run launch/setup.sh cpu or learner")
    if not here["megatron-bridge"]:
        raise UsageError(f"megatron-bridge is not installed, and no extra can bring it; run `{INSTALL_BRIDGE}`")


def torchrun(run: RunDir, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """torchrun with more `options`, which starts the ranks of a run once, with more `words` for each."""
    limits = ["--max-restarts", "0", "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
    rank = ["-m", "learner.main", "--config", str(run.config), *words]
    return [sys.executable, "-m", "learner.torchrun", *options, *limits, *rank]


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that bound the CPU threads of torch; read once, at import."""
    return {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}


def learner_environment(config: Config | SftConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of the ranks that their libraries read once, at import or at the first call of CUDA."""
    found = thread_environment(config.learner.threads)
    found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts
    # Up to Hopper one queue keeps a communication ahead of the product that it overlaps: layers.py of
    # megatron.core.tensor_parallel. Blackwell wants many: PerfEnvPlugin in run_plugins.py of megatron.bridge.recipes.
    parallel, capability = config.learner.parallel, compute_capability()
    split = parallel.tensor * parallel.context
    if QUEUES not in environ and 0 < capability < BLACKWELL and split > 1:
        found[QUEUES] = "1"
    elif QUEUES not in environ and capability and 1 < split < config.learner.world_size:
        found[QUEUES] = "32"
    # Torch rounds pinned memory up to a power of two and never gives it back, except for what is larger than this.
    settings = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    known = tuple(map(int, re.findall(r"\d+", versions()["torch"])[:2])) >= (2, 13)  # older ones refuse the word
    if known and "pinned_max_cached_size_mb" not in settings:
        found["PYTORCH_ALLOC_CONF"] = f"{settings},pinned_max_cached_size_mb:1".lstrip(",")
    return found


def role_command(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """`slipstream WORDS` with this interpreter, or the one named, whatever PATH says."""
    return [python, "-m", "launch.cli", *words]
