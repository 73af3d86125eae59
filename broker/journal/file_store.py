"""The store in files: RUN/store with its identity, a lock, segments, payloads in the segments, and history.log."""

import contextlib
import errno
import mmap
import os
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from broker.delivery.task_table import Location, StoredPayload
from broker.journal import segments
from broker.journal.store import (
    RESTORE,
    Compaction,
    Loaded,
    PayloadUnreadable,
    Record,
    Store,
    StoreCorrupt,
    StoredRecord,
    StoreUnavailable,
)
from common.errors import UsageError
from common.process.files import FULL, sync
from common.process.lock_file import AlreadyLocked, take_lock
from common.process.run_dir import write_atomic

SCHEMA = 1


class StoreInfo(msgspec.Struct, frozen=True):
    """store.json. `store_id` is made once and tells a learner that the broker still knows what it knew."""

    store_id: str
    run_name: str
    created_s: float  # Unix time
    seed: int  # the checksums' seed
    address: str = ""  # where the broker listened last
    schema: int = SCHEMA


class FileStore(Store):
    """See Store. Only the process that has the folder's `lock` may write."""

    def __init__(self, path: Path, info: StoreInfo, lock: IO[str] | None = None) -> None:
        self.path = path
        self.info = info
        self.lock = lock
        self.name = str(path)
        self.store_id = info.store_id
        self.address = info.address
        self._history = path / "history.log"
        self._number = 0
        self._file: segments.SegmentFile | None = None
        self._unsynced: list[tuple[int, int, Sequence[Record]]] = []  # offset, `synced` and records of each write
        self._sync_failed = False
        self._stage = mmap.mmap(-1, segments.STAGE_BYTES)

    def listens_at(self, address: str) -> None:
        if self.address != address:
            self.address = address
            _write_info(self.path, msgspec.structs.replace(self.info, address=address))

    def load(self) -> Loaded:
        """The newest segment whose snapshot is whole; one without was being begun when the broker died."""
        torn = ""
        for number in reversed(_segments(self.path)):
            path = self._segment(number)
            _settle(path)
            found = segments.scan(_mapped(path), self.info.seed)
            byte = f"{path}: byte"
            if found.damaged:
                raise StoreCorrupt(f"{byte} {found.end}", found.torn)
            if not found.frames:
                torn = torn or f"{byte} 0: {found.torn or 'empty'}"
                continue
            if found.torn:
                torn = f"{byte} {found.end}: {found.torn}"
            records = [StoredRecord(f.seq, f.body, _location(number, f), f"{byte} {f.offset}") for f in found.frames]
            return Loaded(records, torn)
        return Loaded([], torn)

    def history(self, size: int) -> Iterator[bytes]:
        """See Store; the size is in bytes."""
        data = _mapped(self._history) if size else b""
        offset = 0
        while offset < size:
            frame = segments.read_frame(data, offset, self.info.seed)
            if frame is None:
                where = f"{self._history}: byte {offset}"
                raise StoreCorrupt(where, "a record of finished tasks is cut off or damaged")
            yield frame.body
            offset = frame.end

    def read(self, location: Location) -> bytes:
        path = self._segment(location.segment)
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), location.length, location.offset)
        except OSError as error:
            raise PayloadUnreadable(f"{path}: byte {location.offset}: a group cannot be read: {error}") from error
        if len(data) != location.length or segments.checksum(data, self.info.seed) != location.checksum:
            what = f"byte {location.offset}: the stored group of {location.length} bytes is damaged"
            raise PayloadUnreadable(f"{path}: {what}. {RESTORE}")
        return data

    def append(self, batch: Sequence[Record], *, synced: int, sync: bool) -> None:
        """See Store. One write, and one sync."""
        file = self._file
        assert file is not None
        begun = file.size
        locations: list[tuple[StoredPayload, Location]] = []
        with self._when_full():
            file.write(self._frames(batch, begun, synced, locations))
            if sync:
                try:
                    file.sync()
                except OSError:
                    file.size = begun
                    raise
            else:
                self._unsynced.append((begun, synced, batch))
        for stored, location in locations:
            stored.location = location

    def sync(self) -> None:
        """See Store. After a failure everything is written again, to the same place.

        Linux reports a failed write to one sync only. It may have dropped the pages, and the next sync succeeds without
        them.
        """
        if self._file is None:
            return
        again = self._sync_failed
        self._sync_failed = True
        with self._when_full(*(() if again else (errno.EIO,))):
            for offset, synced, batch in self._unsynced if again else ():
                self._file.size = offset
                self._file.write(self._frames(batch, offset, synced, []))
            self._file.sync()
        self._sync_failed = False
        self._unsynced.clear()

    def compact(self, compaction: Compaction, history: int) -> int:
        """See Store. A new segment begins; older ones without a wanted payload are deleted."""
        number = max(self._number, max(_segments(self.path), default=0)) + 1
        with self._when_full():
            finished = compaction.finished()
            if finished is not None:
                history = self._append_history(history, finished)
            body = compaction.snapshot(history)
            seq = compaction.seq
            file = segments.SegmentFile(self._segment(number), self._stage)
            try:
                file.write([segments.head(seq, seq - 1, body, 0, 0, self.info.seed), body])
                file.sync()
                sync(self.path)
            except OSError:
                file.close()
                self._segment(number).unlink(missing_ok=True)
                raise
        if self._file is not None:
            self._file.close()
        self._file = file
        self._number = number
        self._unsynced.clear()
        wanted = {location.segment for location in compaction.wanted()} | {number}
        for former in _segments(self.path):
            if former not in wanted:
                self._segment(former).unlink(missing_ok=True)
        return history

    def size_bytes(self) -> int:
        sizes = 0
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes += path.stat().st_blocks * 512
        return sizes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.lock is not None:
            self.lock.close()

    def _segment(self, number: int) -> Path:
        return self.path / f"{number:08d}.log"

    def _append_history(self, size: int, body: bytes) -> int:
        """Put one record behind the first `size` bytes, durably; returns the new size. May be repeated."""
        data = segments.head(0, 0, body, 0, 0, self.info.seed) + body
        handle = os.open(self._history, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(handle, size)
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done:], size + done)
            os.fdatasync(handle)
        finally:
            os.close(handle)
        return size + len(data)

    def _frames(
        self, batch: Sequence[Record], offset: int, synced: int, locations: list[tuple[StoredPayload, Location]]
    ) -> Iterator[bytes | memoryview]:
        """The bytes to write, piece by piece. Each payload is copied right after its checksum, while caches have it."""
        seed = self.info.seed
        for record in batch:
            payload = record.payload
            length = 0
            digest = 0
            if payload is not None:
                length = len(payload)
                digest = segments.checksum(payload, seed)
            yield segments.head(record.seq, synced, record.body, length, digest, seed)
            yield record.body
            offset += segments.HEAD_BYTES + len(record.body)
            if payload is not None and record.stored is not None:
                yield payload
                locations.append((record.stored, Location(self._number, offset, length, digest)))
                offset += length

    @contextlib.contextmanager
    def _when_full(self, *others: int) -> Generator[None]:
        """Errors of a full disk, or one of `others`, mean that it may be tried again."""
        try:
            yield
        except OSError as error:
            if error.errno in (*FULL, *others):
                raise StoreUnavailable(f"{self.path}: {error.strerror}") from error
            raise


