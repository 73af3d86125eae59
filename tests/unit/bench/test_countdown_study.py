"""The study of Countdown: which runs it makes, where a stopped one continues, and what a row says."""

import argparse
from pathlib import Path
from typing import Any

import correction_study
import countdown_study
import harness
import pytest
import trl_comparison
from countdown_study import PANELS, START, TRL, WAYS, cell_name, measure_all, order, rows_of

OPTIONS = {"seeds": [1, 2], "overrides": ["run.steps=2"], "workers": 1, "budget_s": 1e6, "trl_python": "py", "also": []}


def run(reward: float) -> dict[str, Any]:
    rewards = [0.1] * 5 + [reward] * 10
    times_s = [float(step) for step in range(1, 16)]
    return {"rewards": rewards, "times_s": times_s, "held_out": reward, "samples_per_step": 128}


def test_the_start_is_measured_once_and_each_seed_s_ways_before_the_next_seed_s() -> None:
    cells = order([1, 2])
    assert cells[0] == (START, 1) and len(cells) == len(set(cells)) == 1 + 2 * (len(WAYS) + 1)
    assert [seed for _, seed in cells] == sorted(seed for _, seed in cells)
    shown = [way for ways in PANELS.values() for way in ways]
    assert sorted(shown) == sorted({way for way, _ in cells} - {START})
    assert {(way.lag, way.correction, way.updates) for way in WAYS.values()} == {
        (0, "tis", 1), (4, "tis", 1), (4, "none", 1), (4, "tis", 2), (16, "tis", 1), (16, "none", 1), (16, "ppo", 1),
    }  # fmt: skip


def test_a_row_has_one_value_a_seed_and_the_way_s_settings() -> None:
    found = {cell_name(way, seed): run(0.5 + 0.1 * seed) | {"commit": "a1"} for way, seed in order([1, 2])[1:]}
    found[cell_name(START, 1)] = {"held_out": 0.25}
    rows = {row["way"]: row for row in rows_of(found, [1, 2])}
    assert [*rows] == [*WAYS, TRL]
    two = rows["4-two-updates"]
    assert (two["lag"], two["correction"], two["updates"], two["system"]) == (4, "tis", 2, "Slipstream")
    assert (two["reward_first"], two["reward_last"], two["held_out_start"]) == ([0.1, 0.1], [0.6, 0.7], 0.25)
    assert (two["held_out"], two["held_out_mean"], two["samples"], two["seconds"]) == (
        [0.6, 0.7], 0.65, [1920, 1920], [15.0, 15.0],
    )  # fmt: skip
    assert (rows[TRL]["lag"], rows[TRL]["updates"], rows[TRL]["system"]) == (0, 1, "TRL with vLLM")


def test_a_stopped_study_continues_and_trl_gets_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = harness.commit()
    made: list[Any] = []
    asked: list[dict[str, Any]] = []
    most = [4]

    def apart(work: Any, words: list[str], *more: Any, **environment: str) -> Any:
        if len(made) == most[0]:
            raise KeyboardInterrupt
        made.append((work, *words, *more))
        return 0.5 if work is correction_study.held_out else run(0.5)

    def ask_trl(words: dict[str, Any], options: Any, **environment: str) -> dict[str, Any]:
        assert str(countdown_study.EXAMPLE) in environment["PYTHONPATH"]
        asked.append(words)
        return {"curve": [{"reward_mean": 0.5, "time_s": 1.0}, {"reward_mean": 0.6, "time_s": 2.0}]}

    monkeypatch.setattr(countdown_study, "MADE", tmp_path)
    monkeypatch.setattr(harness, "apart", apart)
    monkeypatch.setattr(trl_comparison, "ask_trl", ask_trl)
    with pytest.raises(KeyboardInterrupt):
        measure_all(argparse.Namespace(**OPTIONS))
    stopped = made.copy()
    most[0] = 100
    assert len(measure_all(argparse.Namespace(**OPTIONS))) == 17
    assert len(set(made)) == len(made) == 17 and made[:4] == stopped
    lags = [one[-2] for one in made if one[0] is correction_study.trained]
    assert sorted(lags) == [0, 0, 4, 4, 4, 4, 4, 4, 16, 16, 16, 16, 16, 16]
    assert {one["seed"] for one in asked} == {1, 2}
    assert {(one["steps"], one["prompts"], one["group-size"], one["way"]) for one in asked} == {(2, 16, 8, "colocate")}
    made.clear()
    other = argparse.Namespace(**OPTIONS | {"overrides": [], "budget_s": -1.0})
    with pytest.raises(SystemExit, match=cell_name("16", 2)):
        measure_all(other)
    assert made == [], "runs of other arguments are not taken, and none fits into the budget"
    assert harness.Cells(tmp_path / "cells").expected_s(cell_name("0", 1)) < harness.UNKNOWN_CELL_S
    monkeypatch.setattr(harness, "commit", lambda: "b2")
    later = OPTIONS | {"budget_s": -1.0}
    with pytest.raises(SystemExit, match=cell_name("16", 2)):
        measure_all(argparse.Namespace(**later))
    of_before = measure_all(argparse.Namespace(**later | {"also": ["0" * 8, commit]}))
    assert {figures["commit"] for figures in of_before.values()} == {commit}
