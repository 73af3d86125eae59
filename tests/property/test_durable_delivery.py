"""The delivery state machine again, with a broker that is killed at any moment and recovers from its store.

Everything that is true of the reference stays true across crashes: the rules and invariants are those of Delivery.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from broker.contract import RunInfo
from broker.delivery.learner_fencing import lasting
from broker.delivery.logs import EventLog
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import TaskRecord
from broker.journal.file_store import open_file_store
from broker.journal.group_memory import TEND_S, GroupMemory
from broker.journal.journal import Journal
from broker.journal.recovery import recover
from broker.journal.store import Store, StoredPayload
from tests.property.test_delivery_state import PAYLOAD_BYTES, Delivery
from tests.rigs.waiting import LIMIT_S, until

RETAIN_STEPS = 2
MEMORY_BYTES = 2 * PAYLOAD_BYTES  # most groups are in the store only


def everything(state: DeliveryState) -> dict[str, Any]:
    """All of a state that has to survive, in plain values."""
    tasks = state.tasks
    return {
        "tasks": {s: {n: getattr(e, n) for n in TaskRecord.__struct_fields__} for s, e in tasks.living.items()},
        "ledger": state.ledger(),
        "pending": sorted(tasks.pending),
        "ready": tasks.ready,
        "steps": tasks.steps,
        "freed": (tasks.freed, tasks.freed_earlier, tasks.freed_by_step),
        "filtered": tasks.filtered,
        "bytes": tasks.bytes_held,
        "accepted_groups": (tasks.accepted_groups, tasks.accepted_bytes),
        "accepted": list(state.accepted.items()),
        "marks": (state.first_step, state.committed_step),
        "learner": state.learner.report and lasting(state.learner.report),
        "nodes": {n: (x.report.pid, x.has_leased, sorted(x.tokens)) for n, x in state.fleet.nodes.items()},
        "retained": {s: [(k.task, k.nodes[-1], k.meta, k.filtered) for k in g] for s, g in tasks.retained.items()},
        "groups": {serial: stored_payload(state, serial) for serial, e in tasks.living.items() if e.stored},
    }


def stored_payload(state: DeliveryState, serial: int) -> bytes:
    held = state.tasks.living[serial].payload
    data = held.read() if isinstance(held, StoredPayload) else held
    assert isinstance(data, bytes)
    return data


class DurableDelivery(Delivery):
    """Delivery over a journaled state; a crash leaves the store as it is and everything else is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    def new_state(self, run: RunInfo, new_token: Callable[[], str]) -> DeliveryState:
        self.run, self.new_token = msgspec.structs.replace(run, memory_bytes=MEMORY_BYTES), new_token
        return self.open()

    def open(self) -> DeliveryState:
        return self.recovered(open_file_store(self.folder, "property"), "everysec")

    def recovered(self, store: Store, sync: Literal["fsync", "everysec"]) -> DeliveryState:
        """The state in the store, as a broker that starts finds it; snapshots are taken all the time."""
        self.journal, events = Journal(store, sync, segment_bytes=1 << 12), EventLog(wall_clock=lambda: 0)
        self.durable = DeliveryState(self.run, lambda: self.now, self.new_token, events, self.journal, RETAIN_STEPS)
        self.found = recover(self.journal, self.durable)
        self.forget_memory()
        self.asked_for = -1
        self.has_read = threading.Semaphore(0)
        self.memory = GroupMemory(self.durable, self.journal, self.has_read.release)
        return self.durable

    def forget_memory(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()

    @rule()
    def memory_is_kept_within_its_bound(self) -> None:
        self.settle()
        self.memory.tend(self.memory_time())
        tasks = self.durable.tasks
        own = sum(tasks.living[s].payload_bytes for s in tasks.steps.get(self.asked_for, ()))
        assert tasks.bytes_in_memory <= self.run.memory_bytes + own
        assert not tasks.store_lags, "all of them are written"

    @rule()
    def the_learner_gets_a_step_that_is_in_the_store(self) -> None:
        for step, serials in self.durable.tasks.steps.items():
            entries = [self.durable.tasks.living[serial] for serial in serials]
            self.asked_for = step
            while not self.memory.has(step, entries):
                assert self.has_read.acquire(timeout=LIMIT_S)
            assert all(entry.in_memory for entry in entries)

    def memory_time(self) -> float:
        self.tended = getattr(self, "tended", 0.0) + 2 * TEND_S
        return self.tended

    @invariant()
    def bytes_in_memory_are_those_of_the_groups_there(self) -> None:
        if hasattr(self, "durable"):
            found = sum(e.payload_bytes for e in self.durable.tasks.living.values() if e.in_memory)
            assert self.durable.tasks.bytes_in_memory == found

    @rule(good_order=st.booleans())
    def the_broker_dies_and_comes_back(self, good_order: bool) -> None:
        before = everything(self.durable)
        self.settle()
        self.end(good_order)
        self.state = self.open()
        assert self.found.torn == ""
        after = everything(self.durable)
        for what, value in before.items():
            assert after[what] == value, what
        assert all(e.deadline > self.now for e in self.state.tasks.leased.values())

    def end(self, good_order: bool) -> None:
        if good_order:
            assert self.journal.close()
            return
        copy = Path(tempfile.mkdtemp())
        shutil.copytree(self.folder, copy, dirs_exist_ok=True)
        self.journal.close()
        shutil.rmtree(self.folder)
        self.folder = copy

    @rule()
    def a_turn_ends(self) -> None:
        self.journal.end_turn()

    def settle(self) -> None:
        """Until everything recorded is written."""
        last = self.journal.end_turn()
        until(lambda: self.journal.acknowledged >= last, "acknowledged records", every_s=0.0005)

    def teardown(self) -> None:
        self.forget_memory()
        if hasattr(self, "journal"):
            self.journal.close()
        shutil.rmtree(self.folder, ignore_errors=True)


DurableDelivery.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDurableDelivery = DurableDelivery.TestCase
