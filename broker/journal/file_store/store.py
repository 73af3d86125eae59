"""The store in files: RUN/store with segments, payloads in the segments, and history.log."""

import contextlib
import errno
import mmap
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from broker.journal.file_store.folder import StoreFolder, StoreInfo, new_info
from broker.journal.file_store.frames import HEAD_BYTES, Buffer, Frame, checksum, head, read_frame, scan
from broker.journal.file_store.segment_file import SegmentFile, new_stage
from broker.journal.store import (
    Compaction,
    Loaded,
    Location,
    PayloadUnreadable,
    Record,
    Store,
    StoreCorrupt,
    StoredPayload,
    StoredRecord,
    StoreUnavailable,
)
from common.process.files import sync

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStore(Store):
    """See Store. Only the process with the folder's lock may write."""

    def __init__(self, folder: StoreFolder, info: StoreInfo) -> None:
        self.folder, self.info = folder, info
        self.name, self.store_id, self.address = str(folder.path), info.store_id, info.address
        self._number = 0
        self._file: SegmentFile | None = None
        self._stage = new_stage()

    def listens_at(self, address: str) -> None:
        if self.address != address:
            self.address = address
            self.folder.write_info(msgspec.structs.replace(self.info, address=address))

    def load(self) -> Loaded:
        """The newest segment whose snapshot is whole; one without was being begun when the broker died."""
        torn = ""
        for number in reversed(self.folder.segments()):
            path = self.folder.segment(number)
            found = scan(_mapped(path), self.info.seed)
            if found.damaged:
                raise StoreCorrupt(f"{path}: byte {found.end}", found.torn)
            if not found.frames:
                torn = torn or f"{path}: byte 0: {found.torn or 'empty'}"
                continue
            if found.torn:
                torn = f"{path}: byte {found.end}: {found.torn}"
            records = [
                StoredRecord(f.seq, f.body, _location(number, f), f"{path}: byte {f.offset}") for f in found.frames
            ]
            return Loaded(records, torn)
        return Loaded([], torn)

    def history(self, size: int) -> Iterator[bytes]:
        """See Store; the size is in bytes."""
        data = _mapped(self.folder.history) if size else b""
        offset = 0
        while offset < size:
            frame = read_frame(data, offset, self.info.seed)
            if frame is None:
                where = f"{self.folder.history}: byte {offset}"
                raise StoreCorrupt(where, "a record of finished tasks is cut off or damaged")
            yield frame.body
            offset = frame.end

    def read(self, location: Location) -> bytes:
        path = self.folder.segment(location.segment)
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), location.length, location.offset)
        except OSError as error:
            raise PayloadUnreadable(f"{path}: byte {location.offset}: a group cannot be read: {error}") from error
        if len(data) != location.length or checksum(data, self.info.seed) != location.checksum:
            raise PayloadUnreadable(
                f"{path}: byte {location.offset}: the stored group of {location.length} bytes is damaged. "
                "Restore the file from a copy, or start another run from the last checkpoint"
            )
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
        for stored, location in locations:
            stored.location = location

    def sync(self) -> None:
        if self._file is not None:
            with self._when_full():
                self._file.sync()

    def compact(self, compaction: Compaction, history: int) -> int:
        """See Store. A new segment begins; older ones without a wanted payload are deleted."""
        number = max(self._number, max(self.folder.segments(), default=0)) + 1
        with self._when_full():
            finished = compaction.finished()
            if finished is not None:
                history = self._append_history(history, finished)
            body, seq = compaction.snapshot(history), compaction.seq
            file = SegmentFile(self.folder.segment(number), self._stage)
            try:
                file.write([head(seq, seq - 1, body, 0, 0, self.info.seed), body])
                file.sync()
                sync(self.folder.path)
            except OSError:
                file.close()
                self.folder.segment(number).unlink(missing_ok=True)
                raise
        if self._file is not None:
            self._file.close()
        self._file, self._number = file, number
        wanted = {location.segment for location in compaction.wanted()} | {number}
        for former in self.folder.segments():
            if former not in wanted:
                self.folder.segment(former).unlink(missing_ok=True)
        return history

    def size_bytes(self) -> int:
        sizes = 0
        for path in self.folder.path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes += path.stat().st_blocks * 512
        return sizes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self.folder.unlock()

    def _append_history(self, size: int, body: bytes) -> int:
        """Put one record behind the first `size` bytes, durably; returns the new size. May be repeated."""
        data = head(0, 0, body, 0, 0, self.info.seed) + body
        handle = os.open(self.folder.history, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
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
            length, digest = 0, 0
            if payload is not None:
                length, digest = len(payload), checksum(payload, seed)
            yield head(record.seq, synced, record.body, length, digest, seed)
            yield record.body
            offset += HEAD_BYTES + len(record.body)
            if payload is not None and record.stored is not None:
                yield payload
                locations.append((record.stored, Location(self._number, offset, length, digest)))
                offset += length

    @contextlib.contextmanager
    def _when_full(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise StoreUnavailable(f"{self.folder.path}: {error.strerror}") from error
            raise


def open_file_store(path: Path, run_name: str) -> FileStore:
    """The store in `path`, locked; a new one where there is none.

    Raises:
        UsageError: another broker has the store, or its identity cannot be read.
    """
    folder = StoreFolder(path)
    folder.lock()
    try:
        info = folder.info()
        if info is None:
            info = new_info(run_name)
            folder.write_info(info)
    except BaseException:
        folder.unlock()
        raise
    return FileStore(folder, info)


def _mapped(path: Path) -> Buffer:
    """A file's content without reading it all."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _location(number: int, frame: Frame) -> Location | None:
    if not (frame.payload_bytes or frame.payload_checksum):
        return None
    return Location(number, frame.payload_offset, frame.payload_bytes, frame.payload_checksum)
