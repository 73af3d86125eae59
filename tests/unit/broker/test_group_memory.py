"""Which groups are in memory, which only in the store, and how the learner gets those."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.delivery.learner_rules import LearnerRules
from broker.delivery.task_table import Entry, StoredPayload
from broker.journal.group_memory import TEND_S, GroupMemory
from broker.journal.store import PayloadUnreadable
from tests.rigs.brokers import DurableRig
from tests.rigs.waiting import LIMIT_S

SIZE = 500  # times two bytes, for serials below ten
BOUND = 4000  # four groups


class Rig(DurableRig):
    """A broker of two groups a step, whose memory has room for four; every look at it is due."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.state.run = msgspec.structs.replace(self.state.run, memory_bytes=BOUND)
        self.has_read = threading.Semaphore(0)
        self.memory = GroupMemory(self.state, self.journal, self.has_read.release)
        self._now = 0.0

    def tend(self) -> list[int]:
        """The serials of the groups in memory afterwards."""
        self._now += 2 * TEND_S
        self.memory.tend(self._now)
        return [serial for serial, entry in self.state.tasks.living.items() if entry.in_memory]

    def take(self, step: int) -> list[Entry]:
        """As the server: until the groups can be sent."""
        taken = LearnerRules(self.state).take(step, 2)
        assert taken is not None
        while not self.memory.has(step, taken):
            assert self.has_read.acquire(timeout=LIMIT_S)
        return taken

    def close(self) -> None:
        self.memory.close()
        super().close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path / "store") as found:
        found.begin()
        yield found


def test_the_groups_that_are_taken_last_leave_memory_first(rig: Rig) -> None:
    rig.ready(9, SIZE)
    rig.settle()
    assert rig.tend() == [0, 1, 2], "the bound less an eighth"
    assert rig.state.tasks.bytes_in_memory == 3000
    assert rig.state.tasks.bytes_held == 9000


def test_a_taken_group_has_the_bytes_that_were_handed_in_wherever_it_was(rig: Rig) -> None:
    payloads = rig.ready(8, SIZE)
    rig.settle()
    rig.tend()
    taken = [entry.payload for step in range(4) for entry in rig.take(step)]
    assert [bytes(memoryview(p)) for p in taken] == payloads  # pyright: ignore[reportArgumentType]


def test_the_next_step_is_read_while_the_learner_trains_and_earlier_steps_leave(rig: Rig) -> None:
    rig.ready(9, SIZE)
    rig.settle()
    rig.tend()
    rig.take(0)
    rig.take(1)  # group 3 is read for it
    assert rig.tend() == [0, 1, 2, 3], "steps 0 and 1 fit, and step 2 is being read"
    for _ in range(2):
        assert rig.has_read.acquire(timeout=LIMIT_S)
    assert rig.tend() == [0, 1, 2, 3, 4, 5]
    rig.ready(1, SIZE)
    rig.settle()
    assert rig.tend() == [2, 3, 4, 5, 9], "besides the step that may be on its way, three groups"
    assert [entry.in_memory for entry in rig.take(2)] == [True, True]


def test_groups_that_the_learner_has_make_room_for_the_next_ones(rig: Rig) -> None:
    rig.state.run = msgspec.structs.replace(rig.state.run, groups_per_step=8)
    rig.ready(8, SIZE)
    rig.settle()
    assert rig.tend() == [0, 1, 2]
    held, rules = set[str](), LearnerRules(rig.state)
    seen: list[int] = []
    while len(seen) < 8:
        assert not rig.state.tasks.store_lags and rig.state.tasks.bytes_in_memory <= BOUND
        found = rules.look(8, held)
        seen += [entry.serial for entry in found]
        held |= {entry.token for entry in found}
        rig.memory.release(held)
        while not (after := rig.tend()) or not set(after) - set(seen):
            assert len(seen) == 8 or rig.has_read.acquire(timeout=LIMIT_S)
            if len(seen) == 8:
                break
    assert sorted(seen) == list(range(8)), "all of them, although memory has room for four"
    assert len(rig.tend()) <= 2, "they are not read again"
    assert rig.state.tasks.bytes_in_memory <= BOUND // 2


