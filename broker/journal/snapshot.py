"""Snapshots of a delivery state: taken in the broker's loop, finished in the store's thread, read at a restart."""

from collections.abc import Callable

import msgspec

from broker.delivery.moves import Marks, Statistics
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import COMMITTED, LEASED, PENDING, READY, Entry, TaskRecord
from broker.journal.records import SCHEMA, KeptGroup, SavedNode, SavedTask, Snapshot
from broker.journal.store import Location, StoredPayload

_SURVIVING = TaskRecord.__struct_fields__


class Captured:
    """A copy of the state. The places of its newest groups are only known once the store's thread has written them."""

    def __init__(self, state: DeliveryState) -> None:
        tasks = state.tasks
        self._tasks = [(_saved(entry), entry.stored) for entry in tasks.living.values()]
        self._retained = {step: list(entries) for step, entries in tasks.retained.items()}
        self.finished = [tasks.history.get(serial) for serial in tasks.finished]
        tasks.finished = []
        self._base = Snapshot(
            schema=SCHEMA,
            next_serial=tasks.next_serial,
            tasks=[],
            steps={step: list(serials) for step, serials in tasks.steps.items()},
            replaced=dict(tasks.freed_by_step),
            passed=list(tasks.freed),
            filtered=tasks.filtered,
            accepted=list(state.accepted.items()),
            kept={},
            learner=state.learner.report,
            replaced_learners=sorted(state.learner.replaced),
            job_ended=state.learner.job_ended,
            nodes=[SavedNode(n.report, n.has_leased) for n in state.fleet.nodes.values()],
            marks=Marks(state.first_step, state.committed_step),
            statistics=Statistics.of(state),
            accepted_groups=tasks.accepted_groups,
            accepted_bytes=tasks.accepted_bytes,
            owners=dict(state.owners),
            passed_gone=tasks.freed_earlier,
        )

    def snapshot(self, history_bytes: int) -> Snapshot:
        """The record, once all records before it have been written."""
        tasks = [task if stored is None else _located(task, stored) for task, stored in self._tasks]
        kept = {step: [_kept(entry) for entry in entries] for step, entries in self._retained.items()}
        return msgspec.structs.replace(self._base, tasks=tasks, kept=kept, history_bytes=history_bytes)

    def locations(self) -> list[Location]:
        """Places of all groups that may still be needed."""
        retained = [entry.stored for entries in self._retained.values() for entry in entries]
        return [_location(stored) for stored in [s for _, s in self._tasks] + retained if stored is not None]


def restore(state: DeliveryState, snapshot: Snapshot, stored_at: Callable[[Location], StoredPayload]) -> None:
    """Fill an empty state, except for its history; `stored_at` gives the payload at a place of the store."""
    tasks = state.tasks
    tasks.next_serial = snapshot.next_serial
    tasks.steps = {step: list(serials) for step, serials in snapshot.steps.items()}
    tasks.freed_by_step = dict(snapshot.replaced)
    tasks.filtered = snapshot.filtered
    tasks.freed, tasks.freed_earlier = list(snapshot.passed), snapshot.passed_gone
    for node in snapshot.nodes:
        state.fleet.join(node.report, state.clock()).has_leased = node.has_leased
    for task in snapshot.tasks:
        entry = Entry(**{name: getattr(task, name) for name in _SURVIVING})
        tasks.living[entry.serial] = entry
        if task.location is not None:
            stored = stored_at(task.location)
            tasks.put_group(entry, stored, task.location.length, stored)
        if entry.state == LEASED:
            tasks.leased[entry.token] = entry
            if entry.node in state.fleet.nodes:
                state.fleet.nodes[entry.node].tokens.add(entry.token)
    tasks.accepted_groups, tasks.accepted_bytes = snapshot.accepted_groups, snapshot.accepted_bytes
    tasks.pending = sorted(s for s, e in tasks.living.items() if e.state == PENDING)  # a sorted list is a heap
    tasks.ready = sorted(s for s, e in tasks.living.items() if e.state == READY)
    for step, groups in snapshot.kept.items():
        tasks.retained[step] = [_retained(group, step, stored_at(group.location)) for group in groups]
    state.accepted.update(snapshot.accepted)
    state.owners.update(snapshot.owners)
    state.learner.report, state.learner.replaced = snapshot.learner, set(snapshot.replaced_learners)
    state.learner.job_ended = snapshot.job_ended
    snapshot.marks.apply(state)
    snapshot.statistics.apply(state)


def _saved(entry: Entry) -> SavedTask:
    return SavedTask(**{name: getattr(entry, name) for name in _SURVIVING})


def _located(task: SavedTask, stored: object) -> SavedTask:
    task.location = _location(stored)
    return task


def _kept(entry: Entry) -> KeptGroup:
    assert entry.meta is not None
    return KeptGroup(entry.task, entry.nodes[-1], entry.meta, entry.filtered, _location(entry.stored))


def _retained(group: KeptGroup, step: int, stored: StoredPayload) -> Entry:
    return Entry(
        group.task,
        COMMITTED,
        nodes=[group.node_id],
        meta=group.meta,
        step=step,
        filtered=group.filtered,
        stored=stored,
    )


def _location(stored: object) -> Location:
    assert isinstance(stored, StoredPayload) and stored.location is not None
    return stored.location
