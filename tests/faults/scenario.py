"""A fault scenario, and the list of all of them; docs/guarantees.md is made of these texts."""

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.rig import Rig

SLOWER = 30.0  # A test machine may be this much slower than the one whose figures are in the docs.
PROMISE = "every group in exactly one committed step"

Steps = Callable[[Rig], float]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One fault.

    Attributes:
        name: name of the function.
        fault: the harm that is done to the system.
        happens: the answer of the system.
        promise: the rule that is still kept afterwards; every scenario ends with a check of it.
        recovered: when the clock stops, and from when it runs.
        bound: the longest recovery promised, in words; config keys in backticks.
        bound_s: the same in seconds, with the rig's settings.
        play: does it, and returns the seconds of the recovery.
        rig: arguments of the rig.
    """

    name: str
    fault: str
    happens: str
    promise: str
    recovered: str
    bound: str
    bound_s: float
    play: Steps
    rig: dict[str, Any]

    def run(self, run_dir: Path, seed: int) -> float:
        """Play it once and check the promise; returns the seconds of the recovery. Raises AssertionError."""
        rig = Rig(run_dir, seed, **self.rig)
        try:
            recovery_s = self.play(rig)
            if not (rig.run_dir / "drain").exists():
                rig.finish()
        finally:
            rig.close()
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
    **rig: Any,
) -> Callable[[Steps], Steps]:
    """Registers a function; its docstring says what happens. It may leave `rig.finish()` to the caller."""

    def register(play: Steps) -> Steps:
        name = play.__name__
        happens = " ".join((play.__doc__ or "").split())
        assert happens and name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(
            name=name,
            fault=fault,
            happens=happens,
            promise=promise,
            recovered=recovered,
            bound=bound,
            bound_s=bound_s,
            play=play,
            rig=rig,
        )
        return play

    return register


def load_all() -> dict[str, Scenario]:
    """Every scenario, in the order of the documentation."""
    for module in ("processes", "network", "results", "broker", "redis", "failover"):
        importlib.import_module(f"tests.faults.scenarios.{module}")
    return SCENARIOS


def play(name: str, seed: int) -> float:
    """One scenario in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        return load_all()[name].run(Path(folder), seed)
