"""The faults of tests/faults that take hosts of their own: a learner of several machines loses one of them."""

from pathlib import Path

from tests.faults.scenario import load_all
from tests.rigs.machines import MachineRig


def test_the_promise_holds_after_every_fault_of_a_machine(tmp_path: Path) -> None:
    """All of them befall one run, since every start of a learner costs more CPU time than the steps between."""
    scenarios = [scenario for scenario in load_all().values() if scenario.cluster]
    rig = MachineRig(tmp_path, 0, run={"max_restarts": 2 * len(scenarios)})
    try:
        for scenario in scenarios:
            scenario.play_in_time(rig)
        rig.finish()
    finally:
        rig.close()
