"""The faults of tests/faults that take hosts of their own: a learner of several machines loses one of them."""

from pathlib import Path

import pytest

from tests.faults.scenario import load_all

SCENARIOS = {name: scenario for name, scenario in load_all().items() if scenario.cluster}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promise_holds_after(name: str, tmp_path: Path) -> None:
    SCENARIOS[name].run(tmp_path, seed=0)
