"""The thread that writes records and syncs them; the broker's loop only hands them over.

While one batch is being synced the next one gathers, so the number of syncs adapts to the disk. A full disk is waited
out: the batch is tried again until there is room, and nothing behind it is acknowledged meanwhile.
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from broker.journal.file_store.frames import HEAD_BYTES, Location, checksum, head
from broker.journal.file_store.payloads import StoredPayload, segment_path
from broker.journal.file_store.segment_file import SegmentFile, new_stage
from common.process.files import sync

logger = logging.getLogger(__name__)

Sync = Literal["fsync", "everysec"]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RETRY_S = 0.5
SYNC_EVERY_S = 1.0
BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class Record:
    seq: int
    body: bytes
    payload: bytes | memoryview | None = None
    stored: StoredPayload | None = None  # gets its location when the payload is written


@dataclass(slots=True)
class Roll:
    """Go on in a new segment: `prepare` is called when all before it is synced and gives the body of its first record.

    `finished` is called when that is synced.
    """

    seq: int
    prepare: Callable[[], bytes]
    finished: Callable[[int], None]  # with the number of the new segment


class Writer:
    """Writes what `put` was given, in order.

    Attributes:
        acknowledged: sequence number up to which records are as durable as `sync` promises.
        synced: sequence number up to which they are synced.
        stuck: why nothing can be written at the moment, '' when it can.
        failure: why nothing will be written any more.
        sync_s: how long syncing took lately, on average.
    """

    def __init__(self, folder: Path, seed: int, sync: Sync, first_segment: int, seq: int, notify: Callable[[], None]):
        self.acknowledged = self.synced = seq
        self.stuck = ""
        self.failure: Exception | None = None
        self.sync_s = 0.0
        self._folder, self._seed, self._notify = folder, seed, notify
        self._sync: Sync = sync
        self._next_segment: int = first_segment
        self._file: SegmentFile | None = None
        self._number: int = 0
        self._stage = new_stage()
        self._queue: deque[Record | Roll] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._next_sync = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, item: Record | Roll) -> None:
        """Queue an item; it is written after the next `kick`, or sooner."""
        self._queue.append(item)

    def kick(self) -> None:
        """Write what is queued."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Write and sync what is queued, then end; returns whether all of it was, in time."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.failure is None and not self._queue

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not (self._closing and not self._queue and self.synced == self.acknowledged):
                unsynced = self.synced != self.acknowledged
                wait_s = max(0.0, self._next_sync - time.monotonic()) if unsynced else None
                if not self._queue and not (self._closing and unsynced):
                    self._wake.wait(wait_s)
                self._wake.clear()
                self._step()
        except Exception as error:
            self.failure = error
            logger.exception("the store cannot be written any more")
        finally:
            if self._file is not None:
                self._file.close()
            self._notify()

    def _step(self) -> None:
        batch: list[Record] = []
        size = 0
        while self._queue and size < BATCH_BYTES and isinstance(item := self._queue[0], Record):
            batch.append(item)
            size += len(item.payload or b"")
            self._queue.popleft()
        if batch:
            self._patiently(lambda: self._write(batch))
            self._notify()
        elif self._queue:
            item = self._queue.popleft()
            assert isinstance(item, Roll)
            self._patiently(self._sync_now)
            self._patiently(lambda: self._roll(item))
            self._notify()
        if self.synced != self.acknowledged and (self._closing or time.monotonic() >= self._next_sync):
            self._patiently(self._sync_now)
            self._next_sync = time.monotonic() + SYNC_EVERY_S

    def _patiently(self, work: Callable[[], None]) -> None:
        """Do `work` again until there is room for it."""
        while True:
            try:
                work()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not self.stuck:
                    self._notify_stuck(error)
                if self._closing:
                    raise
                time.sleep(RETRY_S)
            else:
                if self.stuck:
                    logger.warning("the store can be written again")
                self.stuck = ""
                return

    def _notify_stuck(self, error: OSError) -> None:
        self.stuck = f"{self._folder}: {error.strerror}"
        logger.error("the store cannot be written: %s; nothing is acknowledged until it can", self.stuck)
        self._notify()

    def _write(self, batch: list[Record]) -> None:
        """One write, and one sync where that is what acknowledges. Raises OSError, and may then be repeated."""
        file = self._file
        assert file is not None
        begun = file.size
        places: list[tuple[StoredPayload, Location]] = []
        file.write(self._frames(batch, begun, places))
        if self._sync == "fsync":
            try:
                self._timed_sync(file)
            except OSError:
                file.size = begun
                raise
            self.synced = batch[-1].seq
        elif self.synced == self.acknowledged:
            self._next_sync = time.monotonic() + SYNC_EVERY_S
        for stored, place in places:
            stored.location = place
        self.acknowledged = batch[-1].seq

    def _frames(
        self, batch: Sequence[Record], offset: int, places: list[tuple[StoredPayload, Location]]
    ) -> Iterator[bytes | memoryview]:
        """What to write, piece by piece: a payload is copied right after it was summed up, while caches hold it."""
        for record in batch:
            payload = record.payload
            length, digest = 0, 0
            if payload is not None:
                length, digest = len(payload), checksum(payload, self._seed)
            yield head(record.seq, self.synced, record.body, length, digest, self._seed)
            yield record.body
            offset += HEAD_BYTES + len(record.body)
            if payload is not None and record.stored is not None:
                yield payload
                places.append((record.stored, Location(self._number, offset, length, digest)))
                offset += length

    def _sync_now(self) -> None:
        if self._file is not None and self.synced != self.acknowledged:
            self._timed_sync(self._file)
            self.synced = self.acknowledged

    def _timed_sync(self, file: SegmentFile) -> None:
        begun = time.perf_counter()
        file.sync()
        self.sync_s += 0.1 * (time.perf_counter() - begun - self.sync_s)

    def _roll(self, roll: Roll) -> None:
        body = roll.prepare()
        file = SegmentFile(segment_path(self._folder, self._next_segment), self._stage)
        try:
            file.write([head(roll.seq, self.synced, body, 0, 0, self._seed), body])
            file.sync()
            sync(self._folder)
        except OSError:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._number = file, self._next_segment
        self._next_segment += 1
        self.synced = self.acknowledged = roll.seq
        roll.finished(self._number)
