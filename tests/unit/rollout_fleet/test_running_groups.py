"""Groups: concurrency, seeds, figures for the ledger, failures, and how far they are."""

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from broker.contract import Lease
from common.errors import SlipstreamError
from common.evaluation import EvaluationOrder
from common.rollouts import Task, VersionRun, decode_group, encode_group
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.protocol import Action, StepResult
from rollout_fleet.episode.driver import EpisodeDriver, Progress
from rollout_fleet.node import running_groups
from rollout_fleet.node.node_status import NodeStatusTracker
from rollout_fleet.node.running_groups import CompletedGroup, RunningGroup, RunningGroups
from tests.rigs.refusals import refused
from tests.rigs.waiting import until_async
from tests.unit.rollout_fleet.fleet_fakes import Base, ScriptedSampler, add, addition_task, make_driver, say


def running(driver: EpisodeDriver, concurrency: int = 8, status: NodeStatusTracker | None = None) -> RunningGroups:
    """Groups of a node that plays and hands nothing in."""
    parts: Any = SimpleNamespace(drivers={"": driver}, concurrency=concurrency, status=status or NodeStatusTracker("n"))
    return RunningGroups(parts, lambda: None, lambda error: None)


def group(task: Task, leased_at: float = 0.0, episodes: Sequence[Progress] = ()) -> RunningGroup:
    return RunningGroup(Lease(task, "token", 1, 0.0), leased_at, episodes=list(episodes))


SAID = (("a", " =1"), ("b", " =5"))  # the answers of two policies; the first one is right


def roll(groups: RunningGroups, *tasks: Task) -> list[CompletedGroup]:
    async def once() -> list[CompletedGroup]:
        return await asyncio.gather(*(groups.roll_out(group(t)) for t in tasks))

    return asyncio.run(once())


def test_a_group_has_one_sample_per_seed_and_its_figures() -> None:
    seeds: list[tuple[int, int]] = []  # a sample's own, and the one that it shares with its group

    class Seeded(Addition):
        def __init__(self, problem: dict[str, Any], *, seed: int, group_seed: int) -> None:
            super().__init__(problem, seed=seed)
            seeds.append((seed, group_seed))

    answers = iter([say(" =4", 6), say(" =9", 7), say(" =4", runs=[VersionRun(0, 7), VersionRun(2, 8)])])
    sampler = ScriptedSampler(lambda _: next(answers))
    (done,) = roll(running(make_driver(sampler, Seeded)), addition_task(3, group_size=3))
    assert (done.group.serial, sorted(seeds)) == (3, [(300, 300), (301, 300), (302, 300)])
    meta = done.meta
    assert (meta.version_min, meta.version_max, meta.sampled_tokens, meta.failed_samples) == (6, 8, 12, 0)
    assert meta.reward_mean == pytest.approx(2 / 3)
    assert meta.generation_s > 0
    assert done.failure is None


def test_concurrency_bounds_episodes_over_all_groups() -> None:
    sampler = ScriptedSampler(add, delay_s=0.01)
    groups = running(make_driver(sampler, Addition), 5)
    done = roll(groups, *(addition_task(i, group_size=4) for i in range(5)))
    assert len(sampler.calls) == 20
    assert sampler.most_at_once == 5
    assert [d.meta.reward_mean for d in done] == [1.0] * 5
    assert groups.episodes_running == 0


def test_a_failed_sample_is_counted_by_its_reason_and_leaves_the_reward_mean() -> None:
    class Moody(Base):
        async def step(self, action: Action) -> StepResult:
            if self.seed % 2:
                raise RuntimeError("bad day")
            return StepResult(reward=1.0)

    status = NodeStatusTracker("n")
    groups = running(make_driver(ScriptedSampler(lambda _: say("x")), Moody), status=status)
    (done,) = roll(groups, addition_task(2, group_size=4))
    assert (done.meta.failed_samples, done.meta.reward_mean, done.failure) == (2, 1.0, None)
    assert status.report().samples_failed == {"environment_error": 2}
    lease = Lease(addition_task(2, group_size=4), "token", 1, 0.0, evaluation=EvaluationOrder(0, 0, 1.0))
    held_out = asyncio.run(groups.roll_out(RunningGroup(lease, 0.0)))
    assert held_out.meta.failed_samples == 2
    assert status.report().samples_failed == {"environment_error": 2}, "of the training alone"
    sampler = ScriptedSampler(lambda _: ValueError("not in this vocabulary"))
    (none,) = roll(running(make_driver(sampler, Addition)), addition_task(0))
    assert "environment_error" in str(none.failure) and "vocabulary" in str(none.failure)


@pytest.mark.parametrize("problem", [b"{", b"[1]", b""])
def test_a_problem_that_is_no_object_fails_the_group(problem: bytes) -> None:
    task = Task(serial=4, problem=problem, seed=0, group_size=2)
    (done,) = roll(running(make_driver(ScriptedSampler(add), Addition)), task)
    assert done.failure is not None and "task 4" in done.failure


HALF = "\ud83d"  # a policy's own JSON may have half a surrogate pair


