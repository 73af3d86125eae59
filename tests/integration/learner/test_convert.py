"""`slipstream convert` as a person runs it, killed at any moment, and jobs of the learner from what it made."""

import json
import signal
from pathlib import Path

import pytest

from common.config.converted import MANIFEST, WEIGHTS, read_converted
from common.errors import UsageError
from tests.rigs.jobs import Job, slipstream
from tests.rigs.processes import SLIPSTREAM, Process
from tests.rigs.refusals import refused
from tests.rigs.waiting import until


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "deep" / "model"
    said = slipstream("convert", str(model), str(folder))
    assert f"{folder} has 0.00 GiB of weights in float32" in said
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    return folder


@pytest.mark.parametrize("moment", [".made.partial", f".made.partial/{WEIGHTS}/__0_0.distcp", "made"])
def test_killed_with_9_it_leaves_a_whole_folder_or_none_and_the_same_command_works(
    tmp_path: Path, model: Path, moment: str
) -> None:
    target = tmp_path / "made"
    words = [*SLIPSTREAM, "convert", str(model), str(target)]
    with Process(tmp_path / "killed.log", words) as process:
        until((tmp_path / moment).exists, check=lambda: None, every_s=0.0005)
        process.signal(signal.SIGKILL)
        process.wait()
        until(lambda: b"convert_main" not in b"".join(_commands_of(target)), every_s=0.05)
    if target.exists():
        read_converted(target)
    elif (left := tmp_path / ".made.partial").exists() and not (left / WEIGHTS / MANIFEST).exists():
        with refused(UsageError, left, MANIFEST):
            read_converted(left)
    if not target.exists():
        slipstream(*words[len(SLIPSTREAM) :])
        read_converted(target)
        assert not list(tmp_path.glob(".made*")), "what the kill left is gone"


def _commands_of(target: Path) -> list[bytes]:
    """Command lines of the processes that write to `target`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes())
        except OSError:  # it has ended
            continue
    return [line for line in found if str(target).encode() in line]


def test_a_run_from_it_killed_and_resumed_ends_with_bitwise_the_weights_of_one_from_safetensors(
    tmp_path: Path, model: Path, converted: Path
) -> None:
    ends = []
    for name, folder in (("plain", model), ("converted", converted)):
        job = Job(tmp_path / name, folder)
        with job.served():
            if name == "converted":
                job.start()
                job.until(lambda: any(job.run.checkpoints.glob("step-*")), every_s=0.0005)
                job.kill()
            job.finish()
        job.assert_every_step_once()
        ends.append(job.weights())
        companions = {file.name for file in model.iterdir()}
        assert {file.name for file in job.run.model.iterdir()} == companions
    assert ends[0] == ends[1]
    exported = tmp_path / "exported"
    slipstream("export", str(job.run.path), str(exported), "--step", "6")
    assert {file.name for file in exported.iterdir()} == companions


def test_an_evaluation_of_it_names_the_folder_that_it_is_made_of(tmp_path: Path, model: Path, converted: Path) -> None:
    job = Job(tmp_path / "job", model)
    document = json.dumps({"datasets": [str(job.folder / "tasks.jsonl")]})
    words = ["eval", str(job.config), "--model", str(converted), f"evaluation={document}"]
    with Process(tmp_path / "eval.log", [*SLIPSTREAM, *words]) as process:
        assert process.wait() == 2
        assert str(model) in process.output()
