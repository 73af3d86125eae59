"""The training loop beside a broker whose store is another one all of a sudden, or lacks what the learner was told."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from broker.contract import RunInfo, StoredGroup
from broker.delivery.learner_rules import LearnerRules
from common.errors import SlipstreamError, UsageError
from learner.loop.tasks import TaskStream
from tests.rigs.brokers import MemoryBroker
from tests.rigs.refusals import refused
from tests.unit.learner.loop_fakes import MakeWorld, World

STEPS = 8


def empty(world: World) -> MemoryBroker:
    c = world.config
    size, k, attempts = c.learner.groups_per_step, c.staleness.max, c.tasks.max_attempts
    return MemoryBroker(RunInfo("test", c.run.dir, size, k, attempts, 60.0, 1 << 30))


def swap(world: World, memory: MemoryBroker) -> None:
    """The broker at the same address has another memory from now on; its nodes have to join it."""
    world.memory = memory
    for client in (world.broker, world.fleet.node):
        client.use(memory.state)
    world.fleet.registered = False
    world.fleet.held.clear()


def before_take(world: World, step: int, act: Callable[[], None]) -> None:
    acts, take = [act], world.broker.take

    def taking(now: int, count: int, wait_s: float, **more: Any) -> list[StoredGroup] | None:
        if now == step and acts:
            acts.pop()()
        return take(now, count, wait_s, **more)

    world.broker.take = taking


def while_training(world: World, step: int, act: Callable[[], None]) -> None:
    acts, train = [act], world.backend.train_step

    def training(*arguments: Any) -> Any:
        if world.backend.steps == step and acts:
            acts.pop()()
        return train(*arguments)

    world.backend.train_step = training


def consumed(world: World) -> dict[int, list[int]]:
    """Positions in the dataset that each step trains on, as far as it comes."""
    found: dict[int, list[int]] = {}
    tasks, consume = world.lead.tasks, world.lead.tasks.consume

    def noting(serials: list[int]) -> None:
        positions = tasks.state().outstanding
        consume(serials)
        found[world.trainer.version] = [positions[serial] for serial in serials]

    tasks.consume = noting
    return found


def every_prompt_once(*parts: dict[int, list[int]]) -> bool:
    """Where two parts have a step, the later one counts."""
    steps = {step: positions for part in parts for step, positions in part.items()}
    trained = [position for _, positions in sorted(steps.items()) for position in positions]
    return sorted(trained) == list(range(2 * STEPS))


@pytest.mark.parametrize("when", [before_take, while_training])
@pytest.mark.parametrize("step", [0, 3, STEPS - 1])
def test_a_living_learner_follows_an_empty_store_and_trains_every_prompt_once(
    make_world: MakeWorld, when: Callable[[World, int, Callable[[], None]], None], step: int
) -> None:
    world = make_world(run={"steps": STEPS})
    positions, other = consumed(world), empty(world)
    when(world, step, lambda: swap(world, other))
    assert world.run() == "done"
    assert every_prompt_once(positions)
    assert [line.step for line in world.lines()] == list(range(STEPS))
    assert all(line.staleness_max <= 2 for line in world.lines())
    if not (when is while_training and step == STEPS - 1):  # then nothing is asked of the new store but a commit
        assert "store_followed" in world.event_kinds()
        assert {entry.state for entry in other.state.ledger()} == {"committed"}


@pytest.mark.parametrize("every", [1, 3, 100], ids="a checkpoint every {} steps".format)
@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_learner_killed_after_it_followed_resumes_with_the_numbers_that_it_gave_the_new_store(
    make_world: MakeWorld, every: int, later: int
) -> None:
    world = make_world(run={"steps": STEPS}, learner={"checkpoint": {"every": every}})
    first, other = consumed(world), empty(world)
    before_take(world, 3, lambda: swap(world, other))
    world.backend.fail_at = 3 + later
    world.run_killed()
    again = world.restart(other)
    assert again.trainer.version >= 3, "what was trained before the store changed is in a checkpoint"
    second = consumed(again)
    assert again.run() == "done"
    assert every_prompt_once({s: p for s, p in first.items() if s < min(second)}, second)


def test_a_store_whose_place_another_one_took_is_refused_when_it_comes_back(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": STEPS})
    former = world.memory
    before_take(world, 3, lambda: swap(world, empty(world)))
    before_take(world, 5, lambda: swap(world, former))
    with refused(SlipstreamError, former.state.store_id, "broker.durability"):
        world.run()
    with refused(UsageError, former.state.store_id):
        world.restart(former)


def older(world: World, step: int, opened_again: bool) -> list[MemoryBroker]:
    """Gets a copy of the broker's memory from before `step` took its groups, as an older copy of its store would be."""
    found: list[MemoryBroker] = []
    take = world.broker.take

    def copying(now: int, count: int, wait_s: float, **more: Any) -> list[StoredGroup] | None:
        world.fleet.work()
        if now == step and not found and len(world.memory.state.tasks.ready) >= count:
            found.append(copy.deepcopy(world.memory))
            if opened_again:
                found[0].state.openings = {}
                found[0].state.open(0)
        return take(now, count, wait_s, **more)

    world.broker.take = copying
    return found


@pytest.mark.parametrize(
    ("opened_again", "fact"),
    [(True, "broker.durability"), (False, "2 groups")],
    ids=["the broker notices", "the task stream notices"],
)
def test_a_learner_whose_store_lost_moves_resumes_from_its_checkpoint_and_trains_no_group_twice(
    make_world: MakeWorld, opened_again: bool, fact: str
) -> None:
    world = make_world(run={"steps": STEPS}, learner={"checkpoint": {"every": 3}})
    first, found = consumed(world), older(world, 4, opened_again)
    while_training(world, 4, lambda: swap(world, found[0]))
    with refused(SlipstreamError, fact):
        world.run()
    again = world.restart(found[0])
    assert again.trainer.version == 3
    second = consumed(again)
    assert again.run() == "done"
    assert every_prompt_once({s: p for s, p in first.items() if s < 3}, second)
    assert [line.step for line in again.lines()] == list(range(STEPS))


def test_a_store_that_lost_part_of_a_step_of_the_checkpoint_is_refused_at_every_start(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": STEPS}, learner={"checkpoint": {"every": 3}})
    found, take = list[MemoryBroker](), world.broker.take

    def copying(now: int, count: int, wait_s: float, **more: Any) -> list[StoredGroup] | None:
        groups = take(now, count, wait_s, **more)
        if now == 2 and groups and not found:
            found.append(copy.deepcopy(world.memory))
            # as before the last of several takes of the step
            LearnerRules(found[0].state).regenerate(2, [groups[0].serial])
        return groups

    world.broker.take = copying
    world.backend.fail_at = 4
    world.run_killed()
    for _ in range(2):  # the first start commits the rest of the step
        with refused(UsageError, "step 3", "1 groups"):
            world.restart(found[0])


def test_a_task_stream_refuses_groups_that_a_step_has_consumed_and_keeps_its_state(make_world: MakeWorld) -> None:
    stream: TaskStream = make_world().lead.tasks
    stream.next(4)
    stream.consume([0, 2])
    before = stream.state()
    with refused(SlipstreamError, "1 groups", "task 2"):
        stream.consume([1, 2])
    assert stream.state() == before
