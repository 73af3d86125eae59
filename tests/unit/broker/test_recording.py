"""A store read back as a recording."""

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import NodeReport
from broker.delivery.task_table import Entry
from broker.journal.recording import Recording, open_recording
from broker.journal.recovery import Memory, open_memory
from broker.main import run_info
from common.config.schema import Config
from common.errors import UsageError
from common.process.run_dir import RunDir
from common.rollouts import GroupMeta, Task
from tests.broker_rig import job


def recorded(config: Config, work: Callable[[Memory], None]) -> Recording:
    """The recording of a broker that did `work` and ended; its payloads can still be read afterwards."""
    run = run_info(config, b"")
    memory = open_memory(config, run, lambda event: None)
    work(memory)
    assert memory.journal is not None
    memory.journal.end_turn()
    with pytest.raises(UsageError, match="is running: a broker has"), open_recording(RunDir(config.run.dir), config):
        raise AssertionError("a broker has the store")
    memory.close()
    with open_recording(RunDir(config.run.dir), config) as recording:
        assert recording.store_id == memory.state.store_id
        return recording


def generate(memory: Memory, serials: range) -> None:
    """Every task handed in, the newest first."""
    state = memory.state
    state.offer([Task(serial, b"{}", serial, 2) for serial in serials])
    state.register(NodeReport("n0", 1, "here", "generating", 100))
    for lease in reversed(state.lease("n0", 100, len(serials))):
        payload = b"group %d" % lease.task.serial
        assert state.complete("n0", lease.token, GroupMeta(0, 1, 0.5, 8), payload, len(payload))


def payload(group: Entry) -> bytes:
    assert group.stored is not None
    return group.stored.read()


def serials(recording: Recording) -> dict[int, list[int]]:
    return {step: [group.task.serial for group in groups] for step, groups in recording.steps.items()}


def test_committed_and_taken_steps_come_back_in_their_order_with_payloads_and_marks(tmp_path: Path) -> None:
    def work(memory: Memory) -> None:
        generate(memory, range(9))
        memory.state.take(0, 2)
        memory.state.filter(0, [1], 4)
        for step in range(3):
            memory.state.take(step, 2)
        memory.state.commit(1)

    found = recorded(job(tmp_path / "run"), work)
    assert serials(found) == {0: [0, 1, 2], 1: [3, 4], 2: [5, 6]}
    assert found.next_serial == 9
    assert [group.filtered for group in found.steps[0]] == [False, True, False]
    for groups in found.steps.values():
        for group in groups:
            assert payload(group) == b"group %d" % group.task.serial
            assert (group.nodes[-1], group.meta) == ("n0", GroupMeta(0, 1, 0.5, 8))


def test_what_is_retained_at_least_comes_back_and_no_step_that_lacks_groups(tmp_path: Path) -> None:
    def work(memory: Memory) -> None:
        generate(memory, range(12))
        for step in range(5):
            memory.state.take(step, 2)
        memory.state.commit(3)
        memory.state.take(5, 2)
        memory.state.filter(5, [10], 4)  # the step waits for another group

    found = recorded(job(tmp_path / "run", retain_steps=2), work)
    assert list(found.steps)[-3:] == [2, 3, 4]
    assert payload(found.steps[2][0]) == b"group 4"
