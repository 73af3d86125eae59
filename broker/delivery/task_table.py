"""All tasks of a run by state. The moves between states are in broker/delivery/moves.py."""

import heapq
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isnan

import msgspec

from broker.contract import LEDGER_LINES, LedgerEntry
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task

PENDING = "pending"
LEASED = "leased"
READY = "ready"
TAKEN = "taken"
COMMITTED = "committed"
DEAD = "dead"

# rows of History
_ABSENT, _COMMITTED, _DEAD, _FILTERED = range(4)
_NAMES = {_COMMITTED: COMMITTED, _DEAD: DEAD, _FILTERED: COMMITTED}
_NONE = -(1 << 31)
_NAN = float("nan")
_ROW = struct.Struct("<Biiiiid")  # state, attempts, step, lowest and highest version, list of nodes, mean reward
_SPARE = 9 / 8  # a bytearray that grows has so much room
_NODE_LIST_BYTES, _REASON_BYTES = 270, 170  # measured, of one each


class Location(msgspec.Struct, frozen=True):
    """Where a payload lies in the store."""

    segment: int  # number of the file; in Redis the term of the broker that wrote it
    offset: int  # first byte in the file; in Redis the sequence number of the record
    length: int
    checksum: int  # xxh3; 0 in Redis


@dataclass(slots=True, eq=False)
class StoredPayload:
    """A group's encoded common.rollouts.Group in the store; `location` is set once it has been written."""

    read_at: Callable[[Location], bytes]
    location: Location | None = None

    def read(self) -> bytes:
        """Reads a group's bytes from the store. Raises BrokerError when it cannot."""
        assert self.location is not None
        return self.read_at(self.location)


class TaskRecord(msgspec.Struct, gc=False):  # part of no cycle, and there are many
    """The part of a task that survives a restart of the broker."""

    task: Task
    state: str = PENDING
    attempts: int = 0  # leases, except those that a node returned unused
    failures: int = 0  # failed and lost leases; they count towards death
    # nodes that leased the task, in order. The list is replaced and never changed, so copies may share it.
    nodes: list[str] = []
    token: str = ""  # names its lease, and later the one that its group came under
    node: str = ""
    meta: GroupMeta | None = None
    step: int | None = None
    reason: str = ""
    filtered: bool = False
    failed_by: list[str] = []  # the first two nodes that failed it; likewise never changed


class Entry(TaskRecord):
    """A task that is not finished, or whose group is retained for a replay."""

    leased_at: float = 0.0  # monotonic seconds, as `deadline`; a lease gets new ones when the broker restarts
    deadline: float = 0.0
    payload: object = None  # the group's bytes, or what reads them
    payload_bytes: int = 0
    stored: StoredPayload | None = None  # the group's payload in the store; None without a store

    @property
    def serial(self) -> int:
        return self.task.serial

    @property
    def in_memory(self) -> bool:
        """Whether it has a group whose bytes are in memory."""
        return self.payload is not None and not isinstance(self.payload, StoredPayload)

    def ledger(self) -> LedgerEntry:
        meta = self.meta
        return LedgerEntry(
            serial=self.serial,
            state=self.state,
            attempts=self.attempts,
            nodes=list(self.nodes),
            step=self.step,
            version_min=None if meta is None else meta.version_min,
            version_max=None if meta is None else meta.version_max,
            reward_mean=None if meta is None else meta.reward_mean,
            reason=self.reason,
            filtered=self.filtered,
            source=self.task.source,
        )


class LeasedTasks(dict[str, Entry]):
    """Leased tasks by token, with their sorted serials: counting those older than a serial takes O(log n)."""

    def __init__(self) -> None:
        super().__init__()
        self._serials: list[int] = []

    def __setitem__(self, token: str, entry: Entry) -> None:
        assert token not in self
        super().__setitem__(token, entry)
        insort(self._serials, entry.serial)

    def __delitem__(self, token: str) -> None:
        del self._serials[bisect_left(self._serials, self[token].serial)]
        super().__delitem__(token)

    def older_than(self, serial: int) -> int:
        return bisect_left(self._serials, serial)


