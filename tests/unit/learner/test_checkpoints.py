"""Checkpoint folders: complete or absent, found, pruned; and what is committed when while they are written."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from common.errors import SlipstreamError
from common.json_lines import EventFile, LineFile
from learner.checkpoint import folder as checkpointing
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState, read_checkpoint
from learner.loop import run_files
from learner.loop.batch_source import Command
from tests.rigs.refusals import refused
from tests.unit.learner.loop_fakes import Killed, MakeWorld, World


def state(version: int) -> TrainerState:
    tasks = StreamState(next_serial=8, cursor=8, outstanding={3: 3, 7: 7})
    return TrainerState(policy_version=version, incarnation=1, tasks=tasks, tokens_trained_total=99)


def write(folder: CheckpointFolder, version: int) -> Path:
    model = folder.begin(version)
    assert not model.exists()
    model.mkdir()
    (model / "weights").write_bytes(b"w" * version)
    path = folder.finish(state(version))
    folder.prune()
    return path


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


def test_what_a_replaced_learner_completed_late_gives_way(tmp_path: Path) -> None:
    """It finished version 4 after its successor had looked; the successor's own version 4 is the one that counts."""
    folder = CheckpointFolder(tmp_path, keep=5)
    (write(folder, 4) / "model" / "weights").write_bytes(b"late")
    path = write(folder, 4)
    assert (path / "model" / "weights").read_bytes() == b"wwww"
    assert [p.name for p in folder.steps().values()] == [p.name for p in tmp_path.iterdir()] == ["step-000004"]


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


def test_the_newest_are_kept_an_unfinished_one_is_never_found_and_removed_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    folder = CheckpointFolder(tmp_path, keep=2)
    for version in (1, 2, 3):
        folder.begin(version).mkdir()  # the remains of a killed learner are overwritten
        write(folder, version)
    assert folder.remove_incomplete() == []
    folder.begin(4).mkdir()
    assert folder.newest()[1].policy_version == 3
    assert folder.remove_incomplete() == [folder.scratch(4).name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-000002", "step-000003"]


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
        (lambda path: (path / "trainer.json").unlink(), "trainer.json'"),
        (lambda path: (path / "model" / "weights").unlink(), "model/weights'"),
        (lambda path: (path / "model" / "weights").write_bytes(b"w"), "model/weights has 1 bytes"),
        (lambda path: shutil.rmtree(path / "model"), "model/ is"),
    ],
    ids=["torn state", "no state", "no weights", "cut weights", "no model"],
)
def test_a_damaged_checkpoint_names_what_is_missing_and_the_way_out(
    tmp_path: Path, damage: Callable[[Path], object], found: str
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    damage(write(folder, 3))
    with refused(SlipstreamError, tmp_path / "step-000003", found):
        folder.newest()


# ---------------------------------------------------------------- behind the steps


def saving(every: int = 2, keep: int = 9, asynchronous: bool = True) -> dict[str, object]:
    return {"checkpoint": {"every": every, "keep": keep, "asynchronous": asynchronous}}


@pytest.mark.parametrize(
    ("steps", "options", "polls", "expected"),
    [
        (6, saving(), 1, [(1, 3), (3, 5), (5, 6)]),
        (4, saving(every=1), 1000, [(0, 2), (1, 3), (2, 4), (3, 4)]),
        (4, saving(asynchronous=False), 1000, [(1, 2), (3, 4)]),
    ],
    ids=["a step behind and all at the end", "before the next checkpoint", "before the next step"],
)
def test_a_step_is_committed_when_its_checkpoint_is_on_the_disk_not_when_it_was_begun(
    make_world: MakeWorld, steps: int, options: dict[str, object], polls: int, expected: list[tuple[int, int]]
) -> None:
    """`expected`: (last step committed, version reached); `polls`: times that the disk is not ready."""
    world = make_world(run={"steps": steps}, learner=options)
    world.backend.polls_to_write = polls
    commits: list[tuple[int, int]] = []
    commit = world.broker.commit
    world.broker.commit = lambda step: (commits.append((step, world.trainer.version)), commit(step))
    world.run()
    assert commits == expected


def test_a_checkpoint_holds_what_was_there_when_it_was_begun(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 5}, learner=saving())
    world.backend.polls_to_write = 1
    world.run()
    saved = np.load(world.run_dir.checkpoints / "step-000002" / "model" / "table.npy")
    np.testing.assert_array_equal(saved, world.publisher.tables[2].numpy())
    assert not np.array_equal(saved, world.publisher.tables[3].numpy())


def kill_while_it_is_written(world: World) -> None:
    world.backend.fail_at = 5
    world.backend.polls_to_write = 2  # the checkpoint of version 4 is never asked about again
    world.run_killed()


