"""Which GPUs, CPU cores and Python environment each role of a job on this machine gets; torch is never imported.

Without a GPU, or where a role's environment has torch for the CPU, a role gets no devices, and nothing changes.
On a small machine roles without GPUs get cores of their own, so that they do not push each other around.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from common.config.schema import BaseConfig, Config
from common.errors import Problem, SlipstreamError, UsageError
from common.process.install import environments_folder

VISIBLE = "CUDA_VISIBLE_DEVICES"
HOST_ID = "NCCL_HOSTID"
FP8_CAPABILITY = 8.9  # GPUs below it have no products in FP8
DRIVERS = {12: 525, 13: 580}  # the oldest driver of each CUDA, by their first numbers: NVIDIA's CUDA release notes
NVIDIA_SMI_S = 60.0  # Without persistence mode the first call initialises every GPU.
SMALL_MACHINE_CORES = 16  # with more, the operating system has room to choose
Cores = frozenset[int] | None  # None: free to run anywhere


@dataclass(frozen=True)
class Place:
    """Interpreter and environment variables of one role."""

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)


def available_cores() -> list[int]:
    """Cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def plan_cores(cores: list[int], learner_threads: int, node_threads: list[int]) -> list[Cores]:
    """Disjoint cores for the threads of all ranks, then of each node; None each unless all fit on a small machine."""
    wanted = [learner_threads, *node_threads]
    if not node_threads or sum(wanted) > len(cores) or len(cores) > SMALL_MACHINE_CORES:
        return [None] * len(wanted)
    free = iter(cores)
    return [frozenset(islice(free, count)) for count in wanted]


def list_gpus() -> list[tuple[str, str]]:
    """(UUID, name) of the GPUs of this machine, in nvidia-smi's order; [] where there is no driver.

    Raises SlipstreamError when nvidia-smi does not answer, as all functions here that ask it.
    """
    rows = [line.partition(",") for line in _nvidia_smi("uuid,name")]
    return [(uuid.strip(), name.strip()) for uuid, _, name in rows]


def compute_capability() -> float:
    """The first GPU's: Hopper has 9.0, Blackwell 10.0; 0 where there is no GPU."""
    with suppress(ValueError):
        return float(next(_nvidia_smi("compute_cap"), "0"))
    return 0.0


def driver() -> str:
    """Version of the driver; '' where there is none."""
    return next(_nvidia_smi("driver_version"), "").strip()


def too_old(driver: str, cuda: str | None) -> str:
    """Why a torch that was built for `cuda` would see no device with this driver; '' where it sees them."""
    least = DRIVERS.get(int(cuda.partition(".")[0]), 0) if cuda else 0
    first = driver.partition(".")[0]
    return f"torch's CUDA {cuda} needs a driver {least} or later, found {driver}" if 0 < _number(first) < least else ""


def _number(word: str) -> int:
    return int(word) if word.isdigit() else 0


def rounding_problems(config: BaseConfig) -> Iterator[Problem]:
    """Whether the GPUs here, if there are any, compute with the weights that rollout.engine.quantization rounds."""
    kind = config.rl.rollout.engine.quantization if config.rl is not None else None
    capability = compute_capability() if kind is not None else 0.0
    if 0 < capability < FP8_CAPABILITY:
        expected = f"null on a GPU of compute capability {capability}"
        hint = f"products in FP8 need {FP8_CAPABILITY}: Ada, Hopper or later"
        yield Problem("rollout.engine.quantization", expected, f"'{kind}'", hint)


def port_problems(config: BaseConfig) -> Iterator[Problem]:
    """A port that every role of an RL job would take, where all of them run on one machine with one config."""
    if config.rl is not None and (port := config.telemetry.health_port):
        hint = (
            "its roles share a machine, and `slipstream status` tells their health; roles started one by one may have"
        )
        yield Problem("telemetry.health_port", "0 with `slipstream up`", f"{port}", f"{hint} ports of their own")


