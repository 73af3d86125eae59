"""The records of the journal: moves of the delivery state, snapshots of all of it, and lines of finished tasks.

A snapshot and the moves after it give the state back. A snapshot is captured in the broker's loop, encoded in the
store's thread, and restored when a broker starts. Structs are keyed and tagged as on the wire: fields are only appended
and have defaults. SCHEMA changes when an older reader would misread a store.
"""

import zlib
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from itertools import chain
from operator import attrgetter

import msgspec

from broker.contract import LearnerReport, LedgerEntry, NodeReport, WeightChange, WeightRequest
from broker.delivery.moves import AnyMove, Statistics, StepCursor
from broker.delivery.state import DeliveryState, Move
from broker.delivery.task_table import COMMITTED, LEASED, PENDING, READY, Entry, Location, StoredPayload, TaskRecord
from broker.journal.store import Compaction, Record
from common.rollouts import GroupMeta, Task

SCHEMA = 1


class SavedTask(TaskRecord):
    """A task that is not finished, with the place of its group if it has one."""

    location: Location | None = None


class KeptGroup(msgspec.Struct, frozen=True):
    """A group of a committed step that is retained for a replay."""

    task: Task
    node_id: str
    meta: GroupMeta
    filtered: bool
    location: Location


class SavedNode(msgspec.Struct, frozen=True):
    report: NodeReport
    has_leased: bool = False


_RENAMED = {"freed_by_step": "replaced", "freed": "passed", "freed_earlier": "passed_gone", "retained": "kept"}


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", rename=_RENAMED):
    """The state without finished tasks, which are the first `history_bytes` of the history file.

    TaskTable and DeliveryState explain the attributes of the same names. `accepted` has (token, node), oldest first.
    """

    schema: int
    next_serial: int
    tasks: list[SavedTask]
    steps: dict[int, list[int]]
    freed_by_step: dict[int, int]
    freed: list[int]
    filtered: int
    accepted: list[tuple[str, str]]
    retained: dict[int, list[KeptGroup]]
    learner: LearnerReport | None
    nodes: list[SavedNode]
    marks: StepCursor
    statistics: Statistics
    replaced_learners: list[str] = []
    job_ended: bool = False
    history_bytes: int = 0
    accepted_groups: int = 0
    accepted_bytes: int = 0
    freed_earlier: int = 0
    openings: dict[str, int] = {}
    weight_requests: dict[str, WeightRequest] = {}
    weight_changes: list[WeightChange] = []


