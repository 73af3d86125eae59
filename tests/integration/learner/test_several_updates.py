"""Real learners with several updates per batch: killed within one, on two ranks, replayed, and resumed differently."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import EXIT_USAGE
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from tests.rigs.configs import run_cli
from tests.rigs.device import CUDA
from tests.rigs.jobs import GROUPS, STEPS, Job, assert_delivered_once, warm, weights_of

UPDATES = 12  # in a step
LEARNER: dict[str, Any] = {"epochs": 3, "minibatches": GROUPS, "loss": {"clip_low": 0.05, "clip_high": 0.05}}
KEPT = {"every": 3, "keep": 9, "asynchronous": False}
DONE = re.compile(r"step (\d+): (\d+) of (\d+) updates are done")


def make_job(folder: Path, model: Path, **learner: Any) -> Job:
    job = Job(folder, model, LEARNER | learner, KEPT)
    with job.config.open("a") as config:
        config.write("telemetry: {log_level: debug}\n")
    return job


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Job:
    job = make_job(tmp_path_factory.mktemp("unbroken") / "job", model)
    with job.served() as client:
        job.finish()
        assert_delivered_once(client.ledger())
    assert [line.updates for line in job.lines()] == [UPDATES] * STEPS
    assert sum(line.objective_clip_fraction for line in job.lines()) > 0
    return job


def done(job: Job) -> tuple[int, int]:
    """(step, updates of it) that the newest learner's log tells last; (-1, 0) while it tells none."""
    log = job.run.logs / "learner-0.log"
    found = DONE.findall(log.read_text()) if log.exists() else []
    return (int(found[-1][0]), int(found[-1][1])) if found else (-1, 0)


def test_killed_with_9_between_two_updates_of_a_batch_it_ends_bitwise_as_if_it_was_not(
    tmp_path: Path, model: Path, unbroken: Job
) -> None:
    job = make_job(tmp_path / "job", model)
    with job.served() as client:
        for step, update in ((1, 2), (4, 7), (6, 1)):
            job.start()
            job.until(lambda wanted=(step, update): done(job) >= wanted, every_s=0.001)
            job.kill()
            killed = done(job)
            assert killed[0] == step and 0 < killed[1] < UPDATES, "the log tells that it was within the batch"
            assert len(job.lines()) == step, "the step has no line"
        job.finish()
        assert_delivered_once(client.ledger())
        assert client.status().learner.incarnation == 3
    job.assert_every_step_once()
    assert job.lines()[-1].tokens_trained_total == unbroken.lines()[-1].tokens_trained_total
    assert CUDA or job.weights() == unbroken.weights(), "on CUDA kernels add in any order"


def test_two_ranks_train_as_one_does(tmp_path: Path, model: Path, unbroken: Job) -> None:
    job = make_job(tmp_path / "job", model, world_size=2)
    with job.served() as client:
        job.finish(ranks=2)
        assert_delivered_once(client.ledger())
    job.assert_every_step_once()
    for found, expected in zip(job.lines(), unbroken.lines(), strict=True):
        for name in ("updates", "tokens_trained", "tokens_by_age", "update_age_max"):
            assert getattr(found, name) == getattr(expected, name), name
        for name in ("loss", "grad_norm", "grad_norm_max", "update_age_mean", "ratio_mean", "mismatch_abs_mean"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-2, abs=1e-4), name


def test_a_replay_repeats_the_updates_and_shows_what_one_epoch_would_have_done(tmp_path: Path, unbroken: Job) -> None:
    def replayed(out: str, *words: str) -> tuple[str, list[Any]]:
        said = warm("replay", str(unbroken.run.path), "--out", str(tmp_path / out), *words)
        return said, read_tail(RunDir(tmp_path / out).metrics, StepMetrics).lines

    said, lines = replayed("same", "--from", "3")
    assert "all 5 " in said and weights_of(RunDir(tmp_path / "same")) == unbroken.weights()
    assert [line.updates for line in lines] == [UPDATES] * 5
    _, lines = replayed("other", "--to", "1", "learner.epochs=1")
    assert [line.updates for line in lines] == [GROUPS] * 2


@pytest.mark.parametrize(("key", "value"), [("epochs", 2), ("minibatches", 2)])
def test_a_run_that_is_resumed_with_other_updates_is_refused_with_the_reason(
    tmp_path: Path, model: Path, unbroken: Job, key: str, value: int
) -> None:
    document = yaml.safe_load(unbroken.config.read_text())
    document["learner"][key] = value
    document["run"]["steps"] = STEPS + 1
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(document))
    told = run_cli("learner", str(other))
    assert told.returncode == EXIT_USAGE, told.stderr[-3000:]
    assert f"learner.{key} was {LEARNER[key]} and now is {value}" in told.stderr
    assert len(unbroken.lines()) == STEPS
