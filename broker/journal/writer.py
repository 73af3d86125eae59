"""The thread that writes records to the store; the broker's loop only hands them over.

While one batch is being synced the next one gathers, so the number of syncs adapts to the store. A store that cannot be
written is waited for: the batch is tried again, and nothing behind it is acknowledged meanwhile.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from broker.journal.store import Compaction, Record, Store, StoreBehind, StoreUnavailable

logger = logging.getLogger(__name__)

Sync = Literal["fsync", "everysec"]
RETRY_S = 0.5
SYNC_EVERY_S = 1.0
BATCH_BYTES = 32 << 20


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
        """Write what is queued."""
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
