"""The steps of a run read back from its store as a recording."""

from pathlib import Path

from broker.delivery.learner_rules import LearnerRules
from broker.delivery.task_table import Entry
from broker.journal.recording import Recording, existing_file_store, open_recording, recorded
from common.errors import UsageError
from common.process.run_dir import RunDir
from tests.rigs.brokers import DurableRig, job, meta
from tests.rigs.refusals import refused


def recording_in(run: Path) -> Recording:
    """The steps in RUN/store, whose broker may be running."""
    return recorded(existing_file_store(RunDir(run)), groups_per_step=2)


def payload(group: Entry) -> bytes:
    assert group.stored is not None
    return group.stored.read()


def test_retained_and_taken_steps_come_back_in_their_order_with_payloads_and_marks(tmp_path: Path) -> None:
    run, moved = tmp_path / "a", tmp_path / "b"
    rig = DurableRig(run / "store", retain_steps=2)
    rig.begin()
    rig.offer(11)
    payloads = {lease.task.serial: rig.complete(lease) for lease in reversed(rig.lease(11))}
    for step in range(5):
        LearnerRules(rig.state).take(step, 2)
        if step == 2:
            LearnerRules(rig.state).filter(2, [5], 4)  # the step takes another group for it
            LearnerRules(rig.state).take(2, 2)
    LearnerRules(rig.state).commit(3)
    LearnerRules(rig.state).take(5, 1)
    rig.settle()

    def check(found: Recording) -> None:
        assert (found.next_serial, found.store_id) == (11, rig.store.store_id)
        steps = {step: [group.serial for group in groups] for step, groups in found.steps.items()}
        assert list(steps)[-3:] == [2, 3, 4], "step 5 lacks a group"
        assert (steps[2], steps[3], steps[4]) == ([4, 5, 6], [7, 8], [9, 10])
        assert [group.filtered for group in found.steps[2]] == [False, True, False]
        for group in (group for step in (2, 3, 4) for group in found.steps[step]):
            assert (payload(group), group.nodes[-1], group.meta) == (payloads[group.serial], "n0", meta())

    check(recording_in(run))
    with refused(UsageError, RunDir(run).store), open_recording(RunDir(run), job(run)):
        raise AssertionError("a broker has the store")
    rig.close()
    run.rename(moved)
    with open_recording(RunDir(moved), job(moved)) as found:
        check(found)


def test_what_is_retained_outlives_snapshots_and_what_is_not_is_removed(tmp_path: Path) -> None:
    rig = DurableRig(tmp_path / "store", segment_bytes=1 << 14, retain_steps=2)
    rig.begin()
    sizes: list[int] = []
    for step in range(60):
        last = rig.step(step, size=1000)
        LearnerRules(rig.state).commit(step - 1)
        rig.settle()
        sizes.append(rig.journal.store.size_bytes())
    assert max(sizes[20:]) < 4 * max(sizes[:20]), "the store does not grow with the run"
    rig.close()
    found = recording_in(tmp_path)
    assert list(found.steps)[-3:] == [57, 58, 59]
    assert [payload(group) for group in found.steps[59]] == last
    assert len(list((tmp_path / "store").glob("0*.log"))) < 10
