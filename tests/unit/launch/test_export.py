"""Which model `slipstream export` takes, and what it refuses."""

import argparse
from pathlib import Path

import pytest

from common.errors import SlipstreamError, UsageError
from common.process.run_dir import RunDir
from launch.results import export
from tests.checkpoint_files import write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "run")
    for step in (20, 1000000, 40):
        write_checkpoint(folder, step)
    (folder.checkpoints / ".step-000060.tmp").mkdir()
    folder.config.write_text("")
    return folder


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def convert(run: RunDir, checkpoint: Path, target: Path) -> int:
        seen.append(checkpoint.name)
        return 0

    monkeypatch.setattr(export, "convert", convert)
    return seen


def arguments(run: RunDir, target: Path, step: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(run=str(run.path), dir=str(target), step=step)


def finish(run: RunDir) -> None:
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")


def test_a_finished_run_gives_its_final_model(run: RunDir, tmp_path: Path, converted: list[str]) -> None:
    finish(run)
    assert export.command(arguments(run, tmp_path / "out")) == 0
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert converted == []


def test_without_a_final_model_the_newest_complete_checkpoint_is_taken(
    run: RunDir, tmp_path: Path, converted: list[str]
) -> None:
    assert export.command(arguments(run, tmp_path / "out")) == 0
    assert converted == ["step-1000000"]


def test_a_step_is_taken_from_its_checkpoint_also_when_the_run_is_done(
    run: RunDir, tmp_path: Path, converted: list[str]
) -> None:
    finish(run)
    export.command(arguments(run, tmp_path / "out", step=40))
    assert converted == ["step-000040"]


def test_a_torn_checkpoint_is_refused(run: RunDir, tmp_path: Path, converted: list[str]) -> None:
    (run.checkpoints / "step-000040" / "model" / "weights").unlink()
    with pytest.raises(SlipstreamError, match=r"step-000040 is not complete: .*No such file .*weights"):
        export.command(arguments(run, tmp_path / "out", step=40))
    assert converted == []


def test_a_step_without_checkpoint_is_refused_with_those_that_have_one(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint of step 60; it has 20, 40, 1000000"):
        export.command(arguments(run, tmp_path / "out", step=60))


def test_a_run_without_anything_says_when_there_will_be_something(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("")
    with pytest.raises(UsageError, match=r"no model and no checkpoint yet; .* learner\.checkpoint\.every"):
        export.command(arguments(run, tmp_path / "out"))


def test_a_folder_with_something_in_it_is_not_overwritten(run: RunDir, tmp_path: Path, converted: list[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        export.command(arguments(run, tmp_path / "out"))
    assert converted == []
