"""RUN/store: its lock, its identity and its files."""

import secrets
import time
from pathlib import Path
from typing import IO

import msgspec

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


def new_info(run_name: str) -> StoreInfo:
    """The identity of a store that begins now."""
    return StoreInfo(secrets.token_hex(8), run_name, time.time(), secrets.randbits(63))
