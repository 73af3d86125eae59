"""Checkpoint folders: complete or absent, newest found, old ones pruned."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from common.errors import SlipstreamError
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState, read_checkpoint


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
    assert path.name == "step-1000000"
    assert found == msgspec.structs.replace(state(1000000), files={"weights": 1000000})
    assert (path / "model" / "weights").stat().st_size == 1000000
    assert [p.name for p in folder.steps().values()] == ["step-000009", "step-000020", "step-1000000"]


def test_an_unfinished_checkpoint_is_never_found_and_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    write(folder, 2)
    (folder.begin(4)).mkdir()
    assert folder.newest()[1].policy_version == 2
    assert folder.remove_incomplete() == [folder.scratch(4).name]
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
    assert [p.name for p in folder.steps().values()] == ["step-000004"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]


def test_a_replaced_learner_that_wakes_up_names_no_half_written_checkpoint_of_its_successor(tmp_path: Path) -> None:
    replaced, successor = CheckpointFolder(tmp_path, keep=5), CheckpointFolder(tmp_path, keep=5)
    replaced.begin(4).mkdir()
    successor.remove_incomplete()
    model = successor.begin(4)
    model.mkdir()
    (model / "weights").write_bytes(b"w")
    with pytest.raises(FileNotFoundError):
        replaced.finish(state(4))
    assert not successor.steps()
    (model / "weights").write_bytes(b"wwww")
    assert read_checkpoint(successor.finish(state(4))).files == {"weights": 4}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for version in (1, 2, 3):
        write(folder, version)
    assert [p.name for p in folder.steps().values()] == ["step-000002", "step-000003"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 1)
    write(folder, 2)
    assert folder.remove_incomplete() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-000002"]


@pytest.mark.parametrize("replaced", [False, True], ids=["pruned", "replaced"])
def test_killed_at_any_moment_of_a_removal_no_checkpoint_is_torn(tmp_path: Path, replaced: bool) -> None:
    """A process that finishes a checkpoint is killed at its n-th change of a folder, for every n."""
    for moment in range(100):
        parent = tmp_path / str(moment)
        folder = CheckpointFolder(parent, keep=1)
        write(folder, 2)
        killed = kill_at(moment, lambda folder=folder: write(folder, 2 if replaced else 3))
        for path in folder.steps().values():
            assert read_checkpoint(path).files == {"weights": int(path.name[-6:])}
        assert not list(parent.glob(".*")) or killed
        folder.remove_incomplete()
        assert not list(parent.glob(".*"))
        if not killed:
            break
    assert 8 < moment < 99


CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")


def kill_at(moment: int, act: Callable[[], object]) -> bool:
    """Fork; kill the child with -9 before it changes a folder once more than `moment` times. Whether it was killed."""
    child = os.fork()
    if child == 0:
        left = iter(range(moment))

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event in CHANGES and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        act()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: (path / "trainer.json").write_text("{"), "truncated"),
        (lambda path: (path / "trainer.json").unlink(), r"No such file or directory: .*trainer\.json"),
        (lambda path: (path / "model" / "weights").unlink(), r"No such file or directory: .*weights"),
        (lambda path: (path / "model" / "weights").write_bytes(b"w"), "model/weights has 1 bytes instead of 3"),
        (lambda path: shutil.rmtree(path / "model"), "the folder model/ is missing"),
    ],
    ids=["torn state", "no state", "no weights", "cut weights", "no model"],
)
def test_a_damaged_checkpoint_names_what_is_missing_and_the_way_out(
    tmp_path: Path, damage: Callable[[Path], object], found: str
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    damage(write(folder, 3))
    with pytest.raises(SlipstreamError, match=rf"step-000003 is not complete: .*{found}.*; remove that folder to use"):
        folder.newest()
