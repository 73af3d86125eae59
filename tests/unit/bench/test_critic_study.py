"""The study of PPO and GRPO: what differs between ways, where a stopped one continues, and what a row says."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import critic_study
import harness
import msgspec
import pytest
from critic_study import CONFIG, WAYS, measure_all, order, overrides, row

from common.config.loading import load_config
from common.config.schema import Config

OPTIONS = {"ways": ["grpo", "token"], "seeds": [1, 2], "overrides": [], "budget_s": 1e6}


def figures(found: list[float]) -> dict[str, Any]:
    times_s = [2.0 * step for step in range(1, len(found) + 1)]
    return {"found": found, "rewards": found, "times_s": times_s, "samples_per_step": 128}


def test_ways_differ_in_their_advantages_alone() -> None:
    words = ["run.steps=9", "learner.critic.warmup_steps=1"]
    jobs = {way: load_config(harness.ROOT / CONFIG, overrides(way, 3, words), Config) for way in WAYS}
    known = {
        way: (job.learner.critic and job.learner.critic.level, job.learner.loss.advantage) for way, job in jobs.items()
    }
    assert known == {"grpo": (None, "grpo"), "token": ("token", "gae"), "turn": ("turn", "gae")}

    def rest(job: Config) -> dict[str, Any]:
        found = msgspec.to_builtins(job)
        found["learner"]["critic"] = found["learner"]["loss"]["advantage"] = None
        return found

    assert rest(jobs["grpo"]) == rest(jobs["token"]) == rest(jobs["turn"])
    assert (jobs["grpo"].run.seed, jobs["grpo"].run.steps) == (3, 9)
    assert not jobs["grpo"].learner.dynamic_sampling, "groups that it drops would be samples that the others train on"


def test_every_seed_begins_with_another_way() -> None:
    names = ["grpo-1", "token-1", "turn-1", "token-2", "turn-2", "grpo-2"]
    assert [*order([*WAYS], [1, 2])] == names


def test_a_row_has_the_steps_seconds_and_samples_to_the_level_of_every_seed() -> None:
    found = row("token", [figures([1.0] * 3), figures([0.0] + [1.0] * 20)])
    assert (found["steps_each"], found["seconds_each"], found["samples_each"]) == ([1, 9], [2.0, 18.0], [128, 1152])
    assert (found["samples"], found["found_first_5"], found["found_last_10"]) == (640, [1.0, 0.8], [1.0, 1.0])
    never = row("grpo", [figures([1.0]), figures([0.0])])
    assert (never["steps_each"], never["steps"]) == ([1, None], None)


def test_a_stopped_study_continues_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    most = [3]

    def measured(way: str, seed: int, words: Sequence[str]) -> dict[str, Any]:
        if len(made) == most[0]:
            raise KeyboardInterrupt
        made.append((way, seed))
        return figures([1.0])

    monkeypatch.setattr(critic_study, "CELLS", tmp_path)
    monkeypatch.setattr(critic_study, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        measure_all(argparse.Namespace(**OPTIONS))
    stopped = made.copy()
    made.clear()
    assert [*measure_all(argparse.Namespace(**OPTIONS))] == ["grpo-1", "token-1", "token-2", "grpo-2"]
    assert (len(stopped), made) == (3, [("grpo", 2)])
    with pytest.raises(SystemExit, match="grpo-1"):
        measure_all(argparse.Namespace(**OPTIONS | {"overrides": ["run.steps=2"], "budget_s": 0.0}))
    assert len(made) == 1, "runs of other arguments are not taken, and none fits into the budget"
