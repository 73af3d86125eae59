"""Checkpoints behind the steps: what is committed and when, and what a disk that fails leaves."""

from pathlib import Path

import numpy as np
import pytest

from common.errors import SlipstreamError
from learner.checkpoint import folder as checkpointing
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState
from tests.unit.learner.loop_fakes import Killed, MakeWorld


def saving(every: int = 2, keep: int = 9, asynchronous: bool = True) -> dict[str, object]:
    return {"checkpoint": {"every": every, "keep": keep, "asynchronous": asynchronous}}


def test_a_step_is_committed_when_its_checkpoint_is_on_the_disk_not_when_it_was_begun(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    world.backend.polls_to_write = 1
    commits: list[tuple[int, int]] = []
    commit = world.broker.commit
    world.broker.commit = lambda step: (commits.append((step, world.trainer.version)), commit(step))
    world.run()
    assert commits == [(1, 3), (3, 5), (5, 6)]  # (last step committed, version reached): a step behind, all at the end


def test_a_checkpoint_holds_what_was_there_when_it_was_begun(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 5}, learner=saving())
    world.backend.polls_to_write = 1
    world.run()
    saved = np.load(world.run_dir.checkpoints / "step-000002" / "model" / "table.npy")
    np.testing.assert_array_equal(saved, world.publisher.tables[2].numpy())
    assert not np.array_equal(saved, world.publisher.tables[3].numpy())


def test_the_next_checkpoint_waits_for_the_one_that_is_being_written(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 4}, learner=saving(every=1))
    world.backend.polls_to_write = 1000
    world.run()
    assert [step for step, _ in world.broker.commits] == [0, 1, 2, 3]


def test_a_synchronous_checkpoint_is_committed_before_the_next_step(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 4}, learner=saving(asynchronous=False))
    world.backend.polls_to_write = 1000
    versions: list[int] = []
    commit = world.broker.commit
    world.broker.commit = lambda step: (versions.append(world.trainer.version), commit(step))
    world.run()
    assert versions == [2, 4]


def test_a_kill_while_a_checkpoint_is_written_resumes_from_the_one_before(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    world.backend.fail_at = 5
    world.backend.polls_to_write = 2  # the checkpoint of version 4 is never asked about again
    with pytest.raises(Killed):
        world.run()
    assert [step for step, _ in world.broker.commits] == [1]
    again = world.restart()
    assert again.trainer.version == 2
    assert again.run() == "done"
    assert {entry.state for entry in again.broker.ledger()} == {"committed"}


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint_before(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    finish = world.lead.files.finish_checkpoint
    world.lead.files.finish_checkpoint = lambda state: (finish(state), setattr(world.backend, "disk_full", True))
    with pytest.raises(SlipstreamError, match="no space left"):
        world.run()
    assert [step for step, _ in world.broker.commits] == [1]
    again = world.restart()
    assert again.trainer.version == 2
    assert again.run() == "done"


def test_a_folder_that_cannot_be_made_is_an_error_with_its_reason(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 6}, learner=saving())
    world.run_dir.checkpoints.write_text("in the way")
    with pytest.raises(SlipstreamError, match=r"version 2 could not be begun: .*Not a directory"):
        world.run()


def test_finishing_flushes_only_what_the_backend_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(checkpointing, "sync", lambda path: synced.append(path.name))
    folder = CheckpointFolder(tmp_path, keep=1)
    model = folder.begin(3)
    model.mkdir()
    (model / "weights").write_bytes(b"flushed by the backend")
    folder.finish(TrainerState(policy_version=3, incarnation=0, tasks=StreamState()))
    assert synced == [folder.scratch(3).name, tmp_path.name]
