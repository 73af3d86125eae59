"""A broker that comes back with less than the checkpoint was trained on."""

import copy

import pytest

from broker.contract import StoredGroup
from broker.delivery.in_process import MemoryBroker
from common.errors import UsageError
from common.metrics import StepMetrics, read_metrics
from tests.unit.learner.loop_fakes import Killed, MakeWorld


def test_a_store_that_lost_what_the_checkpoint_was_trained_on_is_refused_before_it_is_trained_on_again(
    make_world: MakeWorld,
) -> None:
    """A power cut with broker.durability: everysec, with the checkpoint on the disk and the newest moves not."""
    world = make_world(run={"steps": 6})
    world.backend.fail_at = 3
    before: list[MemoryBroker] = []  # with the groups of step 1, which no step has taken
    take = world.broker.take

    def copying(step: int, count: int, wait_s: float, in_order: bool = False) -> list[StoredGroup] | None:
        found = copy.deepcopy(world.memory) if step == 1 else None
        taken = take(step, count, wait_s, in_order)
        before.extend([found] if found is not None and taken is not None else [])
        return taken

    world.broker.take = copying
    with pytest.raises(Killed):
        world.run()
    with pytest.raises(UsageError, match=r"checkpoint of step 2 was trained on 2 groups .*task 2, ready.*RUN/store"):
        world.restart(before[0])
    again = world.with_new_broker()  # the store was moved away
    assert again.trainer.version == 2
    assert again.run() == "done"
    assert [line.step for line in read_metrics(world.run_dir.metrics, StepMetrics)] == list(range(6))
