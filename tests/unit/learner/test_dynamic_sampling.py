"""Dynamic sampling in the loop: full steps of informative groups, bounded, replayed and accounted for."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from common.config.schema import Config
from common.metrics import StepMetrics, read_metrics
from common.process.run_dir import RunDir, read_jsonl
from common.rollouts import Group, encode_group
from learner.batch.dynamic_sampling import carries_signal, without_signal

MakeConfig = Callable[..., Config]
STEPS, SIZE = 6, 2
ON = {"dynamic_sampling": True}


def lines(config: Config) -> list[StepMetrics]:
    return read_metrics(RunDir(config.run.dir).metrics, StepMetrics)


def final_table(config: Config) -> np.ndarray:
    return np.load(RunDir(config.run.dir).model / "table.npy")


def sampled_tokens(group: Group) -> int:
    return sum(int(sample.loss_mask.numpy().sum()) for sample in group.samples)


def rewarded(fakes: ModuleType, *rewards: float | None) -> Group:
    """A group with these rewards; None is a failed sample, whose reward counts for nothing."""
    group = fakes.make_group(0, 0, len(rewards))
    samples = [
        msgspec.structs.replace(s, reward=9.0 if r is None else r, error="gone" if r is None else None)
        for s, r in zip(group.samples, rewards, strict=True)
    ]
    return Group(0, samples)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((1, 1, 0), True), ((1, 1, 1), False), ((0.5, 0.5, None), False), ((1, None, None), False), ((None, None), False)],
)
def test_only_samples_that_did_not_fail_give_a_group_its_variance(
    fakes: ModuleType, rewards: tuple[float | None, ...], expected: bool
) -> None:
    assert carries_signal(rewarded(fakes, *rewards)) is expected


@pytest.mark.parametrize("maximum", [0, 1, 3])
@pytest.mark.parametrize("expired", ["mask", "wait", "regenerate"])
def test_every_step_is_full_and_every_group_belongs_to_one(
    fakes: ModuleType, make_config: MakeConfig, maximum: int, expired: str
) -> None:
    config = make_config(run={"steps": STEPS}, learner=ON, staleness={"max": maximum, "expired": expired})
    world = fakes.world(config, lag=maximum)
    assert world.run() == "done"
    ledger, found = world.broker.ledger(), lines(config)
    flat = without_signal([fakes.make_group(entry.serial, 0, 2) for entry in ledger])
    assert flat, "the fleet's rewards must have something to filter"
    assert [entry.serial for entry in ledger if entry.filtered] == flat
    assert {entry.state for entry in ledger} == {"committed"}
    assert Counter(e.step for e in ledger if not e.filtered) == dict.fromkeys(range(STEPS), SIZE)
    assert len(ledger) == STEPS * SIZE + len(flat), "no group is generated for nothing"
    assert [line.groups_filtered for line in found] == [
        sum(e.filtered for e in ledger if e.step == step) for step in range(STEPS)
    ]
    assert {line.groups for line in found} == {SIZE}
    assert all(line.staleness_max <= maximum and line.tokens_expired == 0 for line in found)
    wasted = sum(sampled_tokens(fakes.make_group(serial, 0, 2)) for serial in flat)
    assert found[-1].tokens_wasted_total == found[-1].tokens_wasted_filtered == wasted


def test_the_weights_are_those_of_a_run_that_never_saw_the_filtered_groups(
    fakes: ModuleType, make_config: MakeConfig
) -> None:
    import shutil

    informative = [n for n in range(200) if carries_signal(fakes.make_group(n, 0, 2))]
    sections = {"run": {"steps": STEPS}, "staleness": {"max": STEPS, "expired": "wait"}}
    config = make_config(**sections)
    world = fakes.world(config)
    world.fleet.spoil = lambda group: encode_group(
        Group(group.serial, fakes.make_group(informative[group.serial], 0, 2).samples)
    )
    world.run()
    expected = final_table(config)
    shutil.rmtree(config.run.dir)
    config = make_config(**sections, learner=ON)
    fakes.world(config).run()
    np.testing.assert_array_equal(final_table(config), expected)


@pytest.mark.parametrize("killed_at", [0, 1, 3, 4])
def test_a_killed_run_replays_filtered_groups_too_and_ends_bitwise_equal(
    fakes: ModuleType, make_config: MakeConfig, killed_at: int, tmp_path: Path
) -> None:
    import shutil

    config = make_config(run={"steps": STEPS}, learner=ON)
    whole = fakes.world(config)
    whole.run()
    expected, ledger = final_table(config), whole.broker.ledger()
    shutil.rmtree(config.run.dir)
    world = fakes.world(config)
    world.backend.fail_at = killed_at
    with pytest.raises(fakes.Killed):
        world.run()
    again = world.restart()
    assert again.run() == "done"
    np.testing.assert_array_equal(final_table(config), expected)
    assert [(e.serial, e.step, e.filtered) for e in again.broker.ledger()] == [
        (e.serial, e.step, e.filtered) for e in ledger
    ]
    assert [line.step for line in lines(config)] == list(range(STEPS))


@pytest.mark.parametrize("steps", [STEPS, 4], ids=["in the middle", "in the last step"])
def test_a_learner_killed_while_it_gathers_goes_on_with_what_the_step_has(
    fakes: ModuleType, make_config: MakeConfig, steps: int
) -> None:
    import shutil

    config = make_config(run={"steps": steps}, learner=ON)
    fakes.world(config).run()
    expected = final_table(config)
    shutil.rmtree(config.run.dir)
    world = fakes.world(config)
    told = world.broker.filter

    def filter_and_die(step: int, serials: list[int], most_replaced: int) -> None:
        told(step, serials, most_replaced)
        if step == 3:
            raise fakes.Killed

    world.broker.filter = filter_and_die
    with pytest.raises(fakes.Killed):
        world.run()
    again = world.restart()
    give, turns = again.broker.take, itertools.count()

    def take(*arguments: object) -> object:
        assert next(turns) < 100, "the step waits for groups that nobody offers"
        return give(*arguments)

    again.broker.take = take
    assert again.run() == "done"
    np.testing.assert_array_equal(final_table(config), expected)


def flat_from(fakes: ModuleType, serial: int) -> Callable[[Group], bytes]:
    """Spoils the fleet: all rewards are 1 from task `serial` on, as when the tasks are solved."""

    def spoil(group: Group) -> bytes:
        if group.serial < serial:
            return encode_group(group)
        return encode_group(Group(group.serial, [msgspec.structs.replace(s, reward=1.0) for s in group.samples]))

    return spoil


@pytest.mark.parametrize("maximum", [0, 2])
def test_solved_tasks_end_a_step_at_its_bound_without_training(
    fakes: ModuleType, make_config: MakeConfig, maximum: int
) -> None:
    config = make_config(run={"steps": STEPS}, learner=ON, staleness={"max": maximum})
    world = fakes.world(config)
    world.fleet.spoil = flat_from(fakes, 0)
    assert world.run() == "done"
    assert world.backend.steps == 0
    found = lines(config)
    assert [(line.groups, line.groups_filtered, line.tokens_trained) for line in found] == [(0, 3 * SIZE, 0)] * STEPS
    assert {line.reward_mean for line in found} == {1.0}, "the curve must show that the tasks are solved"
    assert {line.advantage_zero_fraction for line in found} == {1.0}
    assert len(world.broker.ledger()) == STEPS * 3 * SIZE
    kinds = [event["kind"] for event in read_jsonl(RunDir(config.run.dir).events)]
    assert kinds.count("step_without_signal") == STEPS


def test_a_step_short_of_informative_groups_trains_on_those_it_found(
    fakes: ModuleType, make_config: MakeConfig
) -> None:
    config = make_config(run={"steps": 2}, learner=ON, staleness={"max": 0})
    world = fakes.world(config)
    first = next(n for n in range(200) if carries_signal(fakes.make_group(n, 0, 2)))
    assert first < 3 * SIZE
    world.fleet.spoil = flat_from(fakes, first + 1)
    assert world.run() == "done"
    found = lines(config)
    assert [(line.groups, line.groups_filtered) for line in found] == [(1, 3 * SIZE - 1), (0, 3 * SIZE)]
    assert found[0].tokens_trained == sampled_tokens(fakes.make_group(first, 0, 2))


def test_the_wait_says_how_many_groups_others_are_taken_for(fakes: ModuleType, make_config: MakeConfig) -> None:
    config = make_config(learner=ON, staleness={"max": 0})
    world = fakes.world(config)
    world.fleet.spoil = flat_from(fakes, 0)
    world.fleet.hold_back = lambda serial, turn: serial >= SIZE
    world.trainer.source.begin(0)
    while not world.lead._replaced:
        world.trainer.source.next_command(0)
    for _ in range(2):  # the node leases while the first of them waits
        world.trainer.source.next_command(0)
    waiting = world.lead.reporter.snapshot().waiting_on
    assert waiting == "groups for step 0: 0 of 2 ready, in place of 2 without signal, 2 being generated by 1 node"


def test_without_the_key_groups_without_signal_are_trained_on(fakes: ModuleType, make_config: MakeConfig) -> None:
    config = make_config(run={"steps": STEPS})
    world = fakes.world(config)
    world.run()
    assert len(world.broker.ledger()) == STEPS * SIZE
    assert sum(line.groups_filtered for line in lines(config)) == 0
    assert any(line.advantage_zero_fraction > 0 for line in lines(config))
