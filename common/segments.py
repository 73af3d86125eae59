"""Folders of JSON lines with a limit on their size, and a thread that makes and writes such lines.

Full segments are closed, and the oldest ones are removed. The thread's callers never wait.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

SEGMENTS = 16  # A full folder has so many. One of them is removed at a time.
MOST_WAITING = 256  # items of a thread

T = TypeVar("T")


class SegmentWriter:
    """Appends lines to FOLDER/PREFIX-NUMBER.jsonl, one writer per prefix; a killed one may leave a torn last line."""

    def __init__(self, folder: Path, prefix: str, limit_bytes: int) -> None:
        """The folder is made by the first line. A new writer begins a new segment, after those that are there."""
        self._folder = folder
        self._prefix = prefix
        self._limit = limit_bytes
        self._path: Path | None = None
        self._size = 0
        self._torn = False  # a write failed half-way

    def write(self, lines: bytes) -> None:
        """Append whole lines, b'\\n' at their end; raises OSError, for example on a full disk."""
        if self._path is None or self._size + len(lines) > self._limit // SEGMENTS > 0 < self._size:
            self._path = self._next()
            self._size = 0
        self._folder.mkdir(parents=True, exist_ok=True)  # also when it was removed meanwhile
        torn = self._torn
        self._torn = True
        with self._path.open("ab") as file:
            file.write(b"\n" * torn + lines)
        self._torn = False
        self._size += len(lines)

    def _next(self) -> Path:
        """The path of a new segment; the oldest ones are removed until one more fits."""
        known = segments(self._folder, self._prefix)
        sizes = [path.stat().st_size for path in known]
        total = sum(sizes) + self._limit // SEGMENTS
        for path, size in zip(known, sizes, strict=True):
            if total > self._limit:
                path.unlink(missing_ok=True)
                total -= size
        return self._folder / f"{self._prefix}-{number_of(known[-1]) + 1 if known else 0:08d}.jsonl"


def segments(folder: Path, prefix: str) -> list[Path]:
    """The segments of one writer, the oldest first."""
    return sorted(path for path in folder.glob(f"{prefix}-*.jsonl") if path.stem[len(prefix) + 1 :].isdecimal())


def number_of(segment: Path) -> int:
    return int(segment.stem.rpartition("-")[2])


class LineThread(Generic[T]):
    """Writes one line per item. A line that cannot be written is only counted, and the first one is logged."""

    def __init__(
        self,
        name: str,
        writer: SegmentWriter,
        build: Callable[[], Callable[[T], bytes]],
        lost: Callable[[T], None] = lambda _: None,
    ) -> None:
        """`build` returns the function from item to line, which runs in the thread. Both may raise anything.

        `lost` is called with an item that is in no file: too many waited, or its line could not be made or written.
        """
        self._name = name
        self._writer = writer
        self._build = build
        self._lost = lost
        self._line_of: Callable[[T], bytes] | None = None  # None: it could not be built
        self._queue: queue.Queue[T | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.dropped = 0  # lost items
        self._logged = False

    def start(self) -> None:
        """Build, then start the thread; `put` does it otherwise. Imports belong here: in a thread they race others'."""
        if self._thread is None:
            try:
                self._line_of = self._build()
            except Exception as error:
                self._log(repr(error))
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def put(self, item: T) -> None:
        """Hand an item over; never blocks. Once started, any thread may call."""
        self.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._drop(item, "too many wait to be written")

    def close(self, wait_s: float = 5.0) -> None:
        """End the thread after what waits; it is left behind when that takes longer than `wait_s`."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put(None, timeout=wait_s)
                self._thread.join(wait_s)

    def _run(self) -> None:
        for item in iter(self._queue.get, None):
            try:
                assert self._line_of is not None, "logged by start"
                self._writer.write(self._line_of(item))
            except Exception as error:
                self._drop(item, repr(error))

    def _drop(self, item: T, reason: str) -> None:
        with self._lock:
            self.dropped += 1
        self._lost(item)
        self._log(reason)

    def _log(self, reason: str) -> None:
        if not self._logged:
            self._logged = True
            logger.warning("%s are dropped; later ones are counted and not logged: %s", self._name, reason)
