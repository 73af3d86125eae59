"""Which checkpoint is the best, that it stays, and that a kill at any moment leaves a folder that says the truth."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config.checks import problems
from common.config.loading import build_config
from common.config.schema import Config, SftConfig
from common.config.without_effect import without_effect
from common.errors import ConfigError
from common.metrics import EvaluationMetrics
from learner.checkpoint import best as module
from learner.checkpoint.best import MOST_WAITING, Best, read_best
from learner.checkpoint.folder import CheckpointFolder, read_checkpoint
from tests.rigs.refusals import refused
from tests.rigs.telemetry import read_line
from tests.unit.learner.loop_fakes import MakeWorld, World
from tests.unit.learner.test_checkpoints import kill_at, write

DATASET = "/data/held-out.jsonl"
NAME = "data-held-out"  # in metrics


def evaluated(
    version: int, reward: float, pass_at: dict[str, float] | None = None, **how: float | str
) -> EvaluationMetrics:
    told = {"policy_version": version, "dataset": NAME, "mean_reward": reward, "pass_at": pass_at or {}}
    return read_line(version, EvaluationMetrics, **told, **how)


def config_of(keep_best: str, every: int = 2, keep: int = 1, kind: Any = Config, **sections: Any) -> Any:
    document = {
        "run": {"name": "best", "dir": "/run", "steps": 100},
        "model": {"path": "/model"},
        "tasks": {"environment": "addition", "dataset": "/tasks"} if kind is Config else {"dataset": "/rows"},
        "learner": {"checkpoint": {"every": every, "keep": keep, "keep_best": keep_best}},
    }
    return build_config(document | sections, "job.yaml", schema=kind)


def evaluating(every: int = 2, **more: Any) -> dict[str, Any]:
    return {"evaluation": {"every": every, "datasets": [DATASET], "samples": 4, **more}}


def best_of(config: Any, values: dict[int, float], metric: str = "reward_mean") -> Best:
    best, kind = Best(config), config.step_metrics
    for step, value in values.items():
        best.note(read_line(step, kind, **{"tokens_trained": 4, metric: value}))
    return best


# ---------------------------------------------------------------- values


def test_a_metric_of_steps_counts_as_its_mean_over_the_steps_before_the_checkpoint() -> None:
    best = best_of(config_of("reward_mean", every=3), {0: 1.0, 1: 0.1, 2: 0.1, 3: 0.6, 4: 0.5, 5: 0.4})
    assert (best.value(3), best.value(6)) == (pytest.approx(0.4), pytest.approx(0.5))
    assert best.value(1) == 1.0, "there are no steps before 0"
    assert best.value(9) is None
    best.note(msgspec.structs.replace(read_line(6), reward_mean=float("nan")))
    best.note(read_line(7, reward_mean=None))
    assert best.value(7) == pytest.approx(0.45), "a step without a number counts for nothing"


def test_steps_that_trained_nothing_or_had_no_episode_do_not_make_a_checkpoint_the_best() -> None:
    for metric in ("mismatch_abs_mean", "staleness_max", "reward_mean"):
        best = Best(config_of(metric))
        best.note(read_line(0, **{metric: 3}, tokens_trained=4, samples=8, samples_failed=0))
        best.note(read_line(1, **{metric: 0}, tokens_trained=0, samples=8, samples_failed=8))
        assert (best.value(2), best.value(3)) == (3.0, None)


def test_a_loss_of_held_out_rows_counts_as_its_newest_value() -> None:
    config = config_of("-validation_loss", every=4, kind=SftConfig)
    best = best_of(config, {1: 3.0, 3: 2.0, 7: 2.5}, "validation_loss")
    assert (best.value(4), best.value(8), best.value(12)) == (2.0, 2.5, None)


@pytest.mark.parametrize(
    ("figure", "expected"), [(f"{NAME}/mean_reward", 0.5), (f"{NAME}/pass_at/4", 0.75), ("other/mean_reward", None)]
)
def test_an_evaluation_counts_for_its_own_version(figure: str, expected: float | None) -> None:
    best = Best(config_of(f"evaluation/{figure}", **evaluating()))
    best.note(read_line(1, reward_mean=1.0))
    best.note(evaluated(2, 0.5, {"1": 0.5, "4": 0.75}))
    assert (best.value(2), best.value(4)) == (expected, None)


GREEDY, SAMPLED = {"temperature": 0.0, "samples": 1}, {"temperature": 1.0, "samples": 8}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (GREEDY | {"digest": "a"}, SAMPLED | {"digest": "b"}),
        (SAMPLED | {"digest": "a"}, SAMPLED | {"digest": "b"}),  # an edited dataset of the same name
        (GREEDY, SAMPLED | {"digest": "b"}),  # by an earlier release
    ],
)
def test_evaluations_that_were_made_otherwise_than_the_newest_do_not_decide(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], caplog: Any
) -> None:
    best = Best(config_of(f"evaluation/{NAME}/mean_reward", **evaluating()))
    folder = CheckpointFolder(tmp_path, 1, best)
    for version, reward, how in ((2, 0.6, before), (4, 0.5, after), (6, 0.58, after), (8, 0.55, after)):
        write(folder, version)
        best.note(evaluated(version, reward, **how))
        folder.prune()
    assert (steps_of(tmp_path), read_best(tmp_path).step) == ([6, 8], 6)
    assert caplog.text.count("version 4") == 1
    best.note(evaluated(2, 0.6, **before))
    assert (best.value(2), best.value(6)) == (0.6, None)


def test_an_evaluation_of_an_earlier_release_counts_where_its_line_tells_of_the_same(tmp_path: Path) -> None:
    best = Best(config_of(f"evaluation/{NAME}/mean_reward", **evaluating()))
    best.note(evaluated(2, 0.6, **SAMPLED))
    best.note(evaluated(4, 0.5, **SAMPLED, digest="a"))
    assert (best.value(2), best.value(4)) == (0.6, 0.5)


# ---------------------------------------------------------------- what stays


def steps_of(folder: Path) -> list[int]:
    assert not list(folder.glob(".*"))
    return list(CheckpointFolder(folder, 1).steps())


def test_the_best_stays_besides_the_newest_and_gives_way_to_a_better_one(tmp_path: Path) -> None:
    best = best_of(config_of("reward_mean"), {})
    folder = CheckpointFolder(tmp_path, 1, best)
    for version, reward, kept in ((2, 0.5, [2]), (4, 0.9, [4]), (6, 0.2, [4, 6]), (8, 0.3, [4, 8]), (10, 0.9, [10])):
        best.note(read_line(version - 1, reward_mean=reward))
        write(folder, version)
        assert steps_of(tmp_path) == kept
        assert read_best(tmp_path).step == kept[0]
    assert folder.newest()[1].policy_version == 10
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 10, "metric": "reward_mean", "value": 0.9}


def test_a_full_disk_keeps_the_old_choice_and_the_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    best = best_of(config_of("reward_mean"), {1: 0.9, 3: 0.1, 5: 1.0})
    folder = CheckpointFolder(tmp_path, 1, best)
    for version in (2, 4):
        write(folder, version)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_json", full)
    for version in (6, 8):
        write(folder, version)
    assert list(folder.steps()) == [2, 6, 8], "the one that best.json names, the best and the newest"
    assert read_best(tmp_path).step == 2 and "best.json" in caplog.text
    monkeypatch.undo()
    folder.prune()
    assert list(folder.steps()) == [6, 8] and read_best(tmp_path).step == 6


def test_where_less_is_better_the_least_stays(tmp_path: Path) -> None:
    best = best_of(config_of("-loss"), {1: 0.9, 3: 0.1, 5: 0.5}, "loss")
    folder = CheckpointFolder(tmp_path, 1, best)
    for version in (2, 4, 6):
        write(folder, version)
    assert (steps_of(tmp_path), read_best(tmp_path).step) == ([4, 6], 4)


def test_another_metric_forgets_the_old_choice_and_no_metric_leaves_no_name(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 1, best_of(config_of("reward_mean"), {1: 1.0}))
    write(folder, 2)
    # the metrics file was lost: the choice of the same metric stays
    kept = CheckpointFolder(tmp_path, 1, Best(config_of("reward_mean")))
    write(kept, 4)
    assert (steps_of(tmp_path), read_best(tmp_path).value) == ([2, 4], 1.0)
    write(CheckpointFolder(tmp_path, 1, best_of(config_of("-loss"), {3: 0.5}, "loss")), 6)
    assert (steps_of(tmp_path), read_best(tmp_path).metric) == ([4, 6], "-loss")
    write(CheckpointFolder(tmp_path, 1), 8)
    assert (steps_of(tmp_path), read_best(tmp_path)) == ([8], None)
    (tmp_path / module.BEST_FILE).write_bytes(b'{"metric": "\xff"}')
    assert read_best(tmp_path) is None, "bytes that are not UTF-8 name no checkpoint"


def test_a_checkpoint_waits_for_its_evaluation_until_a_later_one_is_there(tmp_path: Path) -> None:
    best = Best(config_of("evaluation/data-held-out/mean_reward", **evaluating(every=4)))
    folder = CheckpointFolder(tmp_path, 1, best)
    for version in range(2, 15, 2):
        write(folder, version)
    assert steps_of(tmp_path) == [4, 8, 12, 14], "2, 6 and 10 are evaluated never"
    assert read_best(tmp_path) is None
    for version, reward, kept in ((4, 0.5, [4, 8, 12, 14]), (12, 0.2, [4, 14]), (8, 0.9, [4, 14])):
        best.note(evaluated(version, reward))
        folder.prune()
        assert (steps_of(tmp_path), read_best(tmp_path).step) == (kept, 4)


def test_a_fleet_that_evaluates_nothing_does_not_fill_the_disk(tmp_path: Path, caplog: Any) -> None:
    folder = CheckpointFolder(
        tmp_path, 1, Best(config_of("evaluation/data-held-out/mean_reward", **evaluating(every=1)))
    )
    for version in range(1, MOST_WAITING + 5):
        write(folder, version)
    assert steps_of(tmp_path) == list(range(5, MOST_WAITING + 5))
    assert "evaluation/data-held-out/mean_reward" in caplog.text


# ---------------------------------------------------------------- kills


def by_checkpoint(folder: CheckpointFolder, best: Best) -> None:
    write(folder, 6)


def by_evaluation(folder: CheckpointFolder, best: Best) -> None:
    best.note(evaluated(4, 0.9))
    folder.prune()


@pytest.mark.parametrize("act", [by_checkpoint, by_evaluation])
@pytest.mark.slow
def test_killed_at_any_moment_the_file_names_a_whole_checkpoint_and_the_next_start_decides_the_same(
    tmp_path: Path, act: Callable[[CheckpointFolder, Best], None]
) -> None:
    """Version 2 was the best, and 4 (by its evaluation) or 6 (as a new checkpoint) takes its place."""

    def made(parent: Path) -> tuple[CheckpointFolder, Best]:
        if act is by_checkpoint:
            best = best_of(config_of("reward_mean"), {1: 0.5, 3: 0.1, 5: 0.9})
        else:
            best = Best(config_of("evaluation/data-held-out/mean_reward", **evaluating(every=2)))
            best.note(evaluated(2, 0.5))
        return CheckpointFolder(parent, 1, best), best

    for moment in range(100):
        parent = tmp_path / str(moment)
        folder, best = made(parent)
        write(folder, 2)
        write(folder, 4)
        killed = kill_at(moment, lambda folder=folder, best=best: act(folder, best))
        for path in folder.steps().values():
            assert read_checkpoint(path).policy_version == int(path.name[-6:])
        assert read_best(parent).step in folder.steps()
        newest = folder.newest()[1].policy_version
        assert newest in (4, 6) and newest == max(folder.steps())
        again, known = made(parent)
        again.remove_incomplete()
        if newest == 4:
            act(again, known)
        else:
            again.prune()
        left = {path.name for path in parent.iterdir() if not path.name.startswith(".best.json")}
        assert left == ({"step-000006"} if act is by_checkpoint else {"step-000004"}) | {"best.json"}
        assert read_best(parent).value == 0.9
        if not killed:
            break
    assert 6 < moment < 99


# ---------------------------------------------------------------- in the loop


def means(world: World, every: int) -> dict[int, float]:
    """The value of every version that may have a checkpoint, from the metrics file."""
    rewards = [line.reward_mean for line in world.lines()]
    return {v: sum(rewards[v - every : v]) / every for v in range(every, len(rewards) + 1, every)}


def saving(keep_best: str) -> dict[str, Any]:
    return {"checkpoint": {"every": 2, "keep": 1, "asynchronous": False, "keep_best": keep_best}}


def test_a_run_keeps_the_best_and_commits_with_the_newest_only(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 10}, learner=saving("reward_mean"))
    world.run()
    expected = means(world, 2)
    best = max(expected, key=lambda version: (expected[version], version))
    assert 0 < best < 10, "else this test could not fail"
    assert steps_of(world.run_dir.checkpoints) == [best, 10]
    assert read_best(world.run_dir.checkpoints).step == best
    assert [step for step, _ in world.broker.commits] == [1, 3, 5, 7, 9]


def test_a_killed_run_resumes_from_the_newest_and_ends_with_the_same_best(make_world: MakeWorld) -> None:

    world = make_world(run={"steps": 10}, learner=saving("reward_mean"))
    world.backend.fail_at = 9
    world.run_killed()
    best = read_best(world.run_dir.checkpoints).step
    assert best < 8
    again = world.restart()
    assert again.trainer.version == 8
    assert again.run() == "done"
    expected = means(again, 2)
    assert read_best(again.run_dir.checkpoints).step == max(expected, key=lambda v: (expected[v], v))
    assert again.restart().trainer.version == 10


def test_an_evaluation_that_ends_late_decides_when_its_line_is_written(make_world: MakeWorld, tmp_path: Path) -> None:
    evaluation = {"every": 2, "datasets": [DATASET]}
    keys = saving("evaluation/data-held-out/mean_reward")
    world = make_world(run={"steps": 8}, learner=keys, evaluation=evaluation)
    world.run()
    folder = world.run_dir.checkpoints
    assert (steps_of(folder), read_best(folder)) == ([2, 4, 6, 8], None)
    again = world.restart()
    files = again.lead.files
    files.open_metrics(8)
    for version, reward, kept in ((2, 0.4, [2, 4, 6, 8]), (4, 0.7, [4, 6, 8]), (8, 0.5, [4, 8])):
        files.record(evaluated(version, reward))
        assert (steps_of(folder), read_best(folder).step) == (kept, kept[0])


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (config_of("reward_men"), "'reward_mean'"),
        (config_of("-los"), "'-loss'"),
        (config_of("tokens_by_age"), "'tokens_trained'"),
        (config_of("-valdation_loss", kind=SftConfig), "'-validation_loss'"),
        (config_of("reward_mean", kind=SftConfig), "docs/metrics.md"),
        (config_of("evaluation/data-held-out/mean_reward"), "it needs evaluation.every"),
        (config_of("evaluation/data-held-uot/mean_reward", **evaluating()), "'evaluation/data-held-out/"),
        (config_of("evaluation/data-held-out/pass_at", **evaluating()), "'evaluation/data-held-out/"),
    ],
)
def test_an_unknown_metric_is_refused_with_the_nearest_name(config: Any, hint: str) -> None:
    with refused(ConfigError, config.learner.checkpoint.keep_best) as caught:
        config.validate("job.yaml", "broker")
    assert (caught.value.file, caught.value.key) == ("job.yaml", "learner.checkpoint.keep_best")
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    "config",
    [config_of("-grad_norm"), config_of("loss", kind=SftConfig),
     config_of("-validation_loss", kind=SftConfig, evaluation={"every": 2}),
     config_of("evaluation/data-held-out/pass_at/4", **evaluating())],
)  # fmt: skip
def test_a_metric_of_the_run_is_accepted(config: Any) -> None:
    config.validate("job.yaml", "broker")


@pytest.mark.parametrize(
    ("steps", "every", "checkpoints", "meet"),
    [
        (2, 15, 20, True),
        (50, 15, 20, False),
        (60, 15, 20, True),
        (45, 15, 20, True),
        (10, 15, 20, True),
        (61, 15, 20, True),
    ],
)
def test_an_evaluation_compares_versions_of_which_one_has_a_checkpoint(
    steps: int, every: int, checkpoints: int, meet: bool
) -> None:
    run = {"name": "best", "dir": "/run", "steps": steps}
    told = evaluating(every) | {"run": run, "weights": {"publish_every": 3}}
    config = config_of("evaluation/data-held-out/mean_reward", every=checkpoints, **told)
    assert list(problems(config, "broker")) == []
    found = [sentence for sentence in without_effect(config) if sentence.startswith("learner.checkpoint.keep_best")]
    assert len(found) == (0 if meet else 1)
    assert list(without_effect(config_of("reward_mean", every=checkpoints, **told))) == []


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (config_of("-validation_loss", kind=SftConfig), "evaluation.every"),
        (config_of("-value_loss"), "learner.critic"),
        (config_of("kl_mean"), "learner.loss.kl_coefficient"),
    ],
)
def test_a_metric_that_the_run_does_not_measure_is_told_and_not_refused(config: Any, needed: str) -> None:
    config.validate("job.yaml", "broker")
    assert [sentence.partition("which needs ")[2] for sentence in without_effect(config)] == [f"{needed}."]