def _nvidia_smi(fields: str) -> Iterator[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except subprocess.TimeoutExpired:
        what = f"nvidia-smi did not answer within {NVIDIA_SMI_S:g} s, so the GPUs of this machine are unknown"
        raise SlipstreamError(f"{what}; run `nvidia-smi`, and try again when it answers") from None
    except (OSError, subprocess.SubprocessError):
        return
    yield from filter(str.strip, done.stdout.splitlines())


def visible_devices(gpus: Sequence[tuple[str, str]], visible: str | None) -> list[str]:
    """Names of the GPUs that this process may use; as CUDA does, it stops at the first word that names none."""
    if visible is None:
        return [str(number) for number in range(len(gpus))]
    found: list[str] = []
    for word in map(str.strip, visible.split(",")):
        known = word.startswith("MIG-") or (word.startswith("GPU-") and any(uuid.startswith(word) for uuid, _ in gpus))
        if word in found or not (known or (word.isdigit() and int(word) < len(gpus))):
            break
        found.append(word)
    return found


def torch_cuda(prefix: Path | None = None) -> str | None:
    """CUDA version that torch was built for, here or in the environment `prefix`; None: for the CPU, or no torch."""
    if prefix is None:
        spec = find_spec("torch")
        files = [Path(spec.origin).with_name("version.py")] if spec and spec.origin else []
    else:
        files = [*prefix.glob("lib/python3*/site-packages/torch/version.py")]
    text = files[0].read_text(encoding="utf-8") if files and files[0].is_file() else ""
    found = re.search(r"^cuda.*= *['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None


def check_devices(wanted: int, key: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError where this machine's driver or GPUs are not enough for a role with `wanted` of them, by `key`.

    Nothing is said where there is no GPU, or torch is for the CPU.
    """
    gpus, cuda = list_gpus(), torch_cuda()
    devices = visible_devices(gpus, environ.get(VISIBLE))
    if not gpus or cuda is None:
        return
    if wrong := too_old(driver(), cuda):
        raise UsageError(f"{wrong}; update the driver, or give {sys.prefix} a torch for an older CUDA")
    if wanted > len(devices):
        bound = f" in {VISIBLE}={environ[VISIBLE]}" if VISIBLE in environ else ""
        raise UsageError(f"{key}: expected at most the GPUs of this machine, {len(devices)}{bound}, found {wanted}")


def interpreter(role: str, root: Path | None = None) -> tuple[Path | None, str]:
    """(environment, Python) of `learner` or `rollout`; (None, this process's) where the role has none of its own."""
    prefix = (root or environments_folder()) / f".venv-{role}"
    python = prefix / "bin" / "python"
    return (prefix, str(python)) if python.exists() else (None, sys.executable)


def assign(
    config: Config, environ: Mapping[str, str] = os.environ, root: Path | None = None, share: bool = False
) -> dict[str, Place]:
    """The place of each role that has one of its own; {} without a GPU. Raises UsageError when there are too few.

    With `share` every role gets all GPUs. Its processes use the first ones. NCCL takes that for a mistake on one host.
    Where the caller has set NCCL_HOSTID, each role pretends to have a host of its own.
    """
    gpus = list_gpus()
    devices = visible_devices(gpus, environ.get(VISIBLE))
    if not devices:
        return {}
    if share and config.weights.transport == "nccl" and HOST_ID not in environ:
        fix = f"set weights.transport=gloo; or set {HOST_ID} to any name, NCCL_SOCKET_IFNAME=lo and NCCL_IB_DISABLE=1"
        raise UsageError(f"--share-gpus: NCCL refuses two processes on one GPU; {fix}")
    if share and config.rollout.nodes and config.rollout.engine.kv_cache_mib is None:
        why = "without it the engine takes a share of the GPU's memory, while the learner allocates its own"
        fix = "set it to the size of the engine's KV cache in MiB, for example 20480"
        raise UsageError(f"--share-gpus: rollout.engine.kv_cache_mib is unset; {why}; {fix}")
    places: dict[str, Place] = {}
    here = driver()
    needed = 0
    free = iter(devices)
    for role, count in config.device_shares.items():
        prefix, python = interpreter("learner" if role == "learner" else "rollout", root)
        cuda = torch_cuda(prefix)
        if wrong := too_old(here, cuda):
            raise UsageError(f"{wrong}; update the driver, or give {prefix or python} a torch for an older CUDA")
        count = count if cuda else 0
        own = devices if share else islice(free, count)
        env = {VISIBLE: ",".join(own)} if count else {}
        if count and share and HOST_ID in environ:
            env[HOST_ID] = f"{environ[HOST_ID]}-{role}"
        places[role] = Place(python, env)
        needed = max(needed, count) if share else needed + count
    if needed > len(devices):
        bound = f" in {VISIBLE}={environ[VISIBLE]}" if VISIBLE in environ else ""
        lower = f"lower learner.world_size ({config.learner.world_size}), rollout.nodes ({config.rollout.nodes})"
        engine = f"rollout.engine.tensor_parallel x pipeline_parallel ({config.rollout.engine.devices})"
        lower += f" or the GPUs of an engine, {engine}. With --share-gpus all roles use the same ones. "
        lower += "`slipstream rollout --join` starts nodes on other machines"
        raise UsageError(f"the job needs {needed} GPUs, found {len(devices)}{bound}; {lower}")
    return places


def table(places: Mapping[str, Place], root: Path | None = None) -> list[str]:
    here = f"{root or environments_folder()}{os.sep}"
    rows = [(role, p.env.get(VISIBLE, "CPU"), p.python.removeprefix(here)) for role, p in places.items()]
    return [f"  {role:<10} {devices:<12} {python}" for role, devices, python in rows]
