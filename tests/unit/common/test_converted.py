"""Folders of `slipstream convert`: what counts as a whole one, wherever a config names a model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from common.config.converted import MANIFEST, WEIGHTS, Converted, is_converted, read_converted
from common.errors import ConfigError, UsageError
from tests.rigs.configs import converted_folder, job_of, model_folder
from tests.rigs.refusals import refused

DAMAGES: list[tuple[Callable[[Path], object], str]] = [  # the damage, and text in the error
    (lambda model: (model / WEIGHTS / MANIFEST).unlink(), MANIFEST),
    (lambda model: (model / WEIGHTS / MANIFEST).write_text("{"), MANIFEST),
    (lambda model: (model / WEIGHTS / MANIFEST).write_text("{}"), MANIFEST),
    (lambda model: (model / WEIGHTS / "__0_0.distcp").unlink(), "__0_0.distcp"),
    (lambda model: (model / WEIGHTS / "__0_0.distcp").write_bytes(bytes(39)), "39 bytes instead of 40"),
    (lambda model: (model / WEIGHTS / ".metadata").write_bytes(b""), "0 bytes instead of 7"),
    (lambda model: model_folder(model, rope_theta=5.0) and (model / "model.safetensors").unlink(), "config.json"),
    (lambda model: rewrite(model, format=2), "has format 2"),
    (lambda model: shutil.rmtree(model / WEIGHTS), "safetensors"),
]


def rewrite(model: Path, **changes: object) -> None:
    manifest = model / WEIGHTS / MANIFEST
    found = msgspec.json.decode(manifest.read_bytes(), type=Converted)
    manifest.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, **changes)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of a job whose model and reference are converted."""
    job_of(tmp_path)
    shutil.rmtree(tmp_path / "model")
    converted_folder(tmp_path / "model")
    return tmp_path


def test_a_converted_folder_is_a_model_and_a_reference(folder: Path) -> None:
    loss = {"reference": str(folder / "model"), "kl_coefficient": 0.1}
    job_of(folder, learner={"loss": loss}).validate("job.yaml")
    assert read_converted(folder / "model").weight_bytes == 47


def test_safetensors_files_come_first(tmp_path: Path) -> None:
    both = converted_folder(tmp_path / "model")
    assert is_converted(both)
    (both / "model.safetensors").write_bytes(b"")
    assert not is_converted(both)
    assert not is_converted(model_folder(tmp_path / "other"))


@pytest.mark.parametrize(("damage", "word"), DAMAGES)
def test_a_converted_folder_that_is_not_whole_is_refused_by_name(
    folder: Path, damage: Callable[[Path], object], word: str
) -> None:
    damage(folder / "model")
    with refused(ConfigError, "model.path", folder / "model", word) as caught:
        job_of(folder).validate("job.yaml")
    assert caught.value.exit_code == 2
    shutil.move(folder / "model", folder / "reference")
    model_folder(folder / "model")
    loss = {"reference": str(folder / "reference"), "kl_coefficient": 0.1}
    with refused(ConfigError, "learner.loss.reference", folder / "reference", word):
        job_of(folder, learner={"loss": loss}).validate("job.yaml")


def test_the_manifest_of_another_format_names_both(folder: Path) -> None:
    rewrite(folder / "model", format=7)
    with refused(UsageError, "format 7", "reads 1", "slipstream convert"):
        read_converted(folder / "model")
