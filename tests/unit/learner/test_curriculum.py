"""The training loop over several sources: weights follow success, and a killed learner ends as one that was not."""

import shutil
from typing import Any

import numpy as np
import pytest

from broker.contract import WeightRequest
from learner.loop.mixture import factor
from tests.unit.learner.loop_fakes import MakeWorld, World, world

STEPS = 8


def mixed(make_world: MakeWorld) -> World:
    made = make_world()
    source: dict[str, Any] = {"environment": "addition", "dataset": made.config.tasks.dataset}
    tasks = {"sources": {"a": source, "b": source}, "curriculum": {"rule": "success", "every": 2}, "dataset": ""}
    return make_world(run={"steps": STEPS}, tasks=tasks | {"environment": None})


def outcome(done: World) -> list[Any]:
    """Everything that a kill must not change: the sources of the tasks, the changes of weights, the metrics."""
    ledger = [(entry.serial, entry.source, entry.step) for entry in done.memory.learner().ledger()]
    changes = [(c.position, c.weights, c.factors, c.step) for c in done.memory.state.weight_changes]
    return [ledger, changes, [line.sources for line in done.lines()]]


def test_weights_follow_the_success_that_the_learner_measured(make_world: MakeWorld) -> None:
    done = mixed(make_world)
    done.run()
    lines = done.lines()
    rule = done.config.tasks.curriculum
    changes = {change.step: change for change in done.memory.state.weight_changes[1:]}
    assert len(changes) >= 2
    for step, change in changes.items():
        for name in "ab":
            told = [line.sources for line in lines[step - 1 : step + 1]]
            played = sum(own[f"{name}/samples"] for own in told)
            won = sum(own.get(f"{name}/success", 0.0) * own[f"{name}/samples"] for own in told)
            if played:
                assert change.factors[name] == pytest.approx(factor(won / played, rule))


@pytest.mark.parametrize("fail_at", range(1, STEPS))
def test_killed_at_any_step_it_ends_with_the_tasks_changes_and_weights_of_one_that_was_not(
    make_world: MakeWorld, fail_at: int
) -> None:
    whole = mixed(make_world)
    whole.memory.learner().set_weights(WeightRequest("one", {"b": 0.5}))
    whole.run()
    expected, table = outcome(whole), whole.final_table()
    shutil.rmtree(whole.config.run.dir)

    killed = world(whole.config)
    killed.memory.learner().set_weights(WeightRequest("one", {"b": 0.5}))
    killed.backend.fail_at = fail_at
    killed.run_killed()
    resumed = killed.restart()
    resumed.run()
    assert outcome(resumed) == expected
    np.testing.assert_array_equal(resumed.final_table(), table)