def kill_half_way(world: World) -> None:
    start = world.backend.start_checkpoint

    def half(path: Path) -> None:
        if not world.broker.commits:
            return start(path)
        path.mkdir()
        (path / "table.npy").write_bytes(b"half")
        raise Killed

    world.backend.start_checkpoint = half
    world.run_killed()


def fill_the_disk(world: World) -> None:
    finish = world.lead.files.finish_checkpoint
    world.lead.files.finish_checkpoint = lambda state: (finish(state), setattr(world.backend, "disk_full", True))
    with refused(SlipstreamError, "No space left"):
        world.run()


@pytest.mark.parametrize("end", [kill_while_it_is_written, kill_half_way, fill_the_disk])
def test_a_run_whose_checkpoint_is_not_finished_resumes_from_the_one_before(
    make_world: MakeWorld, end: Callable[[World], None]
) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    end(world)
    assert [step for step, _ in world.broker.commits] == [1]
    again = world.restart()
    assert again.trainer.version == 2
    assert again.run() == "done"
    assert {entry.state for entry in again.broker.ledger()} == {"committed"}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("event", [True, False], ids=["its event", "an older one's removal"])
def test_a_complete_checkpoint_is_committed_whatever_fails_after_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, event: bool
) -> None:
    world = make_world(run={"steps": 4}, learner=saving(keep=1))
    add = world.lead.files.events.add
    if event:
        world.lead.files.events.add = lambda kind, **told: full() if kind == "checkpoint" else add(kind, **told)
    else:
        monkeypatch.setattr(checkpointing, "remove_folder", full)
    assert world.run() == "done"
    assert [step for step, _ in world.broker.commits] == [1, 3]
    assert ("events.jsonl cannot" if event else "older checkpoints could not be removed") in caplog.text


def test_the_run_goes_on_through_a_full_disk_and_loses_no_line(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written in steps 3 to 5, whose checkpoints fail; that of version 7 is complete again."""
    world = make_world(run={"steps": 8}, learner=saving(every=1))
    lead, backend, line = world.lead, world.backend, LineFile.write
    start = lead.next_command

    def write(file: LineFile, written: msgspec.Struct) -> None:
        full() if backend.disk_full else line(file, written)

    def turn(step: int) -> Command:
        backend.disk_full = 3 <= step < 6
        free = 0 if backend.disk_full else 1 << 40
        monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        return start(step)

    monkeypatch.setattr(LineFile, "write", write)
    lead.next_command = turn
    assert world.run() == "done"
    assert [line.step for line in world.lines()] == list(range(8))
    assert [step for step, _ in world.broker.commits] == [0, 1, 2, 6, 7]
    assert "metrics.jsonl waits for room, 1 lines" in caplog.text and "the disk is full: free some" in caplog.text
    assert not list(world.run_dir.checkpoints.glob(".*")), "leftovers take no room"


def test_a_checkpoint_that_finds_no_room_at_a_drain_ends_the_learner(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(run={"steps": 4}, learner=saving(every=9))
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    world.backend.disk_full = True
    with refused(SlipstreamError, "No space left"):
        world.run()


def test_a_complete_checkpoint_whose_lines_find_no_room_waits_for_the_next_period(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    write = world.lead.files.checkpoints.finish
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    world.lead.files.checkpoints.finish = lambda state: full() if state.policy_version == 4 else write(state)
    assert world.run() == "done"
    assert [step for step, _ in world.broker.commits] == [1, 5]
    assert "checkpoint_skipped" in world.event_kinds()


def test_a_learner_starts_while_its_events_find_no_room(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(run={"steps": 2})
    monkeypatch.setattr(EventFile, "add", full)
    assert world.restart().run() == "done"


def test_a_full_disk_does_not_replace_the_error_that_ended_the_learner(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_world().lead.files
    files.events.add = full
    monkeypatch.setattr(run_files, "write_json", full)
    files.close("failed", 0, "hopeless")
    assert "events.jsonl cannot be written" in caplog.text and "learner.json cannot be written" in caplog.text


def test_a_folder_that_cannot_be_made_is_an_error_with_its_reason(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    world.run_dir.checkpoints.write_text("in the way")
    with refused(SlipstreamError, "version 2", os.strerror(errno.ENOTDIR)):
        world.run()


def test_finishing_flushes_only_what_the_backend_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(checkpointing, "sync", lambda path: synced.append(path.name))
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 3)
    assert synced == ["trainer.json", folder.scratch(3).name, tmp_path.name]


def test_a_save_that_was_given_up_writes_nowhere_where_the_next_one_does(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 1)
    late = folder.begin(3) / "a rank's part"
    folder.remove_scratch(3)
    again = folder.begin(3)
    late.parent.mkdir(parents=True)
    late.write_bytes(b"of the save that failed on another rank")
    assert not again.exists()
