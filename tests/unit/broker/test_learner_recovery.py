"""The learner and the waste in the state of a broker that comes back."""

from pathlib import Path

import pytest

from broker.contract import LEARNER_ENDED, LearnerReport, Waste
from common.errors import BrokerError
from tests.unit.broker.durable_rig import Rig


def report(instance: str, state: str = "training") -> LearnerReport:
    return LearnerReport(7, 1, state, 4, instance=instance)


@pytest.mark.parametrize("state", LEARNER_ENDED)
def test_a_learner_that_ended_is_still_said_to_have_ended(tmp_path: Path, state: str) -> None:
    with Rig(tmp_path) as rig:
        rig.state.attach(report("a"))
        rig.state.report(report("a", state))
    with Rig(tmp_path) as rig:
        found = rig.state.learner.status(rig.state.clock() + 1000)
        assert found is not None
        assert found.state == state
        rig.state.attach(report("b"))  # at once: no learner is alive


def test_replaced_processes_stay_refused_and_those_that_do_not_say_who_they_are_do_not(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        for attached in (report(""), report("a")):
            rig.state.attach(attached)
        rig.state.report(report("a", "failed"))
        rig.state.attach(report("b"))
    with Rig(tmp_path) as rig:
        rig.state.check_learner(1, "b")
        rig.state.check_learner(1, "")
        with pytest.raises(BrokerError, match="replaced by another process"):
            rig.state.check_learner(1, "a")
        with pytest.raises(BrokerError, match="is alive already"):
            rig.state.attach(report("c"))


def test_waste_continues_where_it_was(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.begin()
        rig.state.fleet.waste_of("n0", "failed", 5, 1.5)
    with Rig(tmp_path) as rig:
        rig.state.fleet.waste_of("n0", "failed", 1)
        status = rig.state.status()
        assert status.waste == status.nodes[0].waste == {"failed": Waste(6, 1.5)}
