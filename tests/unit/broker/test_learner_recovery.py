"""What a broker that comes back knows of the learner."""

from pathlib import Path

import pytest

from broker.contract import LEARNER_ENDED, LearnerReport, NodeReport, Waste
from broker.journal.recovery import Memory, open_memory
from broker.main import run_info
from common.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from common.errors import BrokerError


def start(folder: Path) -> Memory:
    config = Config(
        run=RunConfig(name="demo", dir=str(folder), steps=10),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
    )
    return open_memory(config, run_info(config, b""), lambda event: None)


def again(memory: Memory, folder: Path) -> Memory:
    """The next broker of the run."""
    assert memory.journal is not None
    memory.journal.end_turn()
    memory.close()
    return start(folder)


def report(instance: str, state: str = "training") -> LearnerReport:
    return LearnerReport(7, 1, state, 4, instance=instance)


@pytest.mark.parametrize("state", LEARNER_ENDED)
def test_a_learner_that_ended_is_still_said_to_have_ended(tmp_path: Path, state: str) -> None:
    memory = start(tmp_path)
    memory.state.attach(report("a"))
    memory.state.report(report("a", state))
    memory = again(memory, tmp_path)
    found = memory.state.learner.status(memory.state.clock() + 1000)
    assert found is not None
    assert found.state == state
    memory.state.attach(report("b"))  # at once: nobody is alive
    memory.close()


def test_replaced_processes_stay_refused_and_those_that_do_not_say_who_they_are_do_not(tmp_path: Path) -> None:
    memory = start(tmp_path)
    memory.state.attach(report(""))
    memory.state.attach(report("a"))
    memory.state.report(report("a", "failed"))
    memory.state.attach(report("b"))
    memory = again(memory, tmp_path)
    memory.state.check_learner(1, "b")
    memory.state.check_learner(1, "")
    with pytest.raises(BrokerError, match="replaced by another process"):
        memory.state.check_learner(1, "a")
    with pytest.raises(BrokerError, match="is alive already"):
        memory.state.attach(report("c"))
    memory.close()


def test_waste_goes_on_where_it_was(tmp_path: Path) -> None:
    memory = start(tmp_path)
    memory.state.register(NodeReport("n0", 1, "here", "generating", 0))
    memory.state.fleet.waste_of("n0", "failed", 5, 1.5)
    memory = again(memory, tmp_path)
    memory.state.fleet.waste_of("n0", "failed", 1)
    status = memory.state.status()
    assert status.waste == status.nodes[0].waste == {"failed": Waste(6, 1.5)}
    memory.close()
