"""A broker that comes back with less than the checkpoint was trained on."""

import copy
from collections.abc import Callable
from types import ModuleType

import pytest

from broker.contract import StoredGroup
from broker.delivery.in_process import MemoryBroker
from common.config.schema import Config
from common.errors import UsageError
from common.metrics import StepMetrics, read_metrics
from common.process.run_dir import RunDir


def test_a_store_that_lost_what_the_checkpoint_was_trained_on_is_refused_before_it_is_trained_on_again(
    fakes: ModuleType, make_config: Callable[..., Config]
) -> None:
    """A power cut with broker.durability: everysec, with the checkpoint on the disk and the newest moves not."""
    config = make_config(run={"steps": 6})
    world = fakes.world(config)
    world.backend.fail_at = 3
    before: list[MemoryBroker] = []  # with the groups of step 1, which no step has taken
    take = world.broker.take

    def copying(step: int, count: int, wait_s: float, in_order: bool = False) -> list[StoredGroup] | None:
        found = copy.deepcopy(world.memory) if step == 1 else None
        taken = take(step, count, wait_s, in_order)
        before.extend([found] if found is not None and taken is not None else [])
        return taken

    world.broker.take = copying
    with pytest.raises(fakes.Killed):
        world.run()
    with pytest.raises(UsageError, match=r"checkpoint of step 2 was trained on 2 groups .*task 2, ready.*RUN/store"):
        world.restart(before[0])
    again = fakes.world(config)  # the store was moved away
    assert again.trainer.version == 2
    assert again.run() == "done"
    assert [line.step for line in read_metrics(RunDir(config.run.dir).metrics, StepMetrics)] == list(range(6))