class FinishedTasks(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record of the history file: `packed` is a zlib stream of the entries in MessagePack."""

    entries: list[LedgerEntry] = []  # older stores have them unpacked
    packed: bytes = b""


AnyRecord = AnyMove | Snapshot

_encoder = msgspec.msgpack.Encoder()
encode: Callable[[Move | Snapshot], bytes] = _encoder.encode
decode: Callable[[bytes], AnyRecord] = msgspec.msgpack.Decoder(AnyRecord).decode
_finished = msgspec.msgpack.Decoder(FinishedTasks)
_entries = msgspec.msgpack.Decoder(list[LedgerEntry])
_SURVIVING = TaskRecord.__struct_fields__
_surviving = attrgetter(*_SURVIVING)
_OF_TABLE = (
    "next_serial", "steps", "freed_by_step", "freed", "freed_earlier", "filtered", "accepted_groups", "accepted_bytes",
)  # fmt: skip


def encode_finished(entries: Sequence[LedgerEntry]) -> bytes:
    """The body of a record of the history file; compression saves nine tenths."""
    return _encoder.encode(FinishedTasks(packed=zlib.compress(_encoder.encode(entries), 1)))


def decode_finished(body: bytes) -> list[LedgerEntry]:
    """Ledger entries of one record of the history file. Raises msgspec.DecodeError."""
    record = _finished.decode(body)
    if not record.packed:
        return record.entries
    try:
        return _entries.decode(zlib.decompress(record.packed))
    except zlib.error as error:
        raise msgspec.DecodeError(str(error)) from error


class PendingSnapshot(Compaction):
    """A copy of the state. The places of its newest groups are only known once the store's thread has written them."""

    def __init__(self, state: DeliveryState, seq: int, rewritten: Sequence[Record] | None = None) -> None:
        self.seq = seq
        self.rewritten = rewritten
        tasks = state.tasks
        self._tasks = [copy(entry) for entry in tasks.living.values()]  # all that the broker's loop waits for
        self._retained = {step: list(entries) for step, entries in tasks.retained.items()}
        self._history = tasks.history.copy() if rewritten is not None else None  # there may be millions in it
        self._finished = [] if rewritten is not None else [tasks.history.get(serial) for serial in tasks.finished]
        tasks.finished = []
        self._base = Snapshot(
            schema=SCHEMA,
            **{name: deepcopy(getattr(tasks, name)) for name in _OF_TABLE},
            tasks=[],
            accepted=list(state.accepted.items()),
            retained={},
            learner=state.learner.report,
            replaced_learners=sorted(state.learner.replaced),
            job_ended=state.learner.job_ended,
            nodes=[SavedNode(n.report, n.has_leased) for n in state.fleet.nodes.values()],
            marks=StepCursor(state.first_step, state.committed_step),
            statistics=Statistics.of(state),
            openings=dict(state.openings),
            weight_requests=dict(state.weight_requests),
            weight_changes=list(state.weight_changes),
        )

    def finished(self) -> bytes | None:
        history = self._history
        entries = self._finished if history is None else [history.get(serial) for serial in history.serials()]
        return encode_finished(entries) if entries else None

    def snapshot(self, history: int) -> bytes:
        tasks = [SavedTask(*_surviving(entry), location=_place(entry.stored)) for entry in self._tasks]
        retained = {step: [_kept(entry) for entry in entries] for step, entries in self._retained.items()}
        return encode(msgspec.structs.replace(self._base, tasks=tasks, retained=retained, history_bytes=history))

    def wanted(self) -> list[Location]:
        entries = chain(self._tasks, *self._retained.values())
        return [place for entry in entries if (place := _place(entry.stored)) is not None]


def restore(state: DeliveryState, snapshot: Snapshot, read: Callable[[Location], bytes]) -> None:
    """Fill an empty state, except for its history; `read` gives the payload at a place of the store."""
    tasks = state.tasks
    for node in snapshot.nodes:
        state.fleet.join(node.report, state.clock()).has_leased = node.has_leased
    for task in snapshot.tasks:
        entry = Entry(**{name: getattr(task, name) for name in _SURVIVING})
        tasks.living[entry.serial] = entry
        if task.location is not None:
            stored = StoredPayload(read, task.location)
            tasks.put_group(entry, stored, task.location.length, stored)
        if entry.state == LEASED:
            tasks.leased[entry.token] = entry
            if entry.node in state.fleet.nodes:
                state.fleet.nodes[entry.node].tokens.add(entry.token)
    for name in _OF_TABLE:
        setattr(tasks, name, getattr(snapshot, name))
    tasks.pending = sorted(s for s, e in tasks.living.items() if e.state == PENDING)  # a sorted list is a heap
    tasks.ready = sorted(s for s, e in tasks.living.items() if e.state == READY)
    for step, groups in snapshot.retained.items():
        tasks.retained[step] = []
        for group in groups:
            entry = Entry(group.task, COMMITTED, nodes=[group.node_id], meta=group.meta, step=step)
            entry.filtered = group.filtered
            entry.stored = StoredPayload(read, group.location)
            tasks.retained[step].append(entry)
    state.accepted.update(snapshot.accepted)
    state.openings = snapshot.openings
    state.weight_requests = snapshot.weight_requests
    state.weight_changes = snapshot.weight_changes
    state.learner.report = snapshot.learner
    state.learner.replaced = set(snapshot.replaced_learners)
    state.learner.job_ended = snapshot.job_ended
    snapshot.marks.apply(state)
    snapshot.statistics.apply(state)


def _kept(entry: Entry) -> KeptGroup:
    assert entry.meta is not None
    return KeptGroup(entry.task, entry.nodes[-1], entry.meta, entry.filtered, _location(entry.stored))


def _place(stored: StoredPayload | None) -> Location | None:
    return None if stored is None else _location(stored)


def _location(stored: StoredPayload | None) -> Location:
    assert stored is not None and stored.location is not None
    return stored.location
