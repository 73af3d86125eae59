"""`slipstream convert` as a person runs it, killed at any moment, and jobs of the learner from what it made."""

import json
import signal
from pathlib import Path

import pytest

from common.config.converted import MANIFEST, WEIGHTS, read_converted
from common.errors import UsageError
from tests.rigs.jobs import Job, slipstream, warm
from tests.rigs.processes import SLIPSTREAM, Command, Process, descendants, survivors
from tests.rigs.refusals import refused
from tests.rigs.waiting import until


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "deep" / "model"
    said = slipstream("convert", str(model), str(folder))
    assert f"{folder} has 0.00 GiB of weights in float32" in said
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    return folder


def test_killed_with_9_it_leaves_a_whole_folder_or_none_and_the_same_command_goes_on(
    tmp_path: Path, model: Path
) -> None:
    target = tmp_path / "made"
    words = ["convert", str(model), str(target)]
    for moment in (".made.partial", f".made.partial/{WEIGHTS}/__0_0.distcp", "made"):
        if target.exists():  # the kill before came too late
            break
        with Command(tmp_path, "killed", *words) as command:
            until((tmp_path / moment).exists, every_s=0.0005)
            children = descendants(command.process.pid)
            command.signal(signal.SIGKILL)
            command.wait()
            assert survivors(children) == []
        if target.exists():
            read_converted(target)
        elif (left := tmp_path / ".made.partial").exists() and not (left / WEIGHTS / MANIFEST).exists():
            with refused(UsageError, left, MANIFEST):
                read_converted(left)
    if not target.exists():
        slipstream(*words)
        read_converted(target)
    assert not list(tmp_path.glob(".made*")), "what the kills left is gone"


def finished(folder: Path, model: Path, killed: bool) -> Job:
    """A run that has ended; with `killed` after kill -9 behind a checkpoint."""
    job = Job(folder, model)
    with job.served():
        if killed:
            job.start()
            job.until(lambda: any(job.run.checkpoints.glob("step-*")), every_s=0.0005)
            job.kill()
        job.finish()
    job.assert_every_step_once()
    return job


def test_a_run_from_it_killed_and_resumed_ends_with_bitwise_the_weights_of_one_from_safetensors(
    tmp_path: Path, model: Path, converted: Path
) -> None:
    plain = finished(tmp_path / "plain", model, killed=False)
    other = finished(tmp_path / "other", converted, killed=True)
    assert other.weights() == plain.weights()
    exported = tmp_path / "exported"
    warm("export", str(other.run.path), str(exported), "--step", "6")
    for folder in (other.run.model, exported):
        assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}


def test_an_evaluation_of_it_names_the_folder_that_it_is_made_of(tmp_path: Path, model: Path, converted: Path) -> None:
    job = Job(tmp_path / "job", model)
    document = json.dumps({"datasets": [str(job.folder / "tasks.jsonl")]})
    words = ["eval", str(job.config), "--model", str(converted), f"evaluation={document}"]
    with Process(tmp_path / "eval.log", [*SLIPSTREAM, *words]) as process:
        assert process.wait() == 2
        assert str(model) in process.output()