def fails(problem: object) -> StepResult:
    raise ValueError(f"no {problem}")


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (lambda: fails(HALF), "step raised ValueError: no ?"),
        (lambda: StepResult(reward=1.0, notes={"a": HALF}), None),
        (lambda: StepResult(reward=1.0, metrics={HALF: 1.0}), None),
        (lambda: StepResult(reward=1.0, notes="text"), "step raised AttributeError"),  # type: ignore[arg-type]
        (lambda: StepResult(reward=1.0, notes=None), "step raised AttributeError"),  # type: ignore[arg-type]
        (lambda: StepResult(observation=[1 << 40], done=False), "token id"),
    ],
)
def test_a_sample_that_the_program_cannot_use_fails_alone(step: Any, error: str | None) -> None:
    met = itertools.count()

    class Odd(Base):
        async def step(self, action: Action) -> StepResult:
            return step() if next(met) == 1 else StepResult(reward=1.0)

    (done,) = roll(running(make_driver(ScriptedSampler(lambda _: say("x")), Odd)), addition_task(0, group_size=4))
    found = [sample.error for sample in decode_group(encode_group(done.group)).samples if sample.error is not None]
    assert len(found) == (error is not None) and all(str(error) in each for each in found)


async def test_a_fault_of_the_program_fails_the_lease_before_it_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritable(group: object) -> bytes:
        raise OverflowError("too large")

    told: list[tuple[Any, ...]] = []

    async def fail(*facts: Any) -> None:
        told.append(facts)

    ended: list[SlipstreamError] = []
    groups = RunningGroups(handing_in(fail=fail), lambda: None, ended.append)
    monkeypatch.setattr(running_groups, "encode_group", unwritable)
    groups.start(Lease(addition_task(3), "token", 1, 0.0))
    await until_async(lambda: ended, "the end of the node")
    assert [facts[1:3] for facts in told] == [("token", "OverflowError: too large")]
    assert "task 3: OverflowError: too large" in str(ended[0])


async def test_a_group_that_is_given_back_before_it_begins_is_gone() -> None:
    released: list[list[str]] = []

    async def release(node_id: str, tokens: list[str]) -> None:
        released.append(tokens)

    groups = RunningGroups(handing_in(release=release), lambda: None, lambda error: None)
    groups.start(Lease(addition_task(0), "token", 1, 0.0))
    await groups.give_back()
    assert (released, groups.tokens) == ([["token"]], [])


def handing_in(**broker: Any) -> Any:
    """Parts of a node that solves additions, with these calls of the broker."""
    calls = SimpleNamespace(**broker)
    driver = make_driver(ScriptedSampler(add), Addition)
    feed = SimpleNamespace(state=SimpleNamespace(version=0, incarnation=0))
    timeout = SimpleNamespace(repeat=lambda call: call())
    others = {"status": NodeStatusTracker("n"), "feed": feed, "timeout": timeout, "transcribe": None}
    return SimpleNamespace(drivers={"": driver}, concurrency=8, broker=calls, **others)


async def test_a_dead_engine_ends_the_group_and_its_other_episodes() -> None:
    sampler = ScriptedSampler(lambda _: SlipstreamError("engine died"), delay_s=0.01)
    groups = running(make_driver(sampler, Addition))
    with refused(SlipstreamError, "engine died"):
        await groups.roll_out(group(addition_task(0, group_size=4)))
    assert groups.episodes_running == 0


async def test_progress_says_where_every_episode_is_and_a_cancelled_group_frees_its_slots() -> None:
    sampler = ScriptedSampler(add)
    sampler.gate.clear()
    groups = running(make_driver(sampler, Addition), 2)
    first, second = group(addition_task(0)), group(addition_task(1))
    playing = asyncio.create_task(groups.roll_out(first))
    waiting = asyncio.create_task(groups.roll_out(second))
    await until_async(lambda: len(sampler.calls) == 2)
    assert first.started_at is not None and second.started_at is None
    assert [(e.state, e.turns, e.sampled_tokens) for e in first.episodes] == [("engine", 1, 0)] * 2
    assert first.finished == 0 and [e.state for e in second.episodes] == ["queued"] * 2
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert sampler.cancelled == 2
    sampler.gate.set()
    assert (await waiting).meta.reward_mean == 1.0
    assert second.started_at is not None
    assert [(e.state, e.turns) for e in second.episodes] == [("done", 1)] * 2 and second.finished == 2
    assert second.sampled_tokens == sampler.counters.tokens_generated


def working(serial: int, leased_at: float, *episodes: Progress) -> RunningGroup:
    return group(addition_task(serial, 3), leased_at, episodes)


def test_the_episode_that_waits_for_longest_is_told_about() -> None:
    one = working(
        7, 100.0, Progress(9, 1, "done", 104.0), Progress(20, 2, "engine", 105.0), Progress(30, 3, "environment", 101.0)
    )
    found = one.report(110.0)
    assert (found.serial, found.samples, found.finished, found.age_s, found.tokens) == (7, 3, 1, 10.0, 59)
    assert (found.turns, found.episode_tokens, found.state, found.state_s) == (3, 30, "environment", 9.0)

    found = working(7, 100.0, *(Progress(since=100.0) for _ in range(3))).report(110.0)
    assert (found.state, found.state_s, found.finished, found.turns) == ("queued", 10.0, 0, 0)
    assert working(7, 100.0).report(110.0).state == "queued"


def test_a_task_is_played_by_its_sources_driver_and_one_of_an_unknown_source_fails_as_a_whole() -> None:
    drivers = {name: make_driver(ScriptedSampler(lambda _, text=text: say(text)), Addition) for name, text in SAID}
    parts: Any = SimpleNamespace(drivers=drivers, concurrency=8, status=NodeStatusTracker("n"))
    groups = RunningGroups(parts, lambda: None, lambda error: None)
    played = [msgspec.structs.replace(addition_task(i), source=name) for i, name in enumerate("ab?")]
    first, second, third = roll(groups, *played)
    assert {done.group.source: done.meta.reward_mean for done in (first, second)} == {"a": 1.0, "b": 0.0}
    assert third.failure is not None and not third.group.samples
