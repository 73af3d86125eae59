"""The delivery state machine again, with a broker that is killed at any moment and recovers from its store.

Everything that is true of the reference stays true across crashes: the rules and invariants are those of Delivery.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from broker.contract import RunInfo
from broker.delivery.learner_fencing import lasting
from broker.delivery.logs import EventLog
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import TaskRecord
from broker.journal.file_store import open_file_store
from broker.journal.journal import Journal
from broker.journal.recovery import recover
from broker.journal.store import Store, StoredPayload
from tests.property.test_delivery_state import Delivery
from tests.rigs.waiting import until

RETAIN_STEPS = 2


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
        self.run, self.new_token = run, new_token
        return self.open()

    def open(self) -> DeliveryState:
        return self.recovered(open_file_store(self.folder, "property"), "everysec")

    def recovered(self, store: Store, sync: Literal["fsync", "everysec"]) -> DeliveryState:
        """The state in the store, as a broker that starts finds it; snapshots are taken all the time."""
        self.journal, events = Journal(store, sync, segment_bytes=1 << 12), EventLog(wall_clock=lambda: 0)
        self.durable = DeliveryState(self.run, lambda: self.now, self.new_token, events, self.journal, RETAIN_STEPS)
        self.found = recover(self.journal, self.durable)
        return self.durable

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
        if hasattr(self, "journal"):
            self.journal.close()
        shutil.rmtree(self.folder, ignore_errors=True)


DurableDelivery.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDurableDelivery = DurableDelivery.TestCase
