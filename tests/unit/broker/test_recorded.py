"""Reading the steps of a run back from its store."""

import shutil
from pathlib import Path

import pytest

from broker.journal.recording import Recording, existing_file_store, recorded
from common.errors import UsageError
from common.process.run_dir import RunDir
from tests.unit.broker.durable_rig import Rig, meta


def recording_in(run: Path) -> Recording:
    """The steps in RUN/store, whose broker may be running."""
    return recorded(existing_file_store(RunDir(run)), groups_per_step=2)


def payloads_of(recording: Recording, step: int) -> list[bytes]:
    return [group.stored.read() for group in recording.steps[step]]  # type: ignore[union-attr]


def test_the_retained_steps_come_back_in_the_order_in_which_they_were_handed_out(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store", retain_steps=2)
    rig.begin()
    payloads = {step: rig.step(step) for step in range(5)}
    rig.state.filter(2, [4], 0)
    for step in range(4):
        rig.state.commit(step)
    rig.settle()
    while_it_runs = recording_in(tmp_path)
    rig.close()
    for found in (while_it_runs, recording_in(tmp_path)):
        assert list(found.steps)[-3:] == [2, 3, 4]
        assert (found.next_serial, found.store_id) == (10, rig.info.store_id)
        for step in (2, 3, 4):
            groups = [(g.serial, g.nodes[-1], g.meta) for g in found.steps[step]]
            assert groups == [(2 * step, "n0", meta()), (2 * step + 1, "n0", meta())]
            assert payloads_of(found, step) == payloads[step]
        assert [(g.serial, g.filtered) for g in found.steps[2]] == [(4, True), (5, False)]


def test_what_is_retained_outlives_snapshots_and_what_is_not_is_removed(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store", segment_bytes=1 << 14, retain_steps=2)
    rig.begin()
    sizes: list[int] = []
    for step in range(60):
        last = rig.step(step, size=1000)
        rig.state.commit(step - 1)
        rig.settle()
        sizes.append(rig.journal.store.size_bytes())
    assert max(sizes[20:]) < 4 * max(sizes[:20]), "the store does not grow with the run"
    rig.close()
    found = recording_in(tmp_path)
    assert list(found.steps)[-3:] == [57, 58, 59]
    assert payloads_of(found, 59) == last
    assert len(list((tmp_path / "store").glob("0*.log"))) < 10


def test_a_run_without_a_store_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found none; groups are recorded when"):
        recording_in(tmp_path)


def test_a_store_may_be_read_where_it_was_copied_to(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a" / "store")
    rig.begin()
    payloads = rig.step(0)
    rig.settle()
    rig.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert payloads_of(recording_in(tmp_path / "b"), 0) == payloads
