"""Rounds of evaluation in the training loop: exactly once per version, through kills of learner and broker."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.contract import Lease
from common.config.observing import WatchRule
from common.config.schema import Config
from common.errors import HopelessError, SlipstreamError
from common.evaluation import UNSCORED, EvaluationOrder, EvaluationResult, dataset_names
from common.json_lines import lines_of
from common.metrics import EvaluationMetrics, StepMetrics
from common.run_reader import read_tail
from common.waits import NO_WAIT
from launch.cli import main
from learner.loop import evaluation as module
from learner.loop.batch_source import Wait
from learner.loop.evaluation import Evaluations, summary
from tests.rigs.brokers import MemoryBroker, node_report
from tests.rigs.refusals import refused
from tests.rigs.waiting import read_jsonl
from tests.unit.learner.loop_fakes import MakeWorld, World, evaluated, world

COUNTS = {"easy": 3, "hard": 2}


class Pool:
    """A node of the pool that runs what the publisher gives to the pool, and plays at most `most` problems a turn."""

    def __init__(self, world: World, most: int = 99) -> None:
        self.node, self.most, self.played = world.memory.node(), most, list[tuple[int, int]]()
        self.publisher, self.at = world.publisher, dict[int, int]()  # `most` of some versions

    def work(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        if not self.publisher.evaluated:
            return
        version = self.publisher.evaluated[0]
        await self.node.heartbeat(node_report("pool", 1, version, pool="eval"), [])
        for lease in await self.node.lease("pool", version, self.at.get(version, self.most), 0.0):
            self.played.append((version, lease.task.serial))
            assert await self.node.complete_evaluation("pool", lease.token, self.result(lease, version))

    def result(self, lease: Lease, version: int) -> EvaluationResult:
        return evaluated(lease, version, "pool")


def watching(world: World, pool: Pool | None) -> World:
    """The same learner with evaluation, and a pool that works whenever the learner looks."""
    world.lead.evaluations = Evaluations(world.config, world.broker, world.publisher, world.lead.files)  # type: ignore[arg-type]
    look = world.lead.evaluations.turn

    def turn(waited_for: bool = False) -> str:
        if pool is not None:
            pool.work()
        elif waited_for:
            world.fleet.work()  # the learner takes no more groups
        return look(waited_for)

    world.lead.evaluations.turn = turn
    return world


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_TURN_S", 0.0)


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    """The section of the config: a pool plays two datasets every two steps."""
    for name, count in COUNTS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(count)))
    datasets = [str(tmp_path / f"{name}.jsonl") for name in COUNTS]
    return {"every": 2, "datasets": datasets, "samples": 2, "fleet": "pool"}


def lines(world: World) -> list[EvaluationMetrics]:
    return read_tail(world.run_dir.metrics, StepMetrics).evaluations


def of_version(world: World, version: int) -> list[int]:
    """Problems in the file of a version."""
    files = sorted(world.run_dir.evaluation.glob(f"{version:06d}-*.jsonl"))
    return sorted(line.problem for path in files for line in lines_of(path.read_bytes(), EvaluationResult))


WHOLE = list(range(sum(COUNTS.values())))


def test_every_second_version_and_the_last_one_are_evaluated_once(make_world: MakeWorld, told: dict[str, Any]) -> None:
    world = make_world(run={"steps": 4}, evaluation=told)
    pool = Pool(world)
    assert watching(world, pool).run() == "done"
    assert [(line.policy_version, line.dataset.split("-")[-1]) for line in lines(world)] == [
        (version, name) for version in (0, 2, 4) for name in COUNTS
    ]
    assert [of_version(world, version) for version in (0, 2, 4)] == [WHOLE] * 3
    assert len(pool.played) == len(set(pool.played)) == 15
    [easy, hard, *_] = lines(world)
    assert (easy.problems, easy.samples, easy.mean_reward, easy.failed, easy.tokens) == (3, 2, 0.5, 0, 24)
    assert easy.pass_at == {"1": 0.5, "2": 1.0}
    assert (easy.seconds, easy.held_s) == (4.0, 0.0)
    assert (hard.problems, hard.step, hard.temperature) == (2, 0, world.config.rollout.temperature)
    assert [line.step for line in world.lines()] == [0, 1, 2, 3], "steps are lines of their own"
    assert world.lines()[-1].nodes_live == 1, "nodes of the pool train nothing"
    assert world.publisher.evaluated == ()
    assert world.memory.state.evaluation.order is None
    again = Evaluations(world.config, world.broker, world.publisher, world.lead.files)
    assert [line.digest for line in lines(world)] == list(again._digests.values()) * 3
    assert easy.digest != hard.digest


def test_a_lines_digest_says_what_was_evaluated_and_how(make_world: MakeWorld, told: dict[str, Any]) -> None:
    def digests(**changed: Any) -> list[str]:
        lead = make_world(evaluation=told | changed).lead
        return list(Evaluations(lead.config, lead.broker, lead.publisher, lead.files)._digests.values())

    easy, hard = digests()
    assert digests() == [easy, hard]
    assert digests(datasets=told["datasets"][1:]) == [hard], "the other datasets do not matter"
    assert {easy, hard}.isdisjoint(digests(samples=4) + digests(temperature=0.0))
    Path(told["datasets"][0]).write_text('{"n": 7}\n')
    assert (easy != (edited := digests())[0], edited[1]) == (True, hard)


def test_held_out_problems_are_played_as_their_source_is(make_world: MakeWorld, told: dict[str, Any]) -> None:
    source = {"environment": "addition", "dataset": make_world().config.tasks.dataset}
    easy, hard = told["datasets"]
    tasks = {"sources": {"a": source, "b": source | {"success": 0.5}}, "environment": None, "dataset": ""}
    world = make_world(run={"steps": 2}, tasks=tasks, evaluation=told | {"datasets": {"b": [easy], "a": [hard]}})
    sources: dict[int, str] = {}

    class Named(Pool):
        def result(self, lease: Lease, version: int) -> EvaluationResult:
            sources[lease.task.serial] = lease.task.source
            return msgspec.structs.replace(super().result(lease, version), rewards=[0.5, 0.0])

    assert watching(world, Named(world)).run() == "done"
    assert sources == {0: "b", 1: "b", 2: "b", 3: "a", 4: "a"}
    assert [line.pass_at["1"] for line in lines(world)[:2]] == [0.5, 0.0], "half a reward passes in b alone"
    assert [line.dataset.split("-")[-1] for line in lines(world)] == [*COUNTS] * 2


def test_the_first_unfinished_round_keeps_its_version_and_the_next_one_waits(
    make_world: MakeWorld, told: dict[str, Any]
) -> None:
    world = make_world(run={"steps": 6}, evaluation=told)
    pool = Pool(world, most=1)
    assert watching(world, pool).run() == "done"
    seen = [entry["detail"] for entry in read_jsonl(world.run_dir.events) if entry["kind"] == "evaluation_skipped"]
    assert {line.policy_version for line in lines(world)} | {s["version"] for s in seen} == {0, 2, 4, 6}
    assert 6 in {line.policy_version for line in lines(world)}, "the last one is never skipped"
    assert all(of_version(world, line.policy_version) == WHOLE for line in lines(world))
    assert seen


@pytest.mark.parametrize("new_broker", [False, True])
def test_a_killed_learner_goes_on_with_the_round_of_its_checkpoint_and_evaluates_later_versions_again(
    make_world: MakeWorld, told: dict[str, Any], new_broker: bool
) -> None:
    world = make_world(run={"steps": 6}, evaluation=told, learner={"checkpoint": {"every": 2, "keep": 2}})
    world.backend.fail_at = 5
    pool = Pool(world)
    pool.at[4] = 2
    watching(world, pool).run_killed()
    before = {version: of_version(world, version) for version in (0, 2, 4)}
    assert before[4] and before[4] != WHOLE, "the round of the checkpoint is under way"
    again = world.with_new_broker() if new_broker else world.restart()
    assert again.trainer.version == 4
    pool_again = Pool(again)
    assert watching(again, pool_again).run() == "done"
    assert [of_version(again, version) for version in (0, 2, 4, 6)] == [WHOLE] * 4
    assert sorted(line.policy_version for line in lines(again)) == [0, 0, 2, 2, 4, 4, 6, 6]
    assert sum(version == 4 for version, _ in pool_again.played) == 5 - len(before[4]), (
        "only the missing ones are played again"
    )


def test_versions_after_the_checkpoint_are_evaluated_again_and_those_before_it_stay(
    make_world: MakeWorld, told: dict[str, Any]
) -> None:
    world = make_world(run={"steps": 8}, evaluation=told, learner={"checkpoint": {"every": 3, "keep": 2}})
    world.backend.fail_at = 5
    watching(world, Pool(world)).run_killed()
    assert {line.policy_version for line in lines(world)} == {0, 2, 4}
    (world.run_dir.evaluation / "notes-9.jsonl").touch()
    again = world.restart()
    assert again.trainer.version == 3
    again.lead.files.open_metrics(3)
    assert {line.policy_version for line in lines(again)} == {0, 2}
    assert of_version(again, 4) == [] and of_version(again, 2) == WHOLE
    assert (again.run_dir.evaluation / "notes-9.jsonl").exists(), "a file of the user's"
    assert watching(again, Pool(again)).run() == "done"
    assert sorted(line.policy_version for line in lines(again)) == sorted([0, 2, 4, 6, 8] * 2)


def test_a_broker_that_lost_its_memory_is_offered_the_rest_again(make_world: MakeWorld, told: dict[str, Any]) -> None:
    world = make_world(run={"steps": 2}, evaluation=told)
    pool = Pool(world, most=1)
    seen = 0

    def forget() -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            world.memory.state.evaluation.begin(None, False)

    work, pool.work = pool.work, lambda: (forget(), work())[1]
    assert watching(world, pool).run() == "done"
    assert [of_version(world, version) for version in (0, 2)] == [WHOLE] * 2


@pytest.mark.parametrize("version", [0, 2], ids=["while it trains", "in the last round"])
def test_an_evaluation_continues_beside_an_empty_store(
    make_world: MakeWorld, told: dict[str, Any], version: int
) -> None:
    world = make_world(run={"steps": 2}, evaluation=told)
    pool = Pool(world, most=1)

    def swapped() -> None:
        work()
        if pool.played[-1:] == [(version, 1)] and world.memory.state is first:
            other = MemoryBroker(first.run)
            world.memory.state = other.state
            for client in (world.broker, world.fleet.node, pool.node):
                client.use(other.state)
            world.fleet.registered = False
            world.fleet.held.clear()

    first, work, pool.work = world.memory.state, pool.work, swapped
    assert watching(world, pool).run() == "done"
    assert world.memory.state is not first
    assert "store_followed" in world.event_kinds()
    assert [of_version(world, done) for done in (0, 2)] == [WHOLE] * 2


def test_samples_of_another_version_are_refused_and_played_again(make_world: MakeWorld, told: dict[str, Any]) -> None:
    world = make_world(run={"steps": 2}, evaluation=told)
    pool, honest, lies = Pool(world), Pool.result, [1, 1]

    def result(lease: Lease, version: int) -> EvaluationResult:
        found = honest(pool, lease, version)
        wrong = (version, lease.task.serial) == (0, 1) and lies and lies.pop()
        return msgspec.structs.replace(found, version_max=version + 1) if wrong else found

    pool.result = result
    watching(world, pool).run()
    assert [of_version(world, version) for version in (0, 2)] == [WHOLE] * 2
    assert pool.played.count((0, 1)) == 3
    assert [line.failed for line in lines(world)] == [0] * 4


def test_results_of_other_datasets_samples_or_temperatures_do_not_count(
    make_world: MakeWorld, told: dict[str, Any]
) -> None:
    world = make_world(run={"steps": 2}, evaluation=told)
    watching(world, Pool(world)).run()
    path = Path(world.config.evaluation.datasets[0])

    def finished(**changes: Any) -> str:
        told = msgspec.structs.replace(world.config.evaluation, **changes)
        config = msgspec.structs.replace(world.config, evaluation=told)
        evaluations = Evaluations(config, world.broker, world.publisher, world.lead.files)  # type: ignore[arg-type]
        evaluations.published(4)
        return evaluations.turn()

    [done] = world.run_dir.evaluation.glob("000002-*")
    done.rename(done.with_name(done.name.replace("000002", "000004")))
    world.lead.files.open_metrics(4)
    nothing = "version 4: 0 of 5 problems"
    assert [finished(samples=3), finished(temperature=0.5)] == [nothing] * 2
    before = path.read_text()
    path.write_text('{"n": 7}\n' * 3)
    assert finished() == nothing
    path.write_text(before)
    assert finished() == "", "all are there"
    assert {line.policy_version for line in lines(world)} == {0, 2, 4}


def test_results_of_a_dataset_that_another_source_played_do_not_count(
    make_world: MakeWorld, told: dict[str, Any]
) -> None:
    """evaluation.datasets may change when a job continues, and a source has its own limits and rewards."""
    source = {"environment": "addition", "dataset": make_world().config.tasks.dataset}
    easy, hard = told["datasets"]
    tasks = {"sources": {"a": source, "b": source}, "environment": None, "dataset": ""}
    world = make_world(run={"steps": 2}, tasks=tasks, evaluation=told | {"datasets": {"a": [easy, hard]}})
    watching(world, Pool(world)).run()
    [done] = world.run_dir.evaluation.glob("000002-*")
    done.rename(done.with_name(done.name.replace("000002", "000004")))
    world.lead.files.open_metrics(4)
    for datasets, missing in (({"a": [easy], "b": [hard]}, True), ({"a": [easy, hard]}, False)):
        told_now = msgspec.structs.replace(world.config.evaluation, datasets=datasets)
        config = msgspec.structs.replace(world.config, evaluation=told_now)
        evaluations = Evaluations(config, world.broker, world.publisher, world.lead.files)  # type: ignore[arg-type]
        evaluations.published(4)
        assert bool(evaluations.turn()) == missing


def test_without_a_node_the_last_round_is_given_up_after_a_bounded_wait(
    make_world: MakeWorld, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    world = make_world(run={"steps": 2}, evaluation=told, rollout={"sample_timeout_s": 0.01})
    said: list[tuple[str, str]] = []
    world.lead.reporter.set = lambda state, wait=NO_WAIT, **_: said.append((state, wait.cause))
    assert watching(world, None).run() == "done"
    assert ("evaluating", "version 2: 0 of 5 problems") in said
    gone = [entry["detail"] for entry in read_jsonl(world.run_dir.events) if entry["kind"] == "evaluation_abandoned"]
    assert [one["version"] for one in gone] == [0, 2]
    assert lines(world) == [] and (world.run_dir.model / "table.npy").exists()


def test_a_shared_fleet_keeps_the_version_until_the_round_is_done(make_world: MakeWorld, told: dict[str, Any]) -> None:
    world = make_world(run={"steps": 4}, evaluation=told | {"fleet": "shared"}, staleness={"max": 1})
    assert watching(world, None).run() == "done"
    kinds = [kind for kind, _ in world.publisher.calls]
    assert kinds == ["hold", "release"] * 3
    assert [version for kind, version in world.publisher.calls if kind == "hold"] == [0, 2, 4]
    assert {line.policy_version for line in lines(world)} == {0, 2, 4}
    assert all(line.held_s > 0 for line in lines(world))
    assert [line.step for line in world.lines()] == [0, 1, 2, 3]


def test_a_shared_fleet_skips_a_version_that_is_no_longer_the_newest(
    make_world: MakeWorld, told: dict[str, Any]
) -> None:
    world = make_world(run={"steps": 6}, evaluation=told | {"fleet": "shared"}, staleness={"max": 5})
    watching(world, None)
    turn = world.lead.evaluations.turn

    def late(waited_for: bool = False) -> str:
        world.fleet.evaluates = world.trainer.version >= 2
        return turn(waited_for)

    world.lead.evaluations.turn = late
    assert world.run() == "done"
    [skipped] = [entry["detail"] for entry in read_jsonl(world.run_dir.events) if entry["kind"] == "evaluation_skipped"]
    assert skipped["version"] == 2 and "newer" in skipped["reason"]
    assert {line.policy_version for line in lines(world)} == {0, 4, 6}


def without_fleet(told: dict[str, Any]) -> dict[str, Any]:
    """The section without its key `fleet`."""
    return {key: value for key, value in told.items() if key != "fleet"}


def test_unset_the_training_fleet_evaluates_where_no_pool_exists(make_world: MakeWorld, told: dict[str, Any]) -> None:
    world = make_world(run={"steps": 4}, evaluation=without_fleet(told), staleness={"max": 1})
    assert watching(world, None).run() == "done"
    assert {line.policy_version for line in lines(world)} == {0, 2, 4}
    assert [kind for kind, _ in world.publisher.calls] == ["hold", "release"] * 3
    assert "evaluation_abandoned" not in world.event_kinds()


def test_unset_a_pool_evaluates_where_one_exists_and_the_fleet_plays_the_last_round_of_one_that_has_left(
    make_world: MakeWorld, told: dict[str, Any]
) -> None:
    world = make_world(run={"steps": 4}, evaluation=without_fleet(told))
    pool = Pool(world)
    asyncio.run(pool.node.heartbeat(node_report("pool", 1, -1, pool="eval"), []))  # before it has weights
    watching(world, pool)
    turn = world.lead.evaluations.turn

    def leaves(waited_for: bool = False) -> str:
        if waited_for:
            pool.work = lambda: world.fleet.work()  # type: ignore[method-assign]
            asyncio.run(pool.node.leave("pool"))
        return turn(waited_for)

    world.lead.evaluations.turn = leaves
    pool.at[4] = 1
    assert world.run() == "done"
    assert {line.policy_version for line in lines(world)} == {0, 2, 4}
    assert [of_version(world, version) for version in (0, 2, 4)] == [WHOLE] * 3
    assert [line.held_s for line in lines(world)[:4]] == [0.0] * 4, "nothing waits for the rounds of a pool"


@pytest.mark.parametrize("pool", [False, True])
def test_a_version_that_a_pause_keeps_from_the_fleet_is_skipped_at_once_and_a_pool_evaluates_it(
    make_config: Callable[..., Config], told: dict[str, Any], pool: bool
) -> None:
    config = make_config(run={"steps": 4}, evaluation=told if pool else without_fleet(told), staleness={"max": 4})
    rule = WatchRule(metric="reward_mean", below=1e9, do="pause")  # acts after the first step
    world_ = world(msgspec.structs.replace(config, watch=[rule]))
    assert watching(world_, Pool(world_) if pool else None).run() == "done"
    events = [e["detail"] for e in read_jsonl(world_.run_dir.events) if e["kind"].startswith("evaluation_")]
    skipped = [(e["version"], e["reason"]) for e in events if "reason" in e]
    assert [version for version, _ in skipped] == ([] if pool else [2, 4])
    assert all("paused" in reason for _, reason in skipped)
    assert {line.policy_version for line in lines(world_)} == ({0, 2, 4} if pool else {0})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SlipstreamError("gone")])
def test_trouble_with_an_evaluation_does_not_stop_the_training(
    make_world: MakeWorld, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    world = make_world(run={"steps": 4}, evaluation=told)
    watching(world, Pool(world))
    if isinstance(error, OSError):

        def fails(*_: object) -> None:
            raise error

        monkeypatch.setattr(module, "LineFile", fails)
    else:  # the broker is away when everything is trained
        turn = world.lead.evaluations.turn

        def gone(waited_for: bool = False) -> str:
            if waited_for:
                raise error
            return turn()

        world.lead.evaluations.turn = gone
    assert world.run() == "done"
    assert [line.step for line in read_tail(world.run_dir.metrics, StepMetrics).lines] == [0, 1, 2, 3]
    assert ("evaluation_abandoned" in world.event_kinds()) == isinstance(error, OSError)


def at_once(world: World) -> World:
    """A fleet that evaluates a version before it samples for the next step."""
    watching(world, Pool(world))
    look, gather = world.lead.evaluations.turn, world.lead._gather

    def whole(waited_for: bool = False) -> str:
        while look(waited_for):
            pass
        return ""

    world.lead.evaluations.turn = whole
    world.lead._gather = lambda step: Wait() if world.lead._watch.stopped else gather(step)
    return world


@pytest.mark.parametrize(("steps", "version"), [(1, 0), (2, 2)])
def test_a_rule_on_an_evaluation_stops_the_run_until_it_is_resumed_and_names_the_step_that_made_the_version(
    make_config: Callable[..., Config], told: dict[str, Any], steps: int, version: int
) -> None:
    metric = f"evaluation/{dataset_names(told['datasets'])[0]}/mean_reward"
    rule = WatchRule(metric=metric, below=0.9, steps=steps, do="stop")
    config = make_config(run={"steps": 4}, evaluation=told, learner={"checkpoint": {"every": 1}})
    config = msgspec.structs.replace(config, watch=[rule])
    stopped = world(config)
    with refused(HopelessError, "watch[0]", metric, "0.5", "0.9", f"step {version}"):
        at_once(stopped).run()
    assert len(stopped.lines()) == version, "the evaluation was quicker than the next step"
    again = stopped.restart()
    with refused(HopelessError, "watch[0]"):
        at_once(again).run()
    assert main(["resume", str(config.run.dir)]) == 0
    last = again.restart()
    assert at_once(last).run() == "done"
    assert [line.step for line in last.lines()] == list(range(4))
    (found,) = [entry["detail"] for entry in read_jsonl(last.run_dir.events) if entry["kind"] == "watch"]
    made = f"slipstream replay {config.run.dir} --from {version - 1} --to {version - 1}"
    assert found["replay"] == (made if version else ""), "no step made version 0"


@pytest.mark.parametrize("reward", [1e200, 1e300])
def test_rewards_that_no_mean_can_take_end_the_round_and_not_the_training(
    make_world: MakeWorld, told: dict[str, Any], reward: float
) -> None:
    world = make_world(run={"steps": 2}, evaluation=told)
    pool, honest = Pool(world), Pool.result

    def result(lease: Lease, version: int) -> EvaluationResult:
        found = honest(pool, lease, version)
        return found if version else msgspec.structs.replace(found, rewards=[reward * (1 + lease.task.serial)] * 2)

    pool.result = result
    assert watching(world, pool).run() == "done"
    [gone] = [entry["detail"] for entry in read_jsonl(world.run_dir.events) if entry["kind"] == "evaluation_abandoned"]
    assert (gone["version"], gone["finished"]) == (0, 5) and "OverflowError" in gone["reason"]
    assert {line.policy_version for line in lines(world)} == {2}, "the next round is not spoiled"


def test_samples_that_no_scorer_could_judge_count_as_failed_and_in_no_mean() -> None:
    def played(problem: int, rewards: list[float], reasons: list[str]) -> EvaluationResult:
        errors = ["" if reason == "stop" else "why" for reason in reasons]
        return EvaluationResult(problem, rewards, [3] * 4, reasons, errors, "node", 2, 2, 1.0, 1.0)

    right, unscored = played(0, [1.0, 0.0, 1.0, 0.0], ["stop", UNSCORED, "stop", UNSCORED]), [UNSCORED] * 4
    wrong = played(1, [0.0, 0.0, 1.0, 1.0], ["environment_error", "stop", "stop", "stop"])
    found = summary(EvaluationOrder(2, 0, 1.0), "d", [right, wrong, played(2, [0.0] * 4, unscored)], 0.0)
    assert (found.mean_reward, found.failed, found.problems) == (0.75, 7, 3)
    assert found.pass_at == {"1": 0.5, "2": pytest.approx(5 / 6), "4": 1.0}, "every k of the second alone"
    found = summary(
        EvaluationOrder(2, 0, 1.0), "d", [right, played(1, [0.0, 1.0, 1.0, 0.0], unscored[:1] + ["stop"] * 3)], 0.0
    )
    assert found.pass_at == {"1": pytest.approx((1 + 2 / 3) / 2), "2": 1.0}, "no problem has all its samples"
    almost = played(0, [0.7 + 0.2 + 0.1, 0.5, 0.4, 0.0], ["stop"] * 4)
    assert summary(EvaluationOrder(2, 0, 1.0), "d", [almost], 0.0).pass_at["1"] == 0.25
    with refused(ValueError, "d"):
        summary(EvaluationOrder(2, 0, 1.0), "d", [played(2, [0.0] * 4, unscored)], 0.0)


@pytest.mark.parametrize("success", [0.0, -1.0])
def test_a_failed_or_lost_sample_never_passes(success: float) -> None:
    def played(problem: int, rewards: list[float], failed: list[str]) -> EvaluationResult:
        reasons = [reason or "stop" for reason in failed]
        return EvaluationResult(problem, rewards, [3] * 2, reasons, failed, "node", 2, 2, 1.0, 1.0)

    results = [played(0, [0.0, 0.0], ["timeout", ""]), played(1, [0.0, 0.0], ["lost", "lost"])]
    found = summary(EvaluationOrder(2, 0, 1.0), "d", results, 0.0, success=success)
    assert (found.pass_at, found.failed) == ({"1": 0.25, "2": 0.5}, 3)


def test_a_run_without_evaluation_waits_for_none(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 2})
    world.run()
    assert world.publisher.versions == [0, 1] and not world.trainer.source.has_final_evaluation
    assert isinstance(world.memory, MemoryBroker) and world.memory.state.evaluation.order is None


def test_the_pause_of_a_round_that_goes_on_is_none_of_its_seconds() -> None:
    spans = [(100.0, 4.0), (102.0, 5.0), (50000.0, 3.0)]  # the last one after a restart, or by another clock
    results = [EvaluationResult(n, [1.0], [3], ["stop"], [""], "node", 2, 2, *span) for n, span in enumerate(spans)]
    assert summary(EvaluationOrder(2, 0, 1.0), "d", results, 0.0).seconds == 10.0
