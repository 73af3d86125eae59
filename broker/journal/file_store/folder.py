"""RUN/store: its lock, its identity, its segments and the history of finished tasks."""

import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from broker.journal.file_store.frames import HEAD_BYTES, Buffer, Scan, head, read_frame, scan
from broker.journal.store import StoreCorrupt
from common.errors import UsageError
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


class StoreFolder:
    """Paths and small files. Only the process that holds the lock changes anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = path / "history.log"
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Keep every other broker out until this process ends or unlocks. Raises UsageError when that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path / "lock")
        except AlreadyLocked as error:
            raise UsageError(
                f"{self.path}: this run already has a broker: process {error.holder} writes its store; stop it first, "
                "or choose another run.dir"
            ) from None
        except OSError as error:
            raise UsageError(f"{self.path}: the store cannot be locked: {error}") from error

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def info(self) -> StoreInfo | None:
        """store.json, None when there is none; raises UsageError when it cannot be read, or is missing in a store."""
        path = self.path / "store.json"
        try:
            info = msgspec.json.decode(path.read_bytes(), type=StoreInfo)
        except FileNotFoundError:
            if self.segments():  # whose checksums cannot be checked without it: they would pass for empty ones
                raise UsageError(
                    f"{path}: missing, and {self.path} has a store; put the file back from a copy, or move the "
                    "folder away to start with an empty store"
                ) from None
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{path}: expected the identity of a store, found: {error}") from error
        if info.schema != SCHEMA:
            raise UsageError(
                f"{path}: schema {info.schema}, this release reads {SCHEMA}; use the release that wrote it"
            )
        return info

    def write_info(self, info: StoreInfo) -> None:
        """Replace store.json."""
        write_atomic(self.path / "store.json", msgspec.json.encode(info))

    def segments(self) -> list[int]:
        """Numbers of the segments, ascending."""
        return sorted(int(p.stem) for p in self.path.glob("*.log") if p.stem.isdigit())

    def segment(self, number: int) -> Path:
        """The file of a segment."""
        return self.path / f"{number:08d}.log"

    def keep_only(self, numbers: set[int]) -> None:
        """Remove all other segments."""
        for number in self.segments():
            if number not in numbers:
                self.segment(number).unlink(missing_ok=True)

    def scan_segment(self, number: int, seed: int) -> Scan:
        """Frames of a segment; raises StoreCorrupt when something that was synced is damaged."""
        path = self.segment(number)
        with path.open("rb") as file:
            found = scan(mapped(file), seed)
        if found.damaged:
            raise StoreCorrupt(f"{path}: byte {found.end}", found.torn)
        return found

    def read_history(self, size: int, seed: int) -> Iterator[bytes]:
        """Bodies of the records in the first `size` bytes of the history; raises StoreCorrupt."""
        if not size:
            return
        with self.history.open("rb") as file:
            data = mapped(file)
        offset = 0
        while offset < size:
            frame = read_frame(data, offset, seed)
            if frame is None:
                where = f"{self.history}: byte {offset}"
                raise StoreCorrupt(where, "a record of finished tasks is cut off or damaged")
            yield frame.body
            offset = frame.end

    def append_history(self, size: int, body: bytes, seed: int) -> int:
        """Put one record behind the first `size` bytes, durably; returns the new size. May be repeated."""
        handle = os.open(self.history, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(handle, size)
            data = head(0, 0, body, 0, 0, seed) + body
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done:], size + done)
            os.fdatasync(handle)
        finally:
            os.close(handle)
        return size + HEAD_BYTES + len(body)

    def size_bytes(self) -> int:
        """The size of all files on the disk."""
        sizes = 0
        for path in self.path.iterdir():
            try:
                sizes += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return sizes


def new_info(run_name: str) -> StoreInfo:
    """The identity of a store that begins now."""
    return StoreInfo(secrets.token_hex(8), run_name, time.time(), secrets.randbits(63))


def mapped(file: IO[bytes]) -> Buffer:
    """A file's content without reading it all."""
    if os.fstat(file.fileno()).st_size == 0:
        return b""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
