"""The study of several updates: what is measured, where a stopped one continues, and what a row says."""

import argparse
from pathlib import Path
from typing import Any

import correction_study
import harness
import pytest
import updates_study
from updates_study import cell_name, measure_all, order, overrides, row, shape

OPTIONS = {"ways": ["1", "1x2"], "lags": [0, 2], "seeds": [1, 2], "overrides": [], "workers": 1, "budget_s": 1e6}


def figures(rewards: list[float]) -> dict[str, Any]:
    times_s = [2.0 * step for step in range(1, len(rewards) + 1)]
    means = {"clipped": 0.1, "batch_kl": 0.01, "samples_per_step": 128, "held_out": 0.9}
    return {"rewards": rewards, "times_s": times_s, **means}


def test_minibatches_alone_are_measured_without_clipping_too() -> None:
    assert [(way, clip) for way, clip, *_ in order(["1", "1x2", "2x1"], [0], [1])] == [
        ("1", True), ("1x2", True), ("1x2", False), ("2x1", True),
    ]  # fmt: skip
    assert [shape(way)[0] * shape(way)[1] for way in updates_study.WAYS] == [1, 2, 4, 2, 4]
    assert overrides("2x1", False, 3)[:3] == ["run.seed=3", "learner.epochs=2", "learner.minibatches=1"]
    assert len(overrides("2x1", False, 3)) == len(overrides("2x1", True, 3)) + 2


def test_a_row_has_the_steps_seconds_and_samples_to_the_level_of_every_seed() -> None:
    found = row("2x1", True, 2, [figures([1.0] * 3), figures([0.0] + [1.0] * 20)])
    assert (found["updates"], found["steps_each"], found["seconds_each"]) == (2, [1, 12], [2.0, 24.0])
    assert (found["samples_each"], found["samples"]) == ([128, 1536], 832)
    never = row("2x1", True, 2, [figures([1.0]), figures([0.0])])
    assert (never["steps_each"], never["steps"]) == ([1, None], None)


def test_a_stopped_study_continues_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    most = [5]

    def trained(work: Any, words: list[str], lag: int, **environment: str) -> dict[str, Any]:
        assert work is correction_study.trained
        if len(made) == most[0]:
            raise KeyboardInterrupt
        made.append((*words, lag))
        return figures([1.0])

    monkeypatch.setattr(updates_study, "CELLS", tmp_path)
    monkeypatch.setattr(harness, "apart", trained)
    with pytest.raises(KeyboardInterrupt):
        measure_all(argparse.Namespace(**OPTIONS))
    assert len(set(made)) == 5
    stopped = made.copy()
    made.clear()
    most[0] = 12
    assert len(measure_all(argparse.Namespace(**OPTIONS))) == 12
    assert len(made) == 7 and not set(made) & set(stopped)
    made.clear()
    other = argparse.Namespace(**OPTIONS | {"overrides": ["run.steps=2"], "budget_s": 0.0})
    with pytest.raises(SystemExit, match=cell_name("1", True, 0, 1)):
        measure_all(other)
    assert made == [], "runs of other arguments are not taken, and none fits into the budget"
    assert harness.Cells(tmp_path).expected_s(cell_name("1", True, 0, 1)) < harness.UNKNOWN_CELL_S
