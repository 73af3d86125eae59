"""The items of a selftest: each is a choice of the repository's tests, which run on the machine's own device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.config.parallel_layout import PLAIN
from launch.doctor.machine import Machine

PARITY = "tests/integration/megatron/test_megatron_parity.py"
RESUME = "tests/integration/learner/test_resume.py"
# read by tests/device.py and the test of the quickstart
RANKS, STEPS = "SLIPSTREAM_TEST_RANKS", "SLIPSTREAM_TEST_STEPS"
PACE = "SLIPSTREAM_TEST_PACE"
FEWEST_RANKS, MOST_RANKS = 2, 8  # Layouts have so many ranks, which share a GPU where there are fewer.
SUMS = 20_000  # A layout needs about 1,000 collectives, and about 15 layouts have two ranks.


@dataclass(frozen=True)
class Item:
    """`tests` are arguments of pytest; they run in the environment of `role`, where it has the packages."""

    name: str
    title: str
    tests: tuple[str, ...]
    packages: tuple[str, ...]  # top-level modules
    role: str = "learner"
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 180.0  # on a GPU, without its sums
    sums: int = 0  # collectives one after another, which are slow where ranks share a GPU
    cuda: bool = False  # it says nothing on a CPU


def items(machine: Machine) -> tuple[Item, ...]:
    """All items, in the order in which they run."""
    ranks = str(min(MOST_RANKS, max(FEWEST_RANKS, len(machine.gpus))))
    megatron, engine = ("torch", "megatron"), ("torch", "vllm")
    weights = ("tests/contract/test_weight_transports.py", *(["-k", "nccl"] if machine.gpus else []))
    killed = (RESUME, "-k", "killed_with_9_at_any_moment")
    flips = ("tests/integration/test_engine_weights.py",)
    quickstart = ("tests/integration/jobs/test_quickstart.py",)
    return (
        Item("parity", "Megatron against Hugging Face, float32 and bfloat16", (PARITY,), megatron, env={RANKS: "1"}),
        Item("layouts", f"the same on up to {ranks} ranks", (PARITY,), megatron, "learner", {RANKS: ranks}, 240, SUMS),
        Item(
            *("plain", "the same without Transformer Engine", (PARITY,), (*megatron, "transformer_engine")),
            **{"env": {RANKS: "1", PLAIN: "1"}, "cuda": True},
        ),
        Item("checkpoint", "saved, killed with -9, resumed", killed, megatron),
        Item("weights", "weight transports and their faults", weights, ("torch",)),
        Item("engine", "vLLM: labels, flips, canary, read-back", flips, engine, "rollout"),
        Item("quickstart", "40 steps of the quickstart", quickstart, engine, "rollout", {STEPS: "40"}, 240),
    )
