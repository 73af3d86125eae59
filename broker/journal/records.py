"""What the journal records: every move of the delivery state, and snapshots of all of it.

The same rules as on the wire: structs are keyed and tagged, fields are only appended and have defaults; SCHEMA changes
when an older reader would go wrong. Replaying a snapshot and the moves after it gives the state back.
"""

import zlib
from collections.abc import Sequence

import msgspec

from broker.contract import LearnerReport, LedgerEntry, NodeReport, Waste
from broker.journal.store import Location
from common.rollouts import GroupMeta, Task

SCHEMA = 1


class Move(msgspec.Struct, frozen=True):
    """Base of all records."""


class Offered(Move, frozen=True, tag="offered"):
    """A new pending task."""

    task: Task


class Leased(Move, frozen=True, tag="leased"):
    """pending -> leased."""

    serial: int
    node: str
    token: str


class HandedBack(Move, frozen=True, tag="handed_back"):
    """leased -> pending, the attempt not counted."""

    token: str


class Lost(Move, frozen=True, tag="lost"):
    """leased -> pending or dead; `spared`: another node may still succeed."""

    token: str
    reason: str
    max_attempts: int
    spared: bool = False


class Accepted(Move, frozen=True, tag="accepted"):
    """leased -> ready; the group's payload follows the record."""

    token: str
    meta: GroupMeta


class Taken(Move, frozen=True, tag="taken"):
    """ready -> taken by `step`, in this order."""

    step: int
    serials: list[int]


class Filtered(Move, frozen=True, tag="filtered"):
    """The step that took it trains nothing on it."""

    serial: int
    most_replaced: int


class GivenUp(Move, frozen=True, tag="given_up"):
    """taken -> pending; the group is dropped."""

    serial: int


class Committed(Move, frozen=True, tag="committed"):
    """taken -> committed for everything that steps <= `step` took."""

    step: int


class Reported(Move, frozen=True, tag="reported"):
    """The learner attached, ended, or says something that outlives it."""

    report: LearnerReport


class Joined(Move, frozen=True, tag="joined"):
    """A node, or a new process of one."""

    report: NodeReport


class Left(Move, frozen=True, tag="left"):
    """A node is forgotten."""

    node_id: str


class Owned(Move, frozen=True, tag="owned"):
    """From now on this key speaks for the node id."""

    node_id: str
    public: str


class Marks(Move, frozen=True, tag="marks"):
    """Single values that answers to the learner rest on, as they were at the end of a turn."""

    first_step: int
    committed_step: int


class NodeCounts(msgspec.Struct, frozen=True):
    """What the broker has counted of a node."""

    handed_in: int
    counted: dict[str, Waste]


class Statistics(Move, frozen=True, tag="statistics"):
    """Counters that promise nothing: recorded about once a second, as they are then."""

    next_event: int = 0
    lease_expiries: int = 0
    stale_results: int = 0
    past_generated: int = 0
    past_wasted: dict[str, Waste] = {}
    nodes: dict[str, NodeCounts] = {}


class Closed(Move, frozen=True, tag="closed"):
    """The broker ended in good order: everything before this record was synced."""


class SavedTask(msgspec.Struct, frozen=True):
    """A living task; `location` of its group when it has one. Times are not saved: a lease begins anew."""

    task: Task
    state: str
    attempts: int
    failures: int
    nodes: list[str]
    token: str
    node: str
    meta: GroupMeta | None
    step: int | None
    reason: str
    filtered: bool
    location: Location | None
    failed_by: list[str] = []


class KeptGroup(msgspec.Struct, frozen=True):
    """A committed group that may still be replayed."""

    task: Task
    node_id: str
    meta: GroupMeta
    filtered: bool
    location: Location


class SavedNode(msgspec.Struct, frozen=True):
    report: NodeReport
    has_leased: bool = False


class Snapshot(Move, frozen=True, tag="snapshot"):
    """All of the state but the finished tasks, which are the first `history_bytes` of the history file.

    Attributes:
        steps: serials that each uncommitted step took, in the order given out.
        replaced: filtered groups of each uncommitted step that passed their place on.
        passed: serials that passed their place to a later one, from the oldest living task on.
        passed_gone: how many older ones there were.
        accepted: (token, node) of accepted results, oldest first.
        kept: groups of committed steps within broker.retain_steps, in the order given out.
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

    entries: list[LedgerEntry] = []  # of stores from before they were packed
    packed: bytes = b""


AnyMove = (
    Offered
    | Leased
    | HandedBack
    | Lost
    | Accepted
    | Taken
    | Filtered
    | GivenUp
    | Committed
    | Reported
    | Joined
    | Left
    | Owned
    | Marks
    | Statistics
    | Closed
    | Snapshot
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMove)
_finished = msgspec.msgpack.Decoder(FinishedTasks)
_entries = msgspec.msgpack.Decoder(list[LedgerEntry])


def encode(move: Move) -> bytes:
    """The body of a record."""
    return _encoder.encode(move)


def decode(body: bytes) -> AnyMove:
    """The other way; raises msgspec.DecodeError."""
    return _decoder.decode(body)


def encode_finished(entries: Sequence[LedgerEntry]) -> bytes:
    """The body of a record of the history file; keys and names repeat, so it takes a tenth of what it holds."""
    return _encoder.encode(FinishedTasks(packed=zlib.compress(_encoder.encode(entries), 1)))


def decode_finished(body: bytes) -> list[LedgerEntry]:
    """Ledger entries of one record of the history file; raises msgspec.DecodeError."""
    record = _finished.decode(body)
    if not record.packed:
        return record.entries
    try:
        return _entries.decode(zlib.decompress(record.packed))
    except zlib.error as error:
        raise msgspec.DecodeError(str(error)) from error
