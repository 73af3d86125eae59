"""The records of the journal: moves of the delivery state, snapshots of all of it, and lines of finished tasks.

A snapshot and the moves after it give the state back. Structs are keyed and tagged as on the wire: fields are only
appended and have defaults. SCHEMA changes when an older reader would misread a store.
"""

import zlib
from collections.abc import Sequence

import msgspec

from broker.contract import LearnerReport, LedgerEntry, NodeReport
from broker.delivery.moves import AnyMove, Marks, Statistics
from broker.delivery.tables import Move
from broker.delivery.task_table import TaskRecord
from broker.journal.store import Location
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
    """A node that has joined."""

    report: NodeReport
    has_leased: bool = False


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The state without finished tasks, which are the first `history_bytes` of the history file.

    Attributes:
        steps: serials that each uncommitted step took, in the order given out.
        replaced: TaskTable.freed_by_step.
        passed, passed_gone: TaskTable.freed, TaskTable.freed_earlier.
        accepted: (token, node) of accepted results, oldest first.
        kept: TaskTable.retained.
        owners: public key of the credential that speaks for each node id.
    """

    schema: int
    next_serial: int
    tasks: list[SavedTask]
    steps: dict[int, list[int]]
    replaced: dict[int, int]
    passed: list[int]
    filtered: int
    accepted: list[tuple[str, str]]
    kept: dict[int, list[KeptGroup]]
    learner: LearnerReport | None
    nodes: list[SavedNode]
    marks: Marks
    statistics: Statistics
    replaced_learners: list[str] = []
    job_ended: bool = False
    history_bytes: int = 0
    accepted_groups: int = 0
    accepted_bytes: int = 0
    owners: dict[str, str] = {}
    passed_gone: int = 0


class FinishedTasks(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record of the history file: `packed` is a zlib stream of the entries in MessagePack."""

    entries: list[LedgerEntry] = []  # older stores have them unpacked
    packed: bytes = b""


AnyRecord = AnyMove | Snapshot

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)
_finished = msgspec.msgpack.Decoder(FinishedTasks)
_entries = msgspec.msgpack.Decoder(list[LedgerEntry])


def encode(record: Move | Snapshot) -> bytes:
    """The body of a record."""
    return _encoder.encode(record)


def decode(body: bytes) -> AnyRecord:
    """The record of a body. Raises msgspec.DecodeError."""
    return _decoder.decode(body)


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
