"""The broker killed with SIGKILL at random moments, under load, and started again over its store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_rig import Rig

from broker.recorded import recorded_steps
from common.rollouts import decode_group

KILLS = 4


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, seed=3)
    yield made
    made.close()


@pytest.mark.parametrize("durability", ["fsync", "everysec"])
def test_a_broker_killed_at_random_moments_loses_nothing_that_it_acknowledged(rig: Rig, durability: str) -> None:
    rig.broker_options["durability"] = durability
    rig.start_all(nodes=2)
    learner = rig.learner_process
    for _ in range(KILLS):
        rig.pause(0.3, 1.0)
        assert rig.broker_process is not None
        killed_s = rig.kill(rig.broker_process)
        rig.start_broker()
        rig.next_step_s(killed_s, steps=2)
    assert learner is not None and learner.poll() is None, "the learner noticed no more than a slow answer"
    assert len(rig.events("broker_recovered")) == KILLS
    assert not rig.events("tasks_renumbered"), "it knew what it had known before"
    ledger = rig.finish()
    recorded = recorded_steps(rig.run_dir)
    in_steps = {e.serial: e.step for e in ledger if e.state == "committed"}
    for step, groups in recorded.items():
        if step <= recorded.committed_step:
            assert [in_steps[group.serial] for group in groups] == [step] * len(groups)
        assert [decode_group(group.payload).serial for group in groups] == [group.serial for group in groups]
