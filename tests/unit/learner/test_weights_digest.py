"""The identity of the weights beneath adapters: of the tensors, and not of their files."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from learner.megatron.conversion.hf_folder import weights_digest

WEIGHTS = {"a": np.arange(6000, dtype=np.float32).reshape(60, 100), "b": np.ones(3, dtype=np.float16)}


def digest(folder: Path, *files: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": str(number)})
    return weights_digest(folder)


def test_files_and_folders_do_not_matter(tmp_path: Path) -> None:
    whole = digest(tmp_path / "whole", WEIGHTS)
    assert digest(tmp_path / "parts", {"b": WEIGHTS["b"]}, {"a": WEIGHTS["a"]}) == whole


@pytest.mark.parametrize("place", [0, 3000, 5999])
def test_another_number_is_another_model(tmp_path: Path, place: int) -> None:
    changed = WEIGHTS["a"].copy()
    changed.flat[place] += 1
    assert digest(tmp_path / "one", WEIGHTS) != digest(tmp_path / "other", WEIGHTS | {"a": changed})


@pytest.mark.parametrize(
    "other",
    [
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {"a": WEIGHTS["a"].reshape(100, 60), "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"].view(np.int32), "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"]},
    ],
    ids=["name", "shape", "type", "fewer"],
)
def test_names_shapes_and_types_count(tmp_path: Path, other: dict[str, np.ndarray]) -> None:
    assert digest(tmp_path / "one", WEIGHTS) != digest(tmp_path / "other", other)


def test_an_empty_tensor_has_an_identity(tmp_path: Path) -> None:
    assert len(digest(tmp_path / "empty", {"a": np.zeros((0, 2), dtype=np.float32)})) == 64
