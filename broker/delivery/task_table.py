"""All tasks of a run by state, and the moves between states; every move is O(log n).

pending -> leased -> ready -> taken -> committed, and leased -> pending | dead, taken -> pending.
Policy (who may lease what, when a lease is lost) is in broker/delivery/state.py.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.contract import LedgerEntry
from broker.delivery.finished_tasks import History
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task

PENDING, LEASED, READY, TAKEN, COMMITTED, DEAD = "pending", "leased", "ready", "taken", "committed", "dead"
MOST_NODES_NAMED = 64  # the newest of those that leased a task


@dataclass(slots=True)
class Entry:
    """A living task.

    Attributes:
        attempts: leases that were not handed back.
        failures: what counts towards death.
        failed_by: the first two nodes that failed it.
    """

    task: Task
    state: str = PENDING
    attempts: int = 0
    failures: int = 0
    nodes: list[str] = field(default_factory=list[str])
    token: str = ""
    node: str = ""
    leased_at: float = 0.0
    deadline: float = 0.0
    meta: GroupMeta | None = None
    payload: object = None
    payload_bytes: int = 0
    step: int | None = None
    reason: str = ""
    filtered: bool = False
    failed_by: list[str] = field(default_factory=list[str])

    @property
    def serial(self) -> int:
        return self.task.serial

    def ledger(self, state: str | None = None) -> LedgerEntry:
        """This task's line in the ledger."""
        meta = self.meta
        return LedgerEntry(
            serial=self.serial,
            state=state or self.state,
            attempts=self.attempts,
            nodes=list(self.nodes),
            step=self.step,
            version_min=meta.version_min if meta else None,
            version_max=meta.version_max if meta else None,
            reward_mean=meta.reward_mean if meta else None,
            reason=self.reason,
            filtered=self.filtered,
        )


class LeasedTasks(dict[str, Entry]):
    """Leased tasks by token, which knows how many of them are older than a serial without looking at each."""

    def __init__(self) -> None:
        super().__init__()
        self._serials: list[int] = []  # sorted

    def __setitem__(self, token: str, entry: Entry) -> None:
        assert token not in self
        super().__setitem__(token, entry)
        insort(self._serials, entry.serial)

    def __delitem__(self, token: str) -> None:
        del self._serials[bisect_left(self._serials, self[token].serial)]
        super().__delitem__(token)

    def older_than(self, serial: int) -> int:
        """Number of leased tasks with a lower serial."""
        return bisect_left(self._serials, serial)


