"""A fault scenario, and the list of all of them; docs/guarantees.md is made of these texts."""

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rigs.fault_run import FaultRig

SLOWER = 30.0  # A test machine may be this much slower than the one whose figures are in the docs.
PROMISE = "every group in exactly one committed step"

Steps = Callable[[Any], float]


@dataclass(frozen=True)
class Scenario:
    """One fault."""

    play: Steps  # does it, and returns the seconds of the recovery
    fault: str  # the harm that is done to the system
    recovered: str  # when the clock stops, and from when it runs
    bound: str  # the longest recovery promised, in words; config keys in backticks
    bound_s: float  # the same in seconds, with the rig's settings
    promise: str  # the rule that is still kept afterwards; every scenario ends with a check of it
    options: dict[str, Any]  # arguments of the rig
    rig: Callable[..., Any]  # what is harmed: has finish(), which checks the promise, and close()
    cluster: bool  # takes hosts of its own

    @property
    def name(self) -> str:
        return self.play.__name__

    @property
    def happens(self) -> str:
        """The answer of the system."""
        return " ".join((self.play.__doc__ or "").split())

    def run(self, run_dir: Path, seed: int, **options: Any) -> float:
        """Play it once and check the promise; returns the seconds of the recovery. Raises AssertionError.

        `options` are more arguments of the rig.
        """
        rig = self.rig(run_dir, seed, **self.options, **options)
        try:
            recovery_s = self.play_in_time(rig)
            if not (rig.run_dir / "drain").exists():
                rig.finish()
        finally:
            rig.close()
        return recovery_s

    def play_in_time(self, rig: Any) -> float:
        """Play it in a rig; returns the seconds of the recovery. Raises AssertionError when they are too many."""
        recovery_s = self.play(rig)
        assert recovery_s <= SLOWER * self.bound_s, f"recovered after {recovery_s:.2f} s, promised {self.bound_s:g} s"
        return recovery_s


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *,
    fault: str,
    recovered: str,
    bound: str,
    bound_s: float,
    promise: str = PROMISE,
    rig: Callable[..., Any] = FaultRig,
    cluster: bool = False,
    **options: Any,
) -> Callable[[Steps], Steps]:
    """Registers a function; its docstring says what happens. It may leave `rig.finish()` to the caller."""

    def register(play: Steps) -> Steps:
        made = Scenario(play, fault, recovered, bound, bound_s, promise, options, rig, cluster)
        assert made.happens and made.name not in SCENARIOS, made.name
        SCENARIOS[made.name] = made
        return play

    return register


def load_all() -> dict[str, Scenario]:
    """Every scenario, in the order of the documentation."""
    for module in ("processes", "network", "results", "broker", "redis", "failover", "stores", "machines"):
        importlib.import_module(f"tests.faults.scenarios.{module}")
    return SCENARIOS


def play(name: str, seed: int) -> float:
    """One scenario in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        return load_all()[name].run(Path(folder), seed)