def test_nothing_that_the_learner_has_leaves_memory_without_need_or_before_it_is_written(rig: Rig) -> None:
    rig.ready(2, SIZE)
    rig.settle()
    everything = {entry.token for entry in rig.state.tasks.living.values()}
    rig.memory.release(everything)
    assert rig.tend() == [0, 1], "half of the memory is free"
    rig.ready(2, SIZE)
    everything = {entry.token for entry in rig.state.tasks.living.values()}
    rig.memory.release(everything)
    assert rig.tend() == [2, 3], "only the store could give those back, and has them not yet"


def test_a_learner_that_resumes_gets_its_steps_from_the_store(rig: Rig) -> None:
    payloads = rig.ready(8, SIZE)
    for step in range(4):
        rig.take(step)
    rig.settle()
    rig.tend()
    assert not any(entry.in_memory for entry in rig.state.tasks.living.values() if entry.step == 0)
    assert [entry.payload for entry in rig.take(0)] == payloads[:2]


def test_nothing_leaves_memory_before_it_is_written_and_nodes_wait_meanwhile(rig: Rig) -> None:
    rig.ready(9, SIZE)  # no turn has ended, so the store has none of them
    assert len(rig.tend()) == 9
    status = rig.state.status()
    assert status.store_lags
    assert status.full
    rig.offer(4)
    assert not rig.lease(1), "the next step has its groups"
    before = rig.state.lease_revision
    rig.settle()
    rig.tend()
    assert not rig.state.status().full
    assert rig.state.lease_revision > before, "nodes that wait are looked at again"
    assert rig.lease(1)


def test_nothing_leaves_memory_while_the_store_is_stuck(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ready(9, SIZE)
    rig.settle()
    monkeypatch.setattr(type(rig.journal), "stuck", "away")
    assert len(rig.tend()) == 9
    assert rig.state.status().full, "or a full disk would fill the memory"


def test_a_group_that_cannot_be_read_refuses_the_take_and_is_tried_again(rig: Rig) -> None:
    rig.ready(9, SIZE)
    rig.settle()
    rig.tend()
    rig.take(0)
    rig.take(1)
    segment = next(rig.store.path.glob("0*.log"))
    whole = segment.read_bytes()
    rig.settle()
    entry = rig.state.tasks.living[4]
    assert entry.stored is not None
    assert entry.stored.location is not None
    where = entry.stored.location.offset
    segment = rig.store.path / f"{entry.stored.location.segment:08d}.log"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:where] + bytes(8) + whole[where + 8 :])
    damaged = rig.take(2)[0]  # `has` says True: the caller reads it again and finds out why
    assert not damaged.in_memory
    with pytest.raises(PayloadUnreadable):
        damaged.stored.read()  # pyright: ignore[reportOptionalMemberAccess]
    segment.write_bytes(whole)
    assert rig.take(2)[0].in_memory


def test_a_fault_of_the_program_while_a_group_is_read_leaves_no_take_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(stored: StoredPayload) -> bytes:
        raise ValueError("a fault of the program")

    rig.ready(9, SIZE)
    rig.settle()
    rig.tend()
    with monkeypatch.context() as broken:
        broken.setattr(StoredPayload, "read", fault)
        assert not any(entry.in_memory for step in (0, 1, 2, 3) for entry in rig.take(step)[1:] if step > 1)
    assert rig.take(3)[0].in_memory


def test_a_group_that_is_given_up_while_it_is_read_stays_away(rig: Rig) -> None:
    rig.ready(9, SIZE)
    rig.settle()
    rig.tend()
    rules = LearnerRules(rig.state)
    for step in range(4):
        taken = rules.take(step, 2)
    assert taken is not None
    assert not rig.memory.has(3, taken)
    rules.regenerate(3, [6])
    for _ in range(2):
        assert rig.has_read.acquire(timeout=LIMIT_S)
    assert rig.memory.has(3, [taken[1]])
    assert taken[0].payload is None
    assert rig.state.tasks.bytes_in_memory == 4000, "groups 0, 1, 2 and 7"