def open_file_store(path: Path, run_name: str) -> FileStore:
    """Lock the store of a run, or begin it. Raises UsageError as `lock_store` and `read_info`."""
    lock = lock_store(path)
    try:
        info = read_info(path)
        if info is None:
            info = StoreInfo(secrets.token_hex(8), run_name, time.time(), secrets.randbits(63))
            _write_info(path, info)
    except BaseException:
        lock.close()
        raise
    return FileStore(path, info, lock)


def lock_store(path: Path) -> IO[str]:
    """Keep every other broker out until the file is closed or this process ends. Raises UsageError when that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return take_lock(path / "lock")
    except AlreadyLocked as error:
        why = f"this run already has a broker: process {error.holder} writes its store"
        raise UsageError(f"{path}: {why}; stop it first, or choose another run.dir") from None
    except OSError as error:
        raise UsageError(f"{path}: the store cannot be locked: {error}") from error


def read_info(folder: Path) -> StoreInfo | None:
    """store.json, None when there is none; raises UsageError when it cannot be read, or is missing in a store."""
    path = folder / "store.json"
    try:
        info = msgspec.json.decode(path.read_bytes(), type=StoreInfo)
    except FileNotFoundError:
        if _segments(folder):  # whose checksums cannot be checked without it: they would pass for empty ones
            hint = "put the file back from a copy, or move the folder away to start with an empty store"
            raise UsageError(f"{path}: missing, and {folder} has a store; {hint}") from None
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path}: expected the identity of a store, found: {error}") from error
    if info.schema != SCHEMA:
        raise UsageError(f"{path}: schema {info.schema}, this release reads {SCHEMA}; use the release that wrote it")
    return info


def _write_info(folder: Path, info: StoreInfo) -> None:
    write_atomic(folder / "store.json", msgspec.json.encode(info))


def _segments(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.log") if p.stem.isdigit())


def _settle(path: Path) -> None:
    """Bring what a killed broker left in the page cache to the disk, and forget pages that the disk has refused."""
    with path.open("rb") as file:
        with contextlib.suppress(OSError):  # then these records are missing, as after a power cut
            os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _mapped(path: Path) -> segments.Buffer:
    """A file's content without reading it all."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _location(number: int, frame: segments.Frame) -> Location | None:
    if not (frame.payload_bytes or frame.payload_checksum):
        return None
    return Location(number, frame.payload_offset, frame.payload_bytes, frame.payload_checksum)
