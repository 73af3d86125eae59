"""The journal of a delivery state: moves go in, the store's thread makes them durable, delayed replies are released.

In one turn of the broker's loop moves are recorded as they happen. Then `end_turn` hands them to the thread and returns
the sequence number that every promise of this turn waits for.

While the thread syncs one batch the next one gathers, so the number of syncs adapts to the store. A store that cannot
be written is waited for: the batch is tried again, and nothing behind it is acknowledged meanwhile.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, cast

from broker.contract import StoreStatus
from broker.delivery.moves import Closed, Statistics
from broker.delivery.state import DeliveryState, Move, Recorder
from broker.delivery.task_table import READY, Entry, StoredPayload
from broker.journal import records
from broker.journal.store import Compaction, Record, Store, StoreBehind, StoreFailed, StoreFenced, StoreUnavailable
from common.process.wake import Wake

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 128 << 20
STATISTICS_S = 1.0
CLOSE_S = 30.0
Sync = Literal["fsync", "everysec"]
RETRY_S = 0.5
SYNC_EVERY_S = 1.0
BATCH_BYTES = 32 << 20


class Journal(Recorder):
    """Records nothing until `begin`, so that a state can be replayed into existence with it.

    `sync` says when records are durable. The log is compacted when it has grown by `segment_bytes`, and by as many
    records as a snapshot has tasks. So snapshots cost the same per record, however large groups are.
    """

    def __init__(self, store: Store, sync: Sync, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.store = store
        self._segment_bytes = segment_bytes
        self._state: DeliveryState | None = None  # nothing is recorded without one
        self._written_bytes = self._written_records = 0
        self._statistics: Statistics | None = None
        self._statistics_at = 0.0
        self._pending = False
        self._told_stuck = ""
        self.wake = Wake()  # for those who wait until `acknowledged` or `stuck` changes
        self._writer = Writer(store, sync, self.wake.send)

    def begin(self, state: DeliveryState, seq: int, history: int) -> None:
        """Record from now on, behind `seq`, beginning with a snapshot; `history` is the size of the history."""
        self._state = state
        self.seq = seq
        state.open(seq)
        self._writer.start(seq, history)
        self._compact(state)

    def record(self, move: Move) -> None:
        if self._state is not None:
            self._put(records.encode(move))

    def record_group(self, move: Move, payload: object) -> StoredPayload:
        """Recorder; `payload` is anything with a buffer."""
        stored = StoredPayload(self.store.read)
        if self._state is not None:
            self._put(records.encode(move), memoryview(cast(bytes, payload)), stored)
        return stored

    def end_turn(self) -> int:
        """Send off what was recorded; returns the last sequence number. Raises StoreFailed, once nothing is kept."""
        writer = self._writer
        state = self._state
        if state is None:
            return self.seq
        if isinstance(writer.failure, StoreFenced):
            raise writer.failure
        if writer.failure is not None:
            raise StoreFailed(f"{self.store.name} cannot be written: {writer.failure}") from writer.failure
        self._tell_if_stuck(state)
        if writer.behind:
            self._write_again(state)
        waits = bool(self._told_stuck)  # statistics and snapshots would only fill the queue meanwhile
        if (now := time.monotonic()) >= self._statistics_at and not waits:
            self._statistics_at = now + STATISTICS_S
            statistics = Statistics.of(state)
            if statistics != self._statistics:
                self._statistics = statistics
                self.record(statistics)
        if self._pending:
            self._pending = False
            grown = self._written_bytes >= self._segment_bytes and self._written_records >= len(state.tasks.living)
            if grown and not waits:
                self._compact(state)
            writer.kick()
        return self.seq

    @property
    def acknowledged(self) -> int:
        return self._writer.acknowledged

    @property
    def stuck(self) -> str:
        return self._writer.stuck

    def status(self) -> StoreStatus:
        """The store's status for people; the caller that recovered the store adds `recovery_s`."""
        return StoreStatus(self.store.size_bytes(), round(self._writer.sync_s, 5), stuck=self.stuck)

    def close(self) -> bool:
        """Write everything, mark the end, close the store; returns whether all of it is on the disk."""
        whole = True
        if self._state is not None:
            if not self.stuck:
                self.record(Closed())
            self._state = None
            whole = self._writer.close(CLOSE_S)
            if not whole:
                logger.error("%s could not be written to its end; nothing beyond was acknowledged", self.store.name)
        self.store.close()
        return whole

    def _put(self, body: bytes, payload: memoryview | None = None, stored: StoredPayload | None = None) -> None:
        self.seq += 1
        self._written_records += 1
        self._written_bytes += len(body) + (len(payload) if payload is not None else 0)
        self._pending = True
        self._writer.put(Record(self.seq, body, payload, stored))

    def _tell_if_stuck(self, state: DeliveryState) -> None:
        before = self._told_stuck
        self._told_stuck = self.stuck
        if self._told_stuck and not before:
            state.event_log.add("store_full", reason=self._told_stuck)
        elif before and not self._told_stuck:
            state.event_log.add("store_writable")

    def _write_again(self, state: DeliveryState) -> None:
        """The store has lost acknowledged records: write the whole state, and the groups that are in memory."""
        try:
            lost, again = lose_payloads(state, self.store)
        except StoreUnavailable:
            return  # the writer tries again, and this is called again
        payloads = [
            Record(self.seq + i, b"", memoryview(cast(bytes, entry.payload)), entry.stored)
            for i, entry in enumerate(again, 1)
        ]
        self.seq += len(payloads)
        state.event_log.add("store_rewritten", groups_written=len(payloads), groups_lost=len(lost))
        logger.warning("%s: %d groups are written again, %d are lost", self.store.name, len(payloads), len(lost))
        self._writer.rewrite(self._captured(state, payloads))

    def _compact(self, state: DeliveryState) -> None:
        self._writer.put(self._captured(state))
        self._writer.kick()

    def _captured(self, state: DeliveryState, rewritten: Sequence[Record] | None = None) -> records.PendingSnapshot:
        self.seq += 1
        self._written_bytes = self._written_records = 0
        return records.PendingSnapshot(state, self.seq, rewritten)


