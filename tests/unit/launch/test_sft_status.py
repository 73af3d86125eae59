"""status and report of a warm start, which has no broker to ask."""

import json
import os

import msgspec
import pytest

from common.config.schema import ModelConfig, RunConfig, SftConfig, SftTasksConfig
from common.process.run_dir import RunDir, write_json
from launch.cli import main
from launch.sinks.process import over
from launch.web.run_view import RunView
from learner.loop.run_files import read_record, write_record
from tests.rigs.configs import json_of

STEPS = 20
PLOTS = ("over_steps", "over_samples", "over_tokens", "over_seconds")


@pytest.fixture
def config(tmp_path) -> SftConfig:
    run = RunConfig(name="warm", dir=str(tmp_path / "run"), steps=STEPS)
    return SftConfig(run=run, model=ModelConfig(path="m"), tasks=SftTasksConfig(dataset="rows"))


def train(run: RunDir, steps: int) -> None:
    """The lines that a learner leaves."""
    with run.metrics.open("w") as file:
        for step in range(steps):
            line = {"step": step, "time_s": 2.0 * step, "loss": 2.0 - step / STEPS, "grad_norm": 1.0, "lr": 1e-3}
            file.write(json.dumps(line | {"tokens_trained": 50, "sequence_tokens": 80, "step_s": 2.0}) + "\n")


def test_a_running_warm_start_says_how_far_it_is_and_is_told_from_one_that_was_killed(run, capsys, monkeypatch):
    train(run, 7)
    write_record(run, 0, "running", 0)
    found = json_of(capsys, "status", str(run.path))
    assert (found["kind"], found["live"], found["steps"], found["model"]) == ("sft", True, STEPS, False)
    assert found["learner"]["pid"] == os.getpid()
    assert (found["learner"]["state"], found["learner"]["policy_version"]) == ("training", 7)
    assert (found["loss"], found["tokens_trained"]) == (pytest.approx(1.7), 350)
    assert main(["status", str(run.path)]) == 0
    assert "warm start: training, step 7 of 20, loss 1.7000" in capsys.readouterr().out
    monkeypatch.setattr("learner.loop.run_files.alive", lambda pid, birth, space: False)
    assert json_of(capsys, "status", str(run.path))["learner"]["state"] == "gone"
    assert main(["status", str(run.path)]) == 0
    assert "gone, step 7 of 20" in (out := capsys.readouterr().out)
    assert "the same command continues" in out


def test_one_of_another_machine_or_container_runs_as_far_as_is_known(run, capsys):
    """Its process is not seen here, so it is not called gone, and trackers are fed on."""
    train(run, 7)
    write_record(run, 0, "running", 0)
    here = read_record(run)
    boot, _ = here.space.split()
    for host, space in (("node-7", "another-boot 1"), (here.host, f"{boot} 1")):
        write_json(run.learner_json, msgspec.structs.replace(here, pid=2147483000, host=host, space=space))
        assert main(["status", str(run.path)]) == 0
        assert f"training on {host}, as far as is known, step 7 of 20" in capsys.readouterr().out
        assert json_of(capsys, "status", str(run.path))["elsewhere"] == host
        assert not over(run) and RunView(run)._phase(None) == "running"


@pytest.mark.parametrize(("state", "version"), [("drained", 7), ("done", STEPS)])
def test_one_that_never_began_is_absent_and_one_that_ended_says_how(run, capsys, state, version):
    found = json_of(capsys, "status", str(run.path))
    assert (found["learner"]["state"], found["loss"]) == ("absent", None)
    train(run, version)
    write_record(run, 0, state, version)
    found = json_of(capsys, "status", str(run.path))
    assert (found["live"], found["learner"]["state"], found["learner"]["policy_version"]) == (False, state, version)
    run.model.mkdir()
    (run.model / "config.json").touch()
    assert main(["status", str(run.path)]) == 0
    assert f"; the model is in {run.model}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_report_has_losses_and_tokens(run):
    train(run, STEPS)
    assert main(["report", str(run.path)]) == 0
    summary = json.loads((run.report / "summary.json").read_text())
    assert summary["run"] == {"name": "warm", "steps": STEPS, "seconds": 40.0}
    assert summary["loss"]["first_5_steps"] == pytest.approx(1.9)
    assert summary["loss"]["lowest"] == pytest.approx(1.05)
    assert summary["tokens"] == {"trained": 1000.0, "processed": 1600.0, "trained_per_s": 25.0}
    assert {path.name for path in run.report.glob("*.png")} == {f"{name}.png" for name in PLOTS}
