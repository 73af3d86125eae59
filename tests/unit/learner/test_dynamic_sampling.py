"""Dynamic sampling in the loop: full steps of informative groups, bounded, replayed and accounted for."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from broker.client.calls import ObserverBroker
from broker.contract import LedgerEntry
from common.config.schema import Config
from common.rollouts import Group, encode_group
from common.waits import WaitFor, WaitKind
from learner.batch.batch import assemble
from learner.batch.dynamic_sampling import carries_signal
from learner.batch.group_rewards import rewards_of
from learner.loss.advantages import pass_at_k
from tests.unit.learner.conftest import BASE
from tests.unit.learner.loop_fakes import Killed, MakeWorld, make_group

STEPS, SIZE = 6, 2
ON = {"dynamic_sampling": True}
JOB = msgspec.convert(BASE, Config)


def sampled_tokens(group: Group) -> int:
    return sum(int(sample.loss_mask.numpy().sum()) for sample in group.samples)


def rewarded(*rewards: float | None) -> Group:
    """A group with these rewards; None is a failed sample, whose reward counts for nothing."""
    group = make_group(0, 0, len(rewards))
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
    rewards: tuple[float | None, ...], expected: bool
) -> None:
    assert carries_signal(rewarded(*rewards), JOB) is expected


@pytest.mark.parametrize(("k", "success"), [(1, 1.0), (4, 1.0), (4, 0.5), (4, 0.0)])
@pytest.mark.parametrize("failed", [0, 2])
def test_with_pass_at_k_a_group_carries_signal_where_the_estimator_gives_advantages(
    make_config: Callable[..., Config], k: int, success: float, failed: int
) -> None:
    loss = {"advantage": "pass_at_k", "advantage_options": {"k": k}}
    for dynamic in (False, True):
        config = make_config(
            tasks={"success": success},
            rollout={"group_size": 8},
            learner={"loss": loss, "dynamic_sampling": dynamic},
        )
        for right in range(9 - failed):
            wrong = [0.1 * n for n in range(8 - failed - right)]  # different, and failures all the same
            group = rewarded(*[1.0] * right, *wrong, *[None] * failed)
            expected = any(pass_at_k([rewards_of(group, [3] * (8 - failed), success)], k=k)[0])
            batch = assemble([group], 0, config)
            assert any(document.advantage for document in batch.documents) is expected
            found = batch.statistics
            assert (found.groups_without_signal, found.groups_filtered) == (not expected, dynamic and not expected)
            assert batch.filtered == ({0} if dynamic and not expected else set())


@pytest.mark.parametrize("maximum", [0, 1, 3])
@pytest.mark.parametrize("expired", ["mask", "wait", "regenerate"])
def test_every_step_is_full_and_every_group_belongs_to_one(make_world: MakeWorld, maximum: int, expired: str) -> None:
    world = make_world(run={"steps": STEPS}, learner=ON, staleness={"max": maximum, "expired": expired}, lag=maximum)
    assert world.run() == "done"
    ledger, found = world.broker.ledger(), world.lines()
    flat = [entry.serial for entry in ledger if not carries_signal(make_group(entry.serial, 0, 2), JOB)]
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
    wasted = sum(sampled_tokens(make_group(serial, 0, 2)) for serial in flat)
    assert found[-1].tokens_wasted_total == found[-1].tokens_wasted_filtered == wasted


def test_the_weights_are_those_of_a_run_that_never_saw_the_filtered_groups(make_world: MakeWorld) -> None:
    informative = [n for n in range(200) if carries_signal(make_group(n, 0, 2), JOB)]
    sections = {"run": {"steps": STEPS}, "staleness": {"max": STEPS, "expired": "wait"}}
    world = make_world(**sections)
    world.fleet.spoil = lambda group: encode_group(
        Group(group.serial, make_group(informative[group.serial], 0, 2).samples)
    )
    expected = world.unbroken()
    world = make_world(**sections, learner=ON)
    world.run()
    np.testing.assert_array_equal(world.final_table(), expected)


@pytest.mark.parametrize("steps", [STEPS, 4], ids=["in the middle", "in the last step"])
def test_a_learner_killed_while_it_gathers_goes_on_with_what_the_step_has(make_world: MakeWorld, steps: int) -> None:
    expected = make_world(run={"steps": steps}, learner=ON).unbroken()
    world = make_world(run={"steps": steps}, learner=ON)
    told = world.broker.filter

    def filter_and_die(step: int, serials: list[int], most_replaced: int) -> None:
        told(step, serials, most_replaced)
        if step == 3:
            raise Killed

    world.broker.filter = filter_and_die
    world.run_killed()
    again = world.restart()
    give, turns = again.broker.take, itertools.count()

    def take(*arguments: object, **more: object) -> object:
        assert next(turns) < 100, "the step waits for groups that nobody offers"
        return give(*arguments, **more)

    again.broker.take = take
    assert again.run() == "done"
    np.testing.assert_array_equal(world.final_table(), expected)


def test_a_learner_that_resumes_asks_for_unfinished_tasks_and_never_for_the_whole_ledger(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(run={"steps": STEPS}, learner=ON)
    told, pages, asked = world.broker.filter, ObserverBroker.ledger_pages, list[bool]()

    def die(step: int, serials: list[int], most_replaced: int) -> None:
        told(step, serials, most_replaced)
        raise Killed

    def note(self: ObserverBroker, unfinished: bool = False) -> Iterator[list[LedgerEntry]]:
        asked.append(unfinished)
        return pages(self, unfinished)

    world.broker.filter = die
    world.run_killed()
    monkeypatch.setattr(ObserverBroker, "ledger_pages", note)
    assert world.restart().run() == "done"
    assert asked == [True]


def flat_from(serial: int) -> Callable[[Group], bytes]:
    """Spoils the fleet: all rewards are 1 from task `serial` on, as when the tasks are solved."""

    def spoil(group: Group) -> bytes:
        if group.serial < serial:
            return encode_group(group)
        return encode_group(Group(group.serial, [msgspec.structs.replace(s, reward=1.0) for s in group.samples]))

    return spoil


@pytest.mark.parametrize("maximum", [0, 2])
def test_solved_tasks_end_a_step_at_its_bound_without_training(make_world: MakeWorld, maximum: int) -> None:
    world = make_world(run={"steps": STEPS}, learner=ON, staleness={"max": maximum})
    world.fleet.spoil = flat_from(0)
    assert world.run() == "done"
    assert world.backend.steps == 0
    found = world.lines()
    assert [(line.groups, line.groups_filtered, line.tokens_trained) for line in found] == [(0, 3 * SIZE, 0)] * STEPS
    assert {line.reward_mean for line in found} == {1.0}, "the curve must show that the tasks are solved"
    assert {line.advantage_zero_fraction for line in found} == {1.0}
    assert len(world.broker.ledger()) == STEPS * 3 * SIZE
    assert world.event_kinds().count("step_without_signal") == STEPS


def test_a_step_short_of_informative_groups_trains_on_those_it_found(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 2}, learner=ON, staleness={"max": 0})
    first = next(n for n in range(200) if carries_signal(make_group(n, 0, 2), JOB))
    assert first < 3 * SIZE
    world.fleet.spoil = flat_from(first + 1)
    assert world.run() == "done"
    found = world.lines()
    assert [(line.groups, line.groups_filtered) for line in found] == [(1, 3 * SIZE - 1), (0, 3 * SIZE)]
    assert found[0].tokens_trained == sampled_tokens(make_group(first, 0, 2))


def test_the_wait_says_how_many_groups_others_are_taken_for(make_world: MakeWorld) -> None:
    world = make_world(learner=ON, staleness={"max": 0})
    world.fleet.spoil = flat_from(0)
    world.fleet.hold_back = lambda serial, turn: serial >= SIZE
    world.trainer.source.begin(0)
    while not any(entry.filtered for entry in world.broker.ledger()):
        world.trainer.source.next_command(0)
    for _ in range(2):  # the node leases while the first of them waits
        world.trainer.source.next_command(0)
    wait = world.lead.reporter.snapshot().wait
    assert wait == WaitFor(WaitKind.GROUPS, version=0, of=2, replaced=2, leased=2, nodes=1)
