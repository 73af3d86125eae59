"""The training loop on a real in-memory broker: bounds, drains, kills, replays and what it refuses."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.contract import StoredGroup
from common.errors import HopelessError, UsageError
from common.metrics import StepMetrics
from common.rollouts import Group, encode_group
from common.run_reader import read_tail
from common.waste import Waste
from common.weights.source.nodes import LostNode
from tests.rigs.brokers import MemoryBroker
from tests.rigs.refusals import refused
from tests.rigs.telemetry import recorded
from tests.rigs.waiting import read_jsonl
from tests.unit.learner.loop_fakes import Killed, MakeWorld, World, make_group

# ---------------------------------------------------------------- a whole run


def test_a_run_trains_and_commits_every_group_once_and_leaves_everything(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 5}, learner={"checkpoint": {"every": 2, "keep": 2}})
    asked: list[int] = []
    status = world.broker.status
    world.broker.status = lambda: (asked.append(world.trainer.version), status())[1]
    assert world.run() == "done"
    assert world.trainer.signs.answer("/readyz")[0] == 200, "it has turned within learner.timeout_s"
    assert asked == [0, 1, 2, 3, 4, 5], "the broker's status, before the first step and with every metrics line"
    found = world.lines()
    assert [(line.step, line.policy_version) for line in found] == [(n, n + 1) for n in range(5)]
    assert all(line.groups == 2 and line.tokens_trained > 0 and line.nodes_live == 1 for line in found)
    assert found[-1].tokens_trained_total == sum(line.tokens_trained for line in found)
    assert any(line.advantage_zero_fraction > 0 for line in found), "groups without signal are trained on"
    assert all(line.groups_filtered == 0 for line in found)
    np.testing.assert_array_equal(world.final_table(), world.backend.table.detach().numpy())
    ledger = world.broker.ledger()
    assert [(entry.serial, entry.state) for entry in ledger] == [(n, "committed") for n in range(10)]
    assert sorted(entry.step for entry in ledger) == sorted([0, 1, 2, 3, 4] * 2)
    assert world.broker.commits == [  # each after its durable checkpoint, and before older ones are removed
        (1, ["step-000002"]),
        (3, ["step-000002", "step-000004"]),
        (4, ["step-000002", "step-000004", "step-000005"]),
    ]
    assert sorted(path.name for path in world.run_dir.checkpoints.glob("step-*")) == ["step-000004", "step-000005"]


def test_a_penalty_on_the_divergence_keeps_the_policy_near_the_reference(make_world: MakeWorld, tmp_path: Path) -> None:
    def divergences(coefficient: float) -> list[float]:
        loss = {"kl_coefficient": coefficient, "kl_estimator": "k2"}
        run = {"steps": 15, "dir": str(tmp_path / f"run-{coefficient}")}
        world = make_world(run=run, learner={"loss": loss})
        world.run()
        return [line.kl_mean for line in world.lines()]

    assert divergences(0.0) == [0.0] * 15  # not measured
    free, kept = divergences(1e-9), divergences(10.0)
    assert free[0] == kept[0] == pytest.approx(0.0, abs=1e-6)  # the reference is the table before training
    assert sum(kept) < 0.9 * sum(free)


def test_the_metrics_tell_how_far_off_policy_a_step_was(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 5}, staleness={"max": 2}, lag=2)
    world.run()
    last = world.lines()[-1]
    assert sum(last.tokens_by_age) == last.tokens_trained
    assert last.tokens_by_age[2] > 0
    assert 0 < last.ratio_p1 <= last.ratio_p50 <= last.ratio_p99 <= last.ratio_max * 1.05
    assert 0 < last.effective_sample_fraction <= 1


@pytest.mark.parametrize(
    ("every", "owed", "canaries"), [(2, False, [0, 2, 4]), (0, False, [0]), (0, True, [0, 1, 2, 3, 4])]
)
def test_every_version_but_the_last_is_published_with_a_canary_when_one_is_due_or_a_node_missed_it(
    make_world: MakeWorld, every: int, owed: bool, canaries: list[int]
) -> None:
    world = make_world(run={"steps": 5}, weights={"canary_every": every})
    world.publisher.canary_owed = owed
    world.run()
    assert world.publisher.versions == [0, 1, 2, 3, 4]
    assert sorted(world.publisher.canaries) == canaries
    canary, table = world.publisher.canaries[canaries[-1]], world.publisher.tables[canaries[-1]]
    expected = table.log_softmax(-1)[canary.tokens[:-1], canary.tokens[1:]]
    np.testing.assert_allclose(canary.logprobs, expected, rtol=1e-6)


# ---------------------------------------------------------------- staleness


@pytest.mark.parametrize(("maximum", "lag"), [(0, 0), (1, 1), (2, 2), (3, 1)])
def test_staleness_stays_within_the_bound_and_0_is_synchronous(make_world: MakeWorld, maximum: int, lag: int) -> None:
    world = make_world(run={"steps": 8}, staleness={"max": maximum}, lag=lag)
    world.run()
    found = world.lines()
    assert all(line.staleness_max <= maximum and line.tokens_expired == 0 for line in found)
    if maximum == 0:
        assert all(line.ratio_max > 0 and line.staleness_mean == 0 for line in found)
        for entry in world.broker.ledger():
            assert entry.version_min == entry.version_max == entry.step == entry.serial // 2


def straggling(make_world: MakeWorld, until_step: int, **staleness: object) -> World:
    """Task 0 comes back only when step `until_step` has begun."""
    world = make_world(run={"steps": 6}, staleness={"max": 1, **staleness})
    world.fleet.hold_back = lambda serial, turn: serial == 0 and world.trainer.version < until_step
    return world


def tokens_of(group: Group) -> int:
    return sum(int(sample.loss_mask.numpy().sum()) for sample in group.samples)


def test_a_straggler_does_not_block_and_its_expired_tokens_leave_the_loss(make_world: MakeWorld) -> None:
    world = straggling(make_world, until_step=4)
    world.run()
    found = world.lines()
    assert [line.step for line in found] == list(range(6))
    assert all(line.staleness_max <= 1 for line in found)
    sampled = tokens_of(make_group(0, 0, 2))
    assert sum(line.tokens_expired for line in found) == sampled
    assert sum(sum(line.tokens_expired_by_length_decile) for line in found) == sampled
    assert found[-1].tokens_wasted_total == found[-1].tokens_wasted_masked == sampled
    assert world.lead.reporter.snapshot().waste == {"failed": Waste(0), "masked": Waste(sampled)}
    assert {entry.state for entry in world.broker.ledger()} == {"committed"}


def test_regenerate_trains_the_straggler_on_a_fresh_version(make_world: MakeWorld) -> None:
    world = straggling(make_world, until_step=4, expired="regenerate")
    world.run()
    found = world.lines()
    assert sum(line.tokens_expired for line in found) == 0
    assert sum(line.groups_regenerated for line in found) == 1
    again = sum(np.array(line.tokens_regenerated_by_length_decile) for line in found)
    assert again.sum() == tokens_of(make_group(0, 0, 2))
    (entry,) = [entry for entry in world.broker.ledger() if entry.serial == 0]
    assert entry.attempts == 2 and entry.step - entry.version_min <= 1


def test_wait_lets_no_group_overtake(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 4}, staleness={"max": 1, "expired": "wait"})
    world.fleet.hold_back = lambda serial, turn: serial == 0 and turn < 5
    world.run()
    assert [entry.step for entry in world.broker.ledger()] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sum(line.tokens_expired for line in world.lines()) == 0
    assert world.fleet.turn > 5


# ---------------------------------------------------------------- drains, kills, replays


def test_a_drained_run_has_committed_a_checkpoint_and_continues_to_the_same_weights(make_world: MakeWorld) -> None:
    sections = {"run": {"steps": 9}, "learner": {"checkpoint": {"every": 100}}}
    expected = make_world(**sections).unbroken()
    world = make_world(**sections)
    world.fleet.hold_back = lambda serial, turn: world.stop.append("SIGTERM") if serial == 6 else False
    assert world.run() == "drained"
    version = world.trainer.version
    assert 0 < version < 9
    assert [line.step for line in world.lines()] == list(range(version))
    assert world.broker.commits == [(version - 1, [f"step-{version:06d}"])]
    assert not world.run_dir.model.exists()
    again = world.restart()
    assert again.trainer.state.incarnation == 1
    assert again.run() == "done"
    np.testing.assert_array_equal(world.final_table(), expected)
    assert [line.step for line in world.lines()] == list(range(9))


@pytest.mark.parametrize("learner", [{}, {"dynamic_sampling": True}], ids=["all groups", "filtered"])
@pytest.mark.parametrize("killed_at", [0, 1, 3, 4])
def test_a_killed_run_replays_and_ends_bitwise_equal(
    make_world: MakeWorld, killed_at: int, learner: dict[str, bool]
) -> None:
    whole = make_world(run={"steps": 6}, learner=learner)
    expected, ledger = whole.unbroken(), whole.broker.ledger()
    world = whole.with_new_broker()
    world.backend.fail_at = killed_at
    world.run_killed()
    assert len(world.lines()) == killed_at
    again = world.restart()
    assert again.trainer.version == killed_at // 2 * 2
    assert again.run() == "done"
    np.testing.assert_array_equal(world.final_table(), expected)
    found = world.lines()
    assert [line.step for line in found] == list(range(6))
    assert found[-1].tokens_trained_total == sum(line.tokens_trained for line in found)
    assert [(e.serial, e.step, e.filtered, e.state) for e in again.broker.ledger()] == [
        (e.serial, e.step, e.filtered, "committed") for e in ledger
    ]
    assert "replay" in world.event_kinds()


def die(*arguments: object) -> None:
    raise Killed


def test_a_kill_between_checkpoint_and_commit_is_made_good_at_the_next_start(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 6})
    world.broker.commit = die
    world.run_killed()
    assert world.broker.status().groups_committed == 0
    again = world.restart()
    assert again.broker.status().groups_committed == 4
    assert again.run() == "done"
    assert [line.step for line in world.lines()] == list(range(6))


def test_a_checkpoint_behind_what_the_broker_committed_is_refused_before_anything_is_trained(
    make_world: MakeWorld,
) -> None:
    world = make_world(run={"steps": 6})
    world.run()
    newest = world.lead.files.checkpoints.steps()[6]
    shutil.rmtree(newest)  # as if RUN/checkpoints had been restored from an older copy
    before = world.lines()
    with refused(UsageError, "step 4", "steps 4 to 5", f"back into {newest.parent}", "another learner.checkpoint.dir"):
        world.restart()
    assert [line.step for line in before] == list(range(6))
    shutil.rmtree(world.run_dir.checkpoints)
    with refused(UsageError, "step 0", "steps 0 to 5", "step 6"):
        world.restart()


def test_a_run_that_is_done_exports_its_model_again_without_training(make_world: MakeWorld) -> None:
    world = make_world()
    world.run()
    table = world.final_table()
    again = world.restart()
    assert again.run() == "done"
    assert again.backend.steps == 4
    np.testing.assert_array_equal(world.final_table(), table)


def test_a_broker_without_memory_still_gets_every_task_once(make_world: MakeWorld) -> None:
    seen: list[bytes] = []
    world = make_world(run={"steps": 8})
    world.fleet.hold_back = lambda serial, turn: world.stop.append("SIGTERM") if serial == 7 else False
    assert world.run() == "drained"
    version = world.trainer.version
    again = world.with_new_broker()
    task = again.lead.tasks.next
    again.lead.tasks.next = lambda count: [seen.append(t.problem) or t for t in task(count)]
    assert again.run() == "done"
    assert [line.step for line in world.lines()] == list(range(8))
    assert len(seen) == len(set(seen)) == 2 * (8 - version)
    assert all(line.staleness_max <= 2 for line in world.lines())


# ---------------------------------------------------------------- what cannot be trained on


def test_an_unusable_group_is_generated_again(make_world: MakeWorld) -> None:
    world = make_world()
    spoiled: list[int] = []

    def spoil(group: Group) -> bytes:
        if group.serial == 3 and not spoiled:
            spoiled.append(group.serial)
            return b"\xc1"
        return encode_group(group)

    world.fleet.spoil = spoil
    assert world.run() == "done"
    assert spoiled == [3]
    assert "bad_group" in world.event_kinds()
    assert [entry.state for entry in world.broker.ledger()] == ["committed"] * 8


def test_a_node_that_the_weight_plane_has_lost_is_an_event_with_its_reason(make_world: MakeWorld) -> None:
    world = make_world()
    world.publisher.lost.append(LostNode("node-3", "it was silent for 9 s"))
    assert world.run() == "done"
    told = [event["detail"] for event in read_jsonl(world.run_dir.events) if event["kind"] == "ejection"]
    assert told == [{"step": 0, "node": "node-3", "reason": "it was silent for 9 s"}]


def half_groups(world: World) -> None:
    world.fleet.spoil = lambda group: encode_group(Group(group.serial, group.samples[:1]))


def failing_canary(world: World) -> None:
    world.publisher.fatal = "log-probabilities differ by 3.1, weights.canary_tolerance is 0.5"


def failing_environment(world: World) -> None:
    def fail(group: Group) -> bytes:
        samples = [msgspec.structs.replace(s, error="no calculator") for s in group.samples]
        return encode_group(Group(group.serial, samples))

    world.fleet.spoil = fail


def dying_tasks(world: World) -> None:
    node = world.fleet.node

    async def fail(node_id: str, token: str, meta: object, payload: bytes) -> bool:
        await node.fail(node_id, token, "reset raised OSError: no calculator")
        return False

    node.complete = fail


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (half_groups, ["3 times", "group 0", "node fake", "1 samples"]),
        (failing_canary, ["weights.canary_tolerance is 0.5"]),
        (failing_environment, ["3 steps", "no calculator"]),
        (dying_tasks, ["3 failed attempts", "no calculator"]),
    ],
)
def test_a_run_that_cannot_go_on_stops_with_the_reason(
    make_world: MakeWorld, spoil: Callable[[World], None], facts: list[str]
) -> None:
    world = make_world(run={"steps": 8})
    spoil(world)
    with refused(HopelessError, *facts):
        world.run()
    assert world.backend.steps == 0
    assert world.broker.status().groups_dead in ((6, 7, 8, 9) if spoil is dying_tasks else (0,))


def test_a_step_whose_tokens_all_expired_still_counts(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 4}, learner={"groups_per_step": 1}, staleness={"max": 0})
    world.fleet.spoil = lambda group: encode_group(make_group(group.serial, -1, 2) if group.serial == 1 else group)
    assert world.run() == "done"
    found = world.lines()
    assert [line.tokens_trained > 0 for line in found] == [True, False, True, True]
    assert found[1].tokens_expired > 0


def test_a_store_that_lost_what_the_checkpoint_was_trained_on_is_refused_before_it_is_trained_on_again(
    make_world: MakeWorld,
) -> None:
    """A power cut with broker.durability: everysec, with the checkpoint on the disk and the newest moves not."""
    world = make_world(run={"steps": 6})
    world.backend.fail_at = 3
    before: list[MemoryBroker] = []  # with the groups of step 1, which no step has taken
    take = world.broker.take

    def copying(step: int, count: int, wait_s: float, **more: Any) -> list[StoredGroup] | None:
        found = copy.deepcopy(world.memory) if step == 1 else None
        taken = take(step, count, wait_s, **more)
        before.extend([found] if found is not None and taken is not None else [])
        return taken

    world.broker.take = copying
    world.run_killed()
    with refused(UsageError, "step 2", "2 groups", "task 2, ready", "RUN/store"):
        world.restart(before[0])
    again = world.with_new_broker()  # the store was moved away
    assert again.trainer.version == 2
    assert again.run() == "done"
    assert [line.step for line in read_tail(world.run_dir.metrics, StepMetrics).lines] == list(range(6))


# ---------------------------------------------------------------- the trace


def test_the_trace_has_every_step_with_its_groups_its_phases_and_the_states_in_between(make_world: MakeWorld) -> None:
    with recorded() as spans:
        world = make_world(run={"steps": 3})
        world.run()
    found = spans()
    steps = [span for span in found if span.kind == "step"]
    assert [(span.args["step"], span.args["version"]) for span in steps] == [(0, 1), (1, 2), (2, 3)]
    ledger = {entry.serial: entry.step for entry in world.broker.ledger()}
    for span in steps:
        serials = [int(word) for word in str(span.args["serials"]).split()]
        assert serials == [serial for serial, step in ledger.items() if step == span.args["step"]]
    for name in ("batch", "train"):
        inside = [span for span in found if (span.kind, span.name) == ("phase", name)]
        for step, phase in zip(steps, inside, strict=True):
            assert step.start_s <= phase.start_s and phase.track == step.track
            assert phase.start_s + phase.duration_s <= step.start_s + step.duration_s
    states = {span.name for span in found if span.kind == "state"}
    assert states >= {"waiting", "training", "publishing", "checkpointing"}
