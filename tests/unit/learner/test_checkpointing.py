"""Checkpoint folders: complete or absent, newest found, old ones pruned."""

from pathlib import Path

import pytest

from common.errors import SlipstreamError
from learner.checkpoint.folder import CheckpointFolder, TrainerState
from learner.loop.task_stream import StreamState


def state(version: int) -> TrainerState:
    tasks = StreamState(next_serial=8, cursor=8, outstanding={3: 3, 7: 7})
    return TrainerState(policy_version=version, incarnation=1, tasks=tasks, tokens_trained_total=99)


def write(folder: CheckpointFolder, version: int) -> Path:
    model = folder.begin(version)
    assert not model.exists()
    model.mkdir()
    (model / "weights").write_bytes(b"w" * version)
    return folder.finish(state(version))


def test_the_newest_complete_checkpoint_comes_back_with_its_state(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=5)
    assert folder.newest() is None
    for version in (20, 9, 1000000):
        write(folder, version)
    path, found = folder.newest()
    assert path.name == "step-1000000" and found == state(1000000)
    assert (path / "model" / "weights").stat().st_size == 1000000
    assert [p.name for p in folder.complete()] == ["step-000009", "step-000020", "step-1000000"]


def test_an_unfinished_checkpoint_is_never_found_and_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    write(folder, 2)
    (folder.begin(4)).mkdir()
    assert folder.newest()[1].policy_version == 2
    assert folder.remove_incomplete() == [".step-000004.tmp"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_what_a_killed_learner_left_is_overwritten(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    (folder.begin(4)).mkdir()
    assert write(folder, 4).name == "step-000004"


def test_what_a_replaced_learner_completed_late_gives_way(tmp_path: Path) -> None:
    """It finished version 4 after its successor had looked; the successor's own version 4 is the one that counts."""
    folder = CheckpointFolder(tmp_path, keep=5)
    (write(folder, 4) / "model" / "weights").write_bytes(b"late")
    path = write(folder, 4)
    assert (path / "model" / "weights").read_bytes() == b"wwww"
    assert folder.remove_incomplete() == [".step-000004.replaced.tmp"]
    assert [p.name for p in folder.complete()] == ["step-000004"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for version in (1, 2, 3):
        write(folder, version)
    assert [p.name for p in folder.complete()] == ["step-000002", "step-000003"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 1)
    write(folder, 2)
    assert folder.remove_incomplete() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-000002"]


def test_a_damaged_state_names_the_folder_and_the_way_out(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    (write(folder, 3) / "trainer.json").write_text("{")
    with pytest.raises(SlipstreamError, match=r"step-000003 has no usable trainer\.json.*remove that folder"):
        folder.newest()
