"""The refusals of `slipstream convert`, each with its reason, before it starts the process that converts."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import convert
from tests.rigs.configs import converted_folder, model_folder, refusal


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a refusal comes before the process")

    monkeypatch.setattr(convert.subprocess, "run", start)


def test_a_folder_that_is_not_empty_and_a_file_are_no_place_for_it(tmp_path: Path, model: Path, capsys) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("full", "file", "model"):
        said = refusal(capsys, "convert", str(model), str(tmp_path / name))
        assert f"{tmp_path / name} exists and is not empty" in said
    assert (tmp_path / "full" / "precious").exists()


@pytest.mark.parametrize(
    ("entries", "lost", "word"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, None, "Gemma2ForCausalLM"),
        ({"quantization_config": {"bits": 4}}, None, "quantis"),
        ({}, "model.safetensors", "safetensors"),
        ({}, "tokenizer.json", "tokenizer"),
        ({}, "config.json", "config.json"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, capsys, entries, lost, word) -> None:
    model = model_folder(tmp_path / "model", **entries)
    if lost:
        (model / lost).unlink()
    said = refusal(capsys, "convert", str(model), str(tmp_path / "out"))
    assert said.startswith("slipstream convert: MODEL: expected ") and word in said
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_or_converted_already_is_refused(tmp_path: Path, capsys) -> None:
    said = refusal(capsys, "convert", str(tmp_path / "nothing"), str(tmp_path / "out"))
    assert f"{tmp_path / 'nothing'}, which does not exist" in said
    said = refusal(capsys, "convert", str(converted_folder(tmp_path / "made")), str(tmp_path / "out"))
    assert f"{tmp_path / 'made'} is converted already" in said


def test_a_disk_without_room_for_it_is_refused(tmp_path: Path, model: Path, capsys, monkeypatch) -> None:
    (model / "model.safetensors").write_bytes(bytes(1 << 20))
    asked: list[Path] = []

    def usage(at: Path) -> SimpleNamespace:
        asked.append(at)
        return SimpleNamespace(free=(1 << 20) - 1)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    said = refusal(capsys, "convert", str(model), str(tmp_path / "a" / "b"))
    assert "are free in" in said and asked == [tmp_path], "the nearest folder that exists"