class TaskTable:
    """Living tasks in ordered structures, finished ones in `history`."""

    def __init__(self) -> None:
        self.living: dict[int, Entry] = {}
        self.history = History()
        self.next_serial = 0
        self.pending: list[int] = []  # heap of serials; a pending task leaves only from the top
        self.leased = LeasedTasks()
        self.ready: list[int] = []  # sorted serials
        self.steps: dict[int, list[int]] = {}  # serials taken by each uncommitted step, in the order given out
        self.bytes_held = 0
        self._accepted_groups = self._accepted_bytes = 0
        self.replaced: dict[int, int] = {}  # filtered groups of each uncommitted step that passed their place on
        self.filtered = 0
        self._passed: list[int] = []  # sorted serials of dead tasks and of replaced groups, from the oldest living on
        self._passed_gone = 0  # how many older ones there were

    def passed_before(self, serial: int) -> int:
        """Number of tasks with a lower serial that passed their place on; `serial` of a living task, or the next."""
        return self._passed_gone + bisect_left(self._passed, serial)

    def add(self, task: Task) -> None:
        """A new pending task."""
        self.living[task.serial] = Entry(task)
        heapq.heappush(self.pending, task.serial)
        self.next_serial = max(self.next_serial, task.serial + 1)

    def lease_oldest(self, node: str, token: str, now: float, deadline: float) -> Entry:
        """Move the oldest pending task to `node`; raises IndexError when there is none."""
        entry = self.living[heapq.heappop(self.pending)]
        entry.state, entry.node, entry.token = LEASED, node, token
        entry.leased_at, entry.deadline = now, deadline
        entry.attempts += 1
        entry.nodes.append(node)
        if len(entry.nodes) > MOST_NODES_NAMED:
            del entry.nodes[0]
        self.leased[token] = entry
        return entry

    def renew(self, entry: Entry, now: float, lease_s: float, max_lease_s: float) -> None:
        """A sign of life of a lease's holder; nothing moves the deadline beyond `max_lease_s` after the lease began."""
        entry.deadline = min(now + lease_s, entry.leased_at + max_lease_s)

    def hand_back(self, entry: Entry) -> None:
        """leased -> pending without counting the attempt."""
        self._end_lease(entry)
        entry.attempts -= 1
        self._requeue(entry)

    def lose(self, entry: Entry, reason: str, max_attempts: int, spared: bool = False) -> bool:
        """leased -> pending, or -> dead at the `max_attempts`-th failure unless `spared`. Returns whether it died."""
        if entry.node not in entry.failed_by and len(entry.failed_by) < 2:
            entry.failed_by.append(entry.node)
        self._end_lease(entry)
        entry.failures += 1
        entry.reason = reason
        if entry.failures < max_attempts or spared:
            self._requeue(entry)
            return False
        del self.living[entry.serial]
        self.history.add(entry.ledger(DEAD))
        insort(self._passed, entry.serial)
        return True

    def accept(self, entry: Entry, meta: GroupMeta, payload: object, payload_bytes: int) -> None:
        """leased -> ready."""
        self._end_lease(entry)
        entry.state = READY
        entry.meta, entry.payload, entry.payload_bytes = meta, payload, payload_bytes
        self.bytes_held += payload_bytes
        self._accepted_groups += 1
        self._accepted_bytes += payload_bytes
        insort(self.ready, entry.serial)

    def oldest_ready(self, count: int, in_order: bool) -> list[int] | None:
        """The `count` oldest ready serials, or None; `in_order`: only when no older task is pending or leased."""
        if len(self.ready) < count:
            return None
        chosen = self.ready[:count]
        if in_order and chosen:
            last = chosen[-1]
            if self.pending and self.pending[0] < last:
                return None
            if self.leased.older_than(last):
                return None
        return chosen

    def take_oldest(self, step: int, count: int) -> None:
        """The `count` oldest ready tasks -> taken by `step`."""
        chosen = self.ready[:count]
        del self.ready[:count]
        for serial in chosen:
            entry = self.living[serial]
            entry.state, entry.step = TAKEN, step
        self.steps.setdefault(step, []).extend(chosen)

    def places_taken(self, step: int) -> int:
        """Groups that `step` has taken, without those that passed their place on."""
        return len(self.steps.get(step, ())) - self.replaced.get(step, 0)

    def taken_by(self, step: int, serials: Sequence[int], what: str) -> list[Entry]:
        """Those of `serials` that `step` holds and did not filter; BrokerError when one is not living."""
        for serial in serials:
            if serial not in self.living:
                raise BrokerError(f"task {serial} cannot be {what}: it is not taken by step {step}")
        entries = [self.living[serial] for serial in dict.fromkeys(serials)]
        return [e for e in entries if e.state == TAKEN and e.step == step and not e.filtered]

    def filter(self, entry: Entry, most_replaced: int) -> bool:
        """Mark a taken group as one that trains nothing; returns whether it passed its place on."""
        assert entry.step is not None
        entry.filtered = True
        self.filtered += 1
        replaced = self.replaced.get(entry.step, 0)
        if replaced >= most_replaced:
            return False
        self.replaced[entry.step] = replaced + 1
        insort(self._passed, entry.serial)
        return True

    def give_up(self, entry: Entry) -> None:
        """taken -> pending: its group is dropped and generated again."""
        assert entry.step is not None
        self.steps[entry.step].remove(entry.serial)
        self._drop_group(entry)
        entry.meta = None
        entry.step = None
        self._requeue(entry)

    def commit(self, step: int) -> int:
        """taken -> committed for everything taken by steps <= `step`. Returns how many groups."""
        count = 0
        for taken_step in [s for s in self.steps if s <= step]:
            self.replaced.pop(taken_step, None)
            for serial in self.steps.pop(taken_step):
                entry = self.living.pop(serial)
                self._drop_group(entry)
                self.history.add(entry.ledger(COMMITTED))
                count += 1
        self._forget_passed()
        return count

    def _forget_passed(self) -> None:
        """Nobody asks about serials below the oldest living one again; so this does not grow with the run."""
        gone = bisect_left(self._passed, min(self.living, default=self.next_serial))
        del self._passed[:gone]
        self._passed_gone += gone

    def bytes_expected(self) -> float:
        """Bytes held once every leased group has arrived, at the mean size so far."""
        return self.bytes_held + len(self.leased) * self._accepted_bytes / max(1, self._accepted_groups)

    def older_in_progress(self, serial: int) -> int:
        """Number of leased and ready tasks older than `serial`."""
        return bisect_left(self.ready, serial) + self.leased.older_than(serial)

    def line(self, serial: int) -> LedgerEntry:
        """The ledger's line of one task; raises KeyError when it was never offered."""
        entry = self.living.get(serial)
        return entry.ledger() if entry is not None else self.history.get(serial)

    def ledger(self) -> list[LedgerEntry]:
        """Every task, ascending by serial."""
        finished = [self.history.get(serial) for serial in self.history.serials()]
        return sorted([*finished, *(e.ledger() for e in self.living.values())], key=lambda e: e.serial)

    def _end_lease(self, entry: Entry) -> None:
        del self.leased[entry.token]
        entry.token = entry.node = ""

    def _requeue(self, entry: Entry) -> None:
        entry.state = PENDING
        heapq.heappush(self.pending, entry.serial)

    def _drop_group(self, entry: Entry) -> None:
        self.bytes_held -= entry.payload_bytes
        entry.payload, entry.payload_bytes = None, 0
