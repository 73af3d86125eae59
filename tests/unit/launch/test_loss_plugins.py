"""Parts of the loss by import path before a launch: `up`, `plan` and `doctor` refuse a wrong one with its numbers."""

import sys
from pathlib import Path

import pytest

from common.errors import EXIT_DONE, ConfigError
from launch.checks import job
from launch.checks.review import make_review, review
from launch.cli import main
from launch.resolve_target import load_job
from learner.loss import plugins
from tests.rigs.configs import HEAVY, imported_by, job_of, refusal, write_job

PARTS = """
from learner.loss.types import Surrogate, bounded_exp

def mean(tokens, config):
    ratio = bounded_exp(tokens.logprobs - tokens.proximal_logprobs)
    values = ratio * tokens.advantages
    return Surrogate(values / tokens.documents.mask.sum(), values > 9)

def fine(tokens, config, *, scale=1.0):
    ratio = bounded_exp(tokens.logprobs - tokens.proximal_logprobs)
    return Surrogate(scale * ratio * tokens.advantages, ratio > 9)
"""
KEY = "learner.loss.objective"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "parts_here.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.slow
def test_a_launch_refuses_a_wrong_normaliser_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "up", str(write_job(folder)), f"{KEY}=parts_here:mean")
    assert KEY in said and "one microbatch has the loss" in said
    assert not (folder / "run").exists()
    with pytest.raises(ConfigError) as caught:
        load_job(str(folder / "job.yaml"), ["learner.loss.advantage=parts_here:absent"])
    assert caught.value.key == "learner.loss.advantage"


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`slipstream broker` ends where it would begin to serve."""
    monkeypatch.setattr("broker.main.run_broker", lambda *_: EXIT_DONE)
    monkeypatch.setattr("launch.up.roles.setup_logging", lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("no_broker")
def test_a_broker_refuses_a_wrong_part_before_nodes_can_join(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(write_job(folder))
    said = refusal(capsys, "broker", job, f"{KEY}=parts_here:mean")
    assert KEY in said and "one microbatch has the loss" in said
    assert not (folder / "run").exists()
    assert main(["broker", job, f"{KEY}=parts_here:fine"]) == EXIT_DONE


@pytest.mark.slow
@pytest.mark.usefixtures("no_broker")
def test_a_broker_leaves_a_part_to_the_learner_if_it_cannot_import_it_or_the_run_has_begun(folder: Path) -> None:
    job = str(write_job(folder))
    (folder / "parts_half.py").write_text("import megatron_of_the_learner")
    for number, module in enumerate(("parts_elsewhere", "parts_half", "parts_here.sub")):
        assert main(["broker", job, f"{KEY}={module}:fine", f"run.dir={folder / str(number)}"]) == EXIT_DONE
    (folder / "run" / "store").mkdir(parents=True)  # a broker has ended there
    assert main(["broker", job, f"{KEY}=parts_here:absent"]) == EXIT_DONE
    own = folder / "new" / "run" / "config.yaml"  # as `up` starts it, which has checked the job
    own.parent.mkdir(parents=True)
    (own.parent / "run.json").touch()
    write_job(folder / "new", learner={"loss": {"objective": "parts_here:absent"}}).rename(own)
    assert main(["broker", str(own)]) == EXIT_DONE


@pytest.mark.slow
def test_plan_and_doctor_say_what_is_wrong_with_a_part_and_that_another_is_fine(folder: Path) -> None:
    file = str(write_job(folder))
    (failed,) = make_review(file, [f"{KEY}=parts_here:mean"]).failed
    assert KEY in failed and "one microbatch has the loss" in failed
    words = {"objective": "parts_here:mean"}, {"objective": "parts_here:fine", "objective_options": {"scale": 2.0}}
    wrong, good = (review(job_of(folder, learner={"loss": loss}), "job.yaml") for loss in words)
    assert [problem.key for problem in wrong.refused] == [KEY]
    assert list(job.check_parts(wrong)) == []
    assert good.refused == []
    (finding,) = job.check_parts(good)
    assert (finding.level, finding.check) == ("fine", "loss") and "parts_here:fine" in finding.what


def test_without_torch_a_part_is_left_to_the_learner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "can_check", lambda: False)
    monkeypatch.setattr(job, "can_check", lambda: False)
    made = review(job_of(folder, learner={"loss": {"objective": "parts_here:mean"}}), "job.yaml")
    assert made.refused == []
    assert [remark.code for remark in made.remarks if remark.check == "loss"] == ["unchecked"]
    (finding,) = job.check_parts(made)
    assert (finding.level, finding.code) == ("warning", "unchecked") and KEY in finding.what


def test_a_job_without_parts_of_its_own_starts_no_check_and_the_check_needs_no_torch_here(folder: Path) -> None:
    assert plugins.ask(job_of(folder)) == []
    assert not HEAVY & imported_by("import learner.loss.plugins, launch.resolve_target")