class Writer:
    """Writes what `put` was given, in order of the sequence numbers; `notify` is called after every change below."""

    def __init__(self, store: Store, sync: Sync, notify: Callable[[], None]) -> None:
        # sequence numbers up to which records are as durable as `sync` promises, and synced
        self.acknowledged = self.synced = 0
        self.stuck = ""  # why nothing can be written at the moment, '' when it can
        self.failure: Exception | None = None  # why nothing will be written any more
        self.sync_s = 0.0  # how long syncing took lately, on average
        self._store = store
        self._notify = notify
        self._sync: Sync = sync
        self._history = 0
        self._queue: deque[Record | Compaction] = deque()
        self._rewritten = 0  # a rewrite has replaced everything before this sequence number
        self._lacking = -1  # the item at which the store was found to be behind
        self._wake = threading.Event()
        self._closing = False
        self._next_sync = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self, seq: int, history: int) -> None:
        """Begin to write behind `seq`, the store's last record; `history` is the size of the store's history."""
        self.acknowledged = self.synced = seq
        self._history = history
        self._thread.start()

    def put(self, item: Record | Compaction) -> None:
        """Queue an item; it is written after the next `kick`, or sooner."""
        self._queue.append(item)

    @property
    def behind(self) -> bool:
        """Whether the store has lost records; nothing is written until `rewrite`, unless it has them again."""
        return self._lacking >= self._rewritten

    def rewrite(self, compaction: Compaction) -> None:
        """Write this whole compaction in place of everything that was queued before, because the store is behind."""
        self._queue.append(compaction)
        self._rewritten = compaction.seq  # the thread may be taking items now, so it drops the former ones itself
        self._wake.set()

    def kick(self) -> None:
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Write and sync what is queued, then end; returns whether all of it was, in time."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.failure is None and not self._queue

    def _run(self) -> None:
        try:
            while not (self._closing and not self._queue and self.synced == self.acknowledged):
                unsynced = self.synced != self.acknowledged
                wait_s = max(0.0, self._next_sync - time.monotonic()) if unsynced else self._store.idle_s
                idle = False
                if not self._queue and not (self._closing and unsynced):
                    idle = not self._wake.wait(wait_s)
                self._wake.clear()
                if idle and not unsynced:
                    self._patiently(self._store.idle, self.acknowledged)
                self._step()
        except Exception as error:
            self.failure = error
            logger.exception("the store cannot be written any more")
        finally:
            self._notify()

    def _step(self) -> None:
        batch: list[Record] = []
        size = 0
        while self._queue and size < BATCH_BYTES and isinstance(item := self._queue[0], Record):
            batch.append(item)
            size += len(item.payload or b"")
            self._queue.popleft()
        if batch:
            self._patiently(lambda: self._write(batch), batch[-1].seq)
            self._notify()
        elif self._queue:
            item = self._queue.popleft()
            assert isinstance(item, Compaction)
            self._patiently(self._sync_now, self.acknowledged)
            self._patiently(lambda: self._compact(item), item.seq)
            self._notify()
        if self.synced != self.acknowledged and (self._closing or time.monotonic() >= self._next_sync):
            self._patiently(self._sync_now, self.acknowledged)
            self._next_sync = time.monotonic() + SYNC_EVERY_S

    def _patiently(self, work: Callable[[], None], seq: int) -> None:
        """Repeat the work on item `seq` until the store takes it, or a rewrite replaces it."""
        while seq >= self._rewritten:
            try:
                work()
            except (StoreUnavailable, StoreBehind) as error:
                self._lacking = seq if isinstance(error, StoreBehind) else -1
                if not self.stuck:
                    self.stuck = str(error)
                    logger.error("the store cannot be written: %s; nothing is acknowledged until it can", error)
                self._notify()
                if self._closing:
                    raise
                time.sleep(RETRY_S)
            else:
                if self.stuck:
                    logger.warning("the store can be written again")
                self.stuck = ""
                self._lacking = -1  # the server that has every record may have come back
                return

    def _write(self, batch: list[Record]) -> None:
        begun = time.perf_counter()
        fsync = self._sync == "fsync"
        self._store.append(batch, synced=self.synced, sync=fsync)
        if fsync:
            self._count_sync(begun)
            self.synced = batch[-1].seq
        elif self.synced == self.acknowledged:
            self._next_sync = time.monotonic() + SYNC_EVERY_S
        self.acknowledged = batch[-1].seq

    def _sync_now(self) -> None:
        if self.synced != self.acknowledged:
            begun = time.perf_counter()
            self._store.sync()
            self._count_sync(begun)
            self.synced = self.acknowledged

    def _compact(self, compaction: Compaction) -> None:
        self._history = self._store.compact(compaction, self._history)
        self.synced = self.acknowledged = compaction.seq

    def _count_sync(self, begun: float) -> None:
        self.sync_s += 0.1 * (time.perf_counter() - begun - self.sync_s)


