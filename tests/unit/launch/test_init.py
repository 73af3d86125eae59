"""`slipstream init DIR`: the files of the example, what its rewards say, and the folders that it refuses."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config.checks import problems, resolve_paths
from common.config.loading import load_config
from common.errors import EXIT_DONE
from launch.cli import main
from launch.quickstart import init
from launch.resolve_target import load_job
from tests.rigs.configs import model_folder, refusal

MOST_LINES = 30


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder, with a model that only the checks see; the working folder is that one."""
    monkeypatch.setattr(init, "build_model", lambda shape, seed, folder: model_folder(folder))
    assert main(["init", str(tmp_path / "new" / "first")]) == EXIT_DONE
    monkeypatch.chdir(tmp_path / "new" / "first")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    return tmp_path / "new" / "first"


def test_the_example_is_complete_short_and_passes_the_checks_of_a_launch(example: Path) -> None:
    assert {path.name for path in example.iterdir()} == {"config.yaml", "data.jsonl", "rewards.py", "model"}
    assert [path.name for path in example.parent.iterdir()] == ["first"], "nothing is left beside it"
    assert len((example / "config.yaml").read_text().splitlines()) <= MOST_LINES
    config = load_config(Path("config.yaml"))
    assert list(problems(resolve_paths(config))) == []
    load_job("config.yaml", environment=True)
    rows = [json.loads(line) for line in (example / "data.jsonl").read_text().splitlines()]
    assert len(rows) >= config.learner.groups_per_step


def test_its_reward_is_the_share_of_characters_of_the_row_s_kind(example: Path) -> None:
    right_kind = SimpleNamespace(**runpy.run_path(str(example / "rewards.py"))).right_kind
    found = [
        right_kind(text, {"kind": kind}) for text, kind in (("12a!", "digits"), ("12a!", "letters"), ("", "digits"))
    ]
    assert found == [0.5, 0.25, 0.0]


def test_the_next_commands_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(init, "build_model", lambda shape, seed, folder: model_folder(folder))
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "empty")]) == EXIT_DONE
    said = capsys.readouterr().out
    assert all(words in said for words in (f"cd {tmp_path / 'empty'}", "slipstream up", "slipstream report"))


def test_a_folder_with_files_a_file_and_a_place_where_none_can_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "kept.txt", tmp_path / "kept.txt" / "below"):
        assert str(folder) in refusal(capsys, "init", str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
