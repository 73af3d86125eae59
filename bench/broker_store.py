"""CPU that keeping a group durably costs, in SQLite, in LMDB and in an append-only log of our own.

    python bench/broker_store.py [--groups 3000] [--repeat 3] [--folder DIR]

Every way does the same: groups arrive in batches of 16, each with four small records (lease, arrival, taken, committed)
and its payload; a batch counts when it is synced; a group is deleted 256 groups later, and what that leaves behind is
compacted, so that the store does not grow. CPU is the process's user and system time. One JSON document.

What each way promises: SQLite in WAL mode with synchronous=FULL; LMDB with a synced commit per batch; our log with
fdatasync per batch, an xxh3 checksum over every payload, and whole segments unlinked when all of their groups are gone.
LMDB is not a dependency: pip install lmdb==3.0.0.
"""

import mmap
import os
import resource
import sqlite3
import statistics
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import harness
import lmdb

from broker.journal.file_store.frames import checksum, head
from broker.journal.file_store.segment_file import SegmentFile, new_stage
from broker.journal.journal import SEGMENT_BYTES

SIZES = (83_000, 600_000)
BATCH = 16
KEPT = 256
RECORD = os.urandom(100)
RECORDS_PER_GROUP = 4
LMDB_MAP_BYTES = 2 << 30
SEED = 1


class Store(Protocol):
    def append(self, first: int, payloads: Sequence[bytes]) -> None: ...

    def delete(self, serials: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "store.sqlite", isolation_level=None)
        self._db.execute("PRAGMA page_size = 16384")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("CREATE TABLE payloads (serial INTEGER PRIMARY KEY, payload BLOB)")
        self._db.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, serial INTEGER, record BLOB)")
        self._db.execute("BEGIN")

    def append(self, first: int, payloads: Sequence[bytes]) -> None:
        serials = range(first, first + len(payloads))
        records = [(serial, RECORD) for serial in serials for _ in range(RECORDS_PER_GROUP)]
        self._db.executemany("INSERT INTO records (serial, record) VALUES (?, ?)", records)
        self._db.executemany("INSERT INTO payloads VALUES (?, ?)", zip(serials, payloads, strict=True))
        self._db.execute("COMMIT")
        self._db.execute("BEGIN")

    def delete(self, serials: Sequence[int]) -> None:
        self._db.execute("DELETE FROM payloads WHERE serial <= ?", (serials[-1],))
        self._db.execute("DELETE FROM records WHERE id <= ?", ((serials[-1] + 1) * RECORDS_PER_GROUP,))

    def close(self) -> None:
        self._db.execute("COMMIT")
        self._db.close()