def lose_payloads(state: DeliveryState, store: Store) -> tuple[list[int], list[Entry]]:
    """Groups that the store has lost become pending, unless the broker has them in memory.

    Redis may fail over to a replica that lacks what was acknowledged. A group that a step took stays with the step,
    since the learner may have it; `take` gives it up when asked for it. The caller compacts the log afterwards, so
    these changes need no records. Returns the serials that are pending again, and the tasks whose groups must be
    written again. Raises StoreUnavailable, changing nothing.
    """
    tasks = state.tasks
    retained = [entry for group in tasks.retained.values() for entry in group]
    stored = [entry.stored for entry in [*tasks.living.values(), *retained]]
    missing = store.missing([s.location for s in stored if s is not None and s.location is not None])

    def is_lost(entry: Entry) -> bool:
        stored = entry.stored
        return stored is not None and (stored.location is None or stored.location in missing)

    lost: list[int] = []
    again: list[Entry] = []
    for entry in filter(is_lost, tasks.living.values()):
        if not isinstance(entry.payload, StoredPayload):
            again.append(entry)
        elif entry.state == READY:
            lost.append(entry.serial)
            tasks.ready.remove(entry.serial)
            tasks.give_up(entry)
    tasks.retained = {step: group for step, group in tasks.retained.items() if not any(map(is_lost, group))}
    return lost, again
