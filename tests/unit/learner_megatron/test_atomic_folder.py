"""A published folder is complete; one that was interrupted is not there."""

from pathlib import Path

import pytest

from learner.megatron.conversion import atomic_folder


def test_a_folder_appears_only_when_published(tmp_path: Path) -> None:
    target = tmp_path / "step-3"
    staging = atomic_folder.prepare(target)
    (staging / "weights").write_bytes(b"new")
    assert not target.exists()
    atomic_folder.publish(target)
    assert (target / "weights").read_bytes() == b"new"
    assert not staging.exists()


def test_what_an_interrupted_write_left_is_discarded(tmp_path: Path) -> None:
    target = tmp_path / "step-3"
    (atomic_folder.prepare(target) / "half").write_bytes(b"written")
    (atomic_folder.prepare(target) / "whole").write_bytes(b"written")
    atomic_folder.publish(target)
    assert [file.name for file in target.iterdir()] == ["whole"]


def test_publishing_again_replaces_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in (b"old", b"new"):
        (atomic_folder.prepare(target) / "weights").write_bytes(content)
        atomic_folder.publish(target)
    assert (target / "weights").read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("unsynced", "flushed"), [(None, ["a", "b"]), (["b"], ["b"])])
def test_only_what_is_not_on_the_disk_yet_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsynced: list[str] | None, flushed: list[str]
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(atomic_folder, "sync", lambda path: synced.append(path.name))
    staging = atomic_folder.prepare(tmp_path / "model")
    for name in ("a", "b"):
        (staging / name).write_bytes(b"w")
    atomic_folder.publish(tmp_path / "model", None if unsynced is None else [staging / name for name in unsynced])
    assert synced == [*flushed, staging.name, tmp_path.name]
