"""telemetry.profile_steps on a real torch model: exactly these steps are recorded, and no failure stops a run."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rigs.waiting import read_jsonl
from tests.unit.learner.loop_fakes import MakeWorld, World


def recorded(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def absences(world: World) -> list[dict[str, Any]]:
    told = read_jsonl(world.trainer.run_dir.events)
    return [event["detail"] for event in told if event["kind"] == "profile_nodes_absent"]


@pytest.mark.slow
def test_the_trace_of_a_chosen_step_has_the_operations_of_this_step(make_world: MakeWorld) -> None:
    chosen = {"profile_steps": [1, 3], "profile_nodes": ["fake", "elsewhere"]}
    world = make_world(run={"steps": 5}, telemetry=chosen)
    assert world.run() == "done"
    folder = world.trainer.run_dir.profiles
    assert sorted(path.name for path in folder.iterdir()) == [f"learner-0-step-{n}.json.gz" for n in (1, 3)]
    for step in (1, 3):
        names = [event.get("name") for event in recorded(folder / f"learner-0-step-{step}.json.gz")]
        assert [name for name in names if name in [f"step {n}" for n in range(5)]] == [f"step {step}"]
        assert "aten::_log_softmax" in names and "aten::_log_softmax_backward_data" in names
    assert absences(world) == [{"step": n, "nodes": "elsewhere"} for n in (1, 3)]
    plain = make_world(run={"steps": 5, "dir": f"{world.trainer.run_dir.path}-plain"})
    assert plain.run() == "done"
    np.testing.assert_array_equal(world.final_table(), plain.final_table())


def test_with_cuda_a_chosen_step_leaves_a_snapshot_of_the_memory_and_the_history_ends_with_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", max_entries=0: calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    world = make_world(run={"steps": 3}, telemetry={"profile_steps": [1]})
    assert world.run() == "done"
    assert calls == ["all", f"{world.trainer.run_dir.profiles}/learner-0-step-1-memory.pickle", None]


@pytest.mark.parametrize("telemetry", [{}, {"profile_steps": [1], "profile_ranks": [], "profile_nodes": []}])
def test_nothing_is_recorded_on_ranks_that_are_not_chosen(make_world: MakeWorld, telemetry: dict[str, Any]) -> None:
    world = make_world(run={"steps": 3}, telemetry=telemetry)
    assert world.run() == "done"
    assert not world.trainer.run_dir.profiles.exists()
    assert absences(world) == []


def test_a_profiler_that_fails_is_logged_once_and_the_run_goes_on(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(run={"steps": 4}, telemetry={"profile_steps": [0, 1, 2]})
    world.trainer.run_dir.profiles.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "learner.loop.trainer"):
        assert world.run() == "done"
    assert len([record for record in caplog.records if record.name == "learner.loop.trainer"]) == 1
    assert len(world.lines()) == 4


def test_a_trace_that_cannot_be_written_does_not_stop_the_run(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(run={"steps": 4}, telemetry={"profile_steps": [1, 2]})
    folder = world.trainer.run_dir.profiles / "learner-0-step-1.json.gz"
    folder.mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "learner.loop.trainer"):
        assert world.run() == "done"
    assert len([record for record in caplog.records if record.name == "learner.loop.trainer"]) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