class Lmdb:
    def __init__(self, folder: Path, writemap: bool = False) -> None:
        self._env = lmdb.open(str(folder / "lmdb"), map_size=LMDB_MAP_BYTES, max_dbs=2, writemap=writemap)
        self._payloads = self._env.open_db(b"payloads", integerkey=True)
        self._records = self._env.open_db(b"records", integerkey=True)
        self._doomed: Sequence[int] = ()

    def append(self, first: int, payloads: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as transaction:
            for serial, payload in enumerate(payloads, first):
                for i in range(RECORDS_PER_GROUP):
                    key = struct.pack("=Q", serial * RECORDS_PER_GROUP + i)
                    transaction.put(key, RECORD, db=self._records, append=True)
                transaction.put(struct.pack("=Q", serial), payload, db=self._payloads, append=True)
            for serial in self._doomed:
                for i in range(RECORDS_PER_GROUP):
                    transaction.delete(struct.pack("=Q", serial * RECORDS_PER_GROUP + i), db=self._records)
                transaction.delete(struct.pack("=Q", serial), db=self._payloads)
            self._doomed = ()

    def delete(self, serials: Sequence[int]) -> None:
        self._doomed = serials

    def close(self) -> None:
        self._env.close()


class Log:
    """broker/store/: frames in segments, written directly; `buffered` goes through the page cache instead."""

    def __init__(self, folder: Path, buffered: bool = False) -> None:
        self._folder, self._buffered = folder, buffered
        self._segments: deque[tuple[Path, int]] = deque()  # and the last serial in each
        self._file: SegmentFile | None = None
        self._last = -1
        self._stage = new_stage()

    def append(self, first: int, payloads: Sequence[bytes]) -> None:
        file = self._file
        if file is None or file.size >= SEGMENT_BYTES:
            file = self._roll()
        parts: list[bytes | memoryview] = []
        for payload in payloads:
            for _ in range(RECORDS_PER_GROUP - 1):
                parts += (head(0, 0, RECORD, 0, 0, SEED), RECORD)
            parts += (head(0, 0, RECORD, len(payload), checksum(payload, SEED), SEED), RECORD, payload)
        file.write(parts)
        file.sync()
        self._last = first + len(payloads) - 1

    def delete(self, serials: Sequence[int]) -> None:
        while self._segments and self._segments[0][1] <= serials[-1]:
            self._segments.popleft()[0].unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _roll(self) -> SegmentFile:
        if self._file is not None:
            self._file.close()
            self._segments.append((self._file.path, self._last))
        path = self._folder / f"{self._last + 1}.log"
        self._file = BufferedFile(path, self._stage) if self._buffered else SegmentFile(path, self._stage)
        return self._file


class BufferedFile(SegmentFile):
    """What a SegmentFile is on a file system without direct writes."""

    def __init__(self, path: Path, stage: mmap.mmap) -> None:
        super().__init__(path, stage)
        self._buffered()


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def measure(make: Callable[[Path], Store], groups: int, size: int, where: str | None) -> dict[str, float]:
    payloads = [os.urandom(size) for _ in range(BATCH)]
    with tempfile.TemporaryDirectory(dir=where) as folder:
        store = make(Path(folder))
        syncs: list[float] = []
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for first in range(0, groups, BATCH):
            started = time.perf_counter()
            store.append(first, payloads)
            syncs.append(time.perf_counter() - started)
            if first >= KEPT:
                store.delete(range(first - KEPT, first - KEPT + BATCH))
        after, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begun
        kept = stored_bytes(Path(folder))
        store.close()
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return {
        "cpu_us_per_group": round((user + system) / groups * 1e6, 1),
        "user_us": round(user / groups * 1e6, 1),
        "system_us": round(system / groups * 1e6, 1),
        "groups_per_s": round(groups / wall, 1),
        "batch_ms_median": round(statistics.median(syncs) * 1e3, 2),
        "store_bytes_over_live_bytes": round(kept / (KEPT * size), 2),
    }


WAYS: dict[str, Callable[[Path], Store]] = {
    "sqlite": Sqlite,
    "lmdb": Lmdb,
    "lmdb_writemap": lambda folder: Lmdb(folder, writemap=True),
    "own_log": Log,
    "own_log_buffered": lambda folder: Log(folder, buffered=True),
}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--groups", type=int, default=3200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help="a folder on the disk to measure")
    options = parser.parse_args()
    results = {}
    for size in SIZES:
        groups = max(2 * KEPT, options.groups * SIZES[0] // size) // BATCH * BATCH
        runs = {
            name: [measure(make, groups, size, options.folder) for _ in range(options.repeat)]
            for name, make in WAYS.items()
        }
        results[str(size)] = {
            name: sorted(found, key=lambda run: run["cpu_us_per_group"])[len(found) // 2]
            for name, found in runs.items()
        }
    figures = {
        "rounds": options.repeat,
        "batch_groups": BATCH,
        "kept_groups": KEPT,
        "payload_bytes": results,
        "versions": {"sqlite": sqlite3.sqlite_version},
    }
    harness.save("broker_store", options, figures, ("lmdb", "xxhash"))


if __name__ == "__main__":
    main()
