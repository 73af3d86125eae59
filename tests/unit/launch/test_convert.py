"""The refusals of `slipstream convert`, each with its reason, before it starts the process that converts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from launch import convert
from tests.rigs.configs import converted_folder, model_folder, refusal
from tests.rigs.refusals import refused


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


def write_weights(folder: Path, **tensors: tuple[str, int]) -> None:
    """A file of zeros: (type, bytes of a number) of 512 numbers by the tensor's name."""
    header, end = dict[str, object](), 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [2, 256], "data_offsets": [end, end := end + 512 * size]}
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(end))


BIAS = "layers.0.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("tensors", "needed"),
    [
        ({"a": ("BF16", 2), "b": ("BF16", 2)}, 2048),
        ({"a": ("BF16", 2), BIAS: ("F32", 4)}, 3072),
        ({"a": ("F16", 2), "b": ("F16", 2)}, 4096),
        ({"a": ("F8_E4M3", 1), "b": ("BF16", 2)}, 4096),
    ],
    ids=["bfloat16", "a bias of routers", "float16", "8 bits"],
)
def test_a_disk_without_room_for_what_is_written_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, tuple[str, int]], needed: int
) -> None:
    """The learner's types are bfloat16 and float32: weights of float16 or 8 bits grow."""
    write_weights(model, **tensors)
    asked: list[Path] = []
    free = [needed, needed - 1]

    def usage(at: Path) -> SimpleNamespace:
        asked.append(at)
        return SimpleNamespace(free=free.pop(0))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    convert.check_room(model, tmp_path / "a" / "b")
    with refused(UsageError, model, tmp_path, "free"):
        convert.check_room(model, tmp_path / "a" / "b")
    assert asked == [tmp_path] * 2, "the nearest folder that exists"


def test_weights_that_are_not_whole_are_refused(tmp_path: Path, model: Path, capsys) -> None:
    write_weights(model, a=("BF16", 2))
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said = refusal(capsys, "convert", str(model), str(tmp_path / "out"))
    assert str(file) in said and "bytes" in said