class History:
    """Ledger entries of finished tasks, by serial, in rows of 29 bytes; adding is O(1)."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._node_lists: list[tuple[str, ...]] = []  # a source and nodes, each such list once
        self._node_list_ids: dict[tuple[str, ...], int] = {}
        self._reasons: dict[int, str] = {}
        self.committed = 0
        self.dead = 0

    def __contains__(self, serial: int) -> bool:
        return 0 <= serial < len(self._rows) // _ROW.size and self._rows[serial * _ROW.size] != _ABSENT

    def add(self, entry: LedgerEntry) -> None:
        """A broker that continues a long run calls it for millions of tasks before it serves."""
        committed = entry.state == COMMITTED
        at = entry.serial * _ROW.size
        self.committed += committed
        self.dead += not committed
        if at >= len(self._rows):
            self._rows.extend(bytes(at + _ROW.size - len(self._rows)))
        nodes = (entry.source, *entry.nodes)
        node_list = self._node_list_ids.get(nodes)
        if node_list is None:
            node_list = self._node_list_ids[nodes] = len(self._node_lists)
            self._node_lists.append(nodes)
        step, lowest, highest, reward = entry.step, entry.version_min, entry.version_max, entry.reward_mean
        _ROW.pack_into(
            self._rows,
            at,
            (_FILTERED if entry.filtered else _COMMITTED) if committed else _DEAD,
            entry.attempts,
            _NONE if step is None else step,
            _NONE if lowest is None else lowest,
            _NONE if highest is None else highest,
            node_list,
            _NAN if reward is None else reward,
        )
        if entry.reason:
            self._reasons[entry.serial] = entry.reason

    def get(self, serial: int) -> LedgerEntry:
        """The entry of a finished task. Raises KeyError when there is none."""
        if serial not in self:
            raise KeyError(serial)
        row: tuple[int, int, int, int, int, int, float] = _ROW.unpack_from(self._rows, serial * _ROW.size)
        state, attempts, step, lowest, highest, node_list, reward = row
        source, *nodes = self._node_lists[node_list]
        return LedgerEntry(
            serial=serial,
            state=_NAMES[state],
            attempts=attempts,
            nodes=nodes,
            step=None if step == _NONE else step,
            version_min=None if lowest == _NONE else lowest,
            version_max=None if highest == _NONE else highest,
            reward_mean=None if isnan(reward) else reward,
            reason=self._reasons.get(serial, ""),
            filtered=state == _FILTERED,
            source=source,
        )

    def copy(self) -> "History":
        """A copy of all of it, which costs little: entries are made of the rows when they are asked for."""
        copied = History()
        copied._rows = self._rows.copy()
        copied._node_lists = self._node_lists.copy()
        copied._node_list_ids = self._node_list_ids.copy()
        copied._reasons = self._reasons.copy()
        copied.committed, copied.dead = self.committed, self.dead
        return copied

    @property
    def memory_bytes(self) -> int:
        """An estimate of what it takes."""
        texts = _NODE_LIST_BYTES * len(self._node_lists) + _REASON_BYTES * len(self._reasons)
        return int(len(self._rows) * _SPARE) + texts

    def serials(self) -> Iterator[int]:
        return (serial for serial, state in enumerate(self._rows[:: _ROW.size]) if state != _ABSENT)


class TaskTable:
    """Unfinished tasks in ordered structures, finished ones in `history`.

    Each step has a quota of slots. A dead task, or a filtered group that the step replaces, frees its slot: every later
    task then counts as one slot earlier. DeliveryState explains `retain_steps`.
    """

    def __init__(self, retain_steps: int | None = None) -> None:
        self.living: dict[int, Entry] = {}
        self.history = History()
        self.next_serial = 0
        self.pending: list[int] = []  # heap of serials; a pending task leaves only from the top
        self.leased = LeasedTasks()
        self.ready: list[int] = []  # sorted serials
        self.steps: dict[int, list[int]] = {}  # serials that each uncommitted step took, in the order given out
        self.freed: list[int] = []  # sorted serials of tasks that freed their slot, from the oldest unfinished task on
        self.freed_earlier = 0  # how many older tasks freed theirs
        self.freed_by_step: dict[int, int] = {}  # filtered groups of each uncommitted step that freed their slot
        self.filtered = 0
        self.bytes_held = 0  # size of all groups that are not committed
        self.bytes_in_memory = 0
        self.store_lags = False  # groups come faster than the store takes them, and fill the memory
        self.accepted_groups = 0
        self.accepted_bytes = 0
        self.retain_steps = retain_steps
        self.retained: dict[int, list[Entry]] = {}  # tasks of each retained step, in the order given out
        # serials that ended since the history file was last written; empty without a store
        self.finished: list[int] = []

    def has_ready(self, count: int, in_order: bool) -> bool:
        """Whether `count` groups, 1 or more, are ready; with `in_order`, no older task may be pending or leased."""
        if len(self.ready) < count or not in_order:
            return len(self.ready) >= count
        last = self.ready[count - 1]
        return not (self.pending and self.pending[0] < last) and not self.leased.older_than(last)

    def slots_filled(self, step: int) -> int:
        """Groups that `step` has taken, without those that freed their slot."""
        return len(self.steps.get(step, ())) - self.freed_by_step.get(step, 0)

    def taken_by(self, step: int, serials: Sequence[int], action: str) -> list[Entry]:
        """Those of `serials` that `step` took and did not filter. Raises BrokerError for a finished or unknown one."""
        for serial in serials:
            if serial not in self.living:
                raise BrokerError(f"task {serial} cannot be {action}: it is not taken by step {step}")
        entries = [self.living[serial] for serial in dict.fromkeys(serials)]
        return [e for e in entries if e.state == TAKEN and e.step == step and not e.filtered]

    def bytes_expected(self) -> float:
        """Bytes of groups once every leased group has arrived, at the mean size so far."""
        return self.bytes_held + len(self.leased) * self.accepted_bytes / max(1, self.accepted_groups)

    def line(self, serial: int) -> LedgerEntry:
        """The ledger's line of one task. Raises KeyError when it was never offered."""
        entry = self.living.get(serial)
        return entry.ledger() if entry is not None else self.history.get(serial)

    def known(self, first: int = 0) -> Iterator[int]:
        """Serials from `first` on, ascending; a broker that replays a run lacks those before its first step."""
        return (n for n in range(first, self.next_serial) if n in self.living or n in self.history)

    def page(self, first: int, unfinished: bool) -> list[LedgerEntry]:
        """The ledger's next LEDGER_LINES lines from task `first` on; `unfinished`: only tasks that are not finished."""
        serials = sorted(serial for serial in self.living if serial >= first) if unfinished else self.known(first)
        return [self.line(serial) for serial in islice(serials, LEDGER_LINES)]

    def requeue(self, entry: Entry) -> None:
        entry.state = PENDING
        heapq.heappush(self.pending, entry.serial)

    def finish(self, entry: Entry, state: str) -> None:
        """Move a task to the history; `state` is COMMITTED or DEAD."""
        del self.living[entry.serial]
        entry.state = state
        self.history.add(entry.ledger())
        if self.retain_steps is not None:
            self.finished.append(entry.serial)

    def put_group(self, entry: Entry, payload: object, payload_bytes: int, stored: StoredPayload | None) -> None:
        """Attach the payload of a group that was just accepted."""
        entry.payload_bytes = payload_bytes
        self.hold(entry, payload)
        entry.stored = stored
        self.bytes_held += payload_bytes
        self.accepted_groups += 1
        self.accepted_bytes += payload_bytes

    def hold(self, entry: Entry, payload: object) -> None:
        """Replace what a task has of its group: the bytes, what reads them, or nothing."""
        self.bytes_in_memory -= entry.payload_bytes * entry.in_memory
        entry.payload = payload
        self.bytes_in_memory += entry.payload_bytes * entry.in_memory

    def give_up(self, entry: Entry) -> None:
        """Drop a group's payload and put its task back in the queue."""
        self.drop_payload(entry)
        entry.meta = entry.step = entry.stored = None
        entry.token = ""
        self.requeue(entry)

    def drop_payload(self, entry: Entry) -> None:
        self.bytes_held -= entry.payload_bytes
        self.hold(entry, None)
        entry.payload_bytes = 0
