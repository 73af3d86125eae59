"""A real sweep of warm starts that is stopped, then killed, and continued to its end by the same command."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.metrics import SftMetrics
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from learner.loop.run_files import read_record
from tests.integration.learner.test_sft_resume import WarmStart
from tests.rigs import tiny_models
from tests.rigs.jobs import events
from tests.rigs.processes import Command, descendants, survivors, until

STEPS = 100  # enough to be met in the middle


def steps_of(run: RunDir) -> list[int]:
    return [line.step for line in read_tail(run.metrics, SftMetrics).lines]


def first_steps(run: RunDir) -> list[int]:
    """The step at which each start of the learner began."""
    return [event["detail"]["step"] for event in events(run.path) if event["kind"] == "learner_started"]


def test_a_sweep_that_was_stopped_and_then_killed_ends_with_every_run_done_once(tmp_path: Path) -> None:
    tiny_models.write_chat_model(tmp_path / "model", "tied")
    job = WarmStart(tmp_path / "job", tmp_path / "model", {"every": 20})
    folder = tmp_path / "sweep"
    words = [
        "sweep",
        str(job.config),
        "learner.optimizer.lr=1e-3,1e-4",
        f"run.steps={STEPS}",
        "model.verify=false",
        "--dir",
        str(folder),
    ]
    first, second = runs = [RunDir(folder / f"lr={lr}") for lr in ("0.001", "0.0001")]
    with Command(tmp_path, "stopped", *words) as command:
        until("four steps", lambda: len(steps_of(first)) >= 4, command)
        command.signal(signal.SIGINT)
        assert command.wait() == 0, command.output()
    record = read_record(first)
    assert record is not None and record.state == "drained" and not second.path.exists()
    with Command(tmp_path, "killed", *words) as command:
        until("a checkpoint of the second run", lambda: list(second.checkpoints.glob("step-*")), command)
        there: list[psutil.Process] = descendants(command.process.pid)
        command.signal(signal.SIGKILL)
        command.wait()
        assert survivors(there) == []
    assert first_steps(first) == [0, record.policy_version], "the first command's run continued"
    with Command(tmp_path, "whole", *words, "--json") as command:
        assert command.wait() == 0, command.output()
    assert [steps_of(run) for run in runs] == [list(range(STEPS))] * 2
    assert len(first_steps(first)) == 2, "a finished run is not started again"
    assert len(first_steps(second)) == 2 and first_steps(second)[1] > 0
    check_outcome(command, runs)


def check_outcome(command: Command, runs: list[RunDir]) -> None:
    told: dict[str, Any] = json.loads(command.output().splitlines()[-1])
    losses = [[line.loss for line in read_tail(run.metrics, SftMetrics).lines][-10:] for run in runs]
    means = [sum(values) / len(values) for values in losses]
    assert [arm["mean"] for arm in told["arms"]] == pytest.approx(means)
    assert means[0] < means[1]
    assert told["rule"] == {"metric": "loss", "better": "min", "last": 10}
    assert told["decision"] == {"verdict": "one_seed", "winner": "lr=0.001", "best": ["lr=0.001"]}
    page = Path(told["report"]).read_text()
    assert all(f"warm-{run.path.name}" in page for run in runs) and "learner.optimizer.lr" in page
