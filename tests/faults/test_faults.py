"""Every fault with real processes: after each the promise is kept, and recovery took at most what the scenario states.

SLIPSTREAM_FAULT_SEEDS=N plays each scenario with N seeds; bench/guarantees.py measures them for docs/guarantees.md.
"""

import os
from pathlib import Path

import pytest

from tests.faults.scenario import load_all

SCENARIOS = {name: scenario for name, scenario in load_all().items() if not scenario.cluster}
SEEDS = range(int(os.environ.get("SLIPSTREAM_FAULT_SEEDS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promise_holds_after(name: str, seed: int, tmp_path: Path) -> None:
    SCENARIOS[name].run(tmp_path, seed, forks=True)
