"""One tracker and its thread: it reads metrics.jsonl from where it was, and nothing else waits for it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from common.process.run_dir import write_json
from launch.observe.line_tail import LineTail
from launch.sinks.points import Cursor, Point

logger = logging.getLogger(__name__)

POLL_S = 1.0
FEED_BYTES = 1 << 20  # read between two flushes
RECENT_BYTES = 1 << 20  # read by a sink that shows the newest state
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 60.0
HANGS_AFTER_S = 30.0


class Sink(Protocol):
    """A connected tracker. Every call may raise anything, and may hang."""

    def write(self, points: Sequence[Point]) -> None:
        """Return when the tracker has the points."""
        ...

    def tick(self) -> None:
        """Called about once a second."""
        ...

    def close(self) -> None: ...


class FeedState(msgspec.Struct):
    """RUN/sinks/NAME.json: how a sink is."""

    state: str = "starting"  # starting | feeding | retrying | hanging | ended
    error: str = ""
    since_s: float = 0.0  # Unix time of the last change of state or error
    lag_lines: int = 0  # lines of metrics.jsonl that it has not taken
    cursor: Cursor = msgspec.field(default_factory=Cursor)


class Feed(threading.Thread):
    """Feeds one sink until `closing` is set and everything was fed."""

    def __init__(self, name: str, make: Callable[[Cursor], Sink], metrics: Path, file: Path, recent_only: bool) -> None:
        """`make` connects the sink, for lines behind the cursor; `file` is RUN/sinks/NAME.json.

        `recent_only`: it shows the newest state, so it needs the end of the metrics only.
        """
        super().__init__(name=name, daemon=True)
        self.closing = threading.Event()
        self._make, self._metrics, self._file, self._recent = make, metrics, file, recent_only
        self._lock = threading.Lock()
        self._total = 0  # lines of the file
        self._busy_since: float | None = None
        self.shown = FeedState()
        if not recent_only:
            with suppress(OSError, msgspec.DecodeError):
                self.shown.cursor = msgspec.json.decode(file.read_bytes(), type=FeedState).cursor

    def run(self) -> None:
        sink: Sink | None = None
        failures = 0
        while True:
            try:
                self._busy_since = time.monotonic()
                if sink is None:
                    sink, tail = self._make(self.shown.cursor), self._tail()
                sink.tick()
                fed = self._feed(sink, tail)
                self._note("feeding")
                failures = 0
                if not fed and self.closing.is_set():
                    sink.close()
                    self._note("ended")
                    return
                self._busy_since = None
                if not fed:
                    self.closing.wait(POLL_S)
            except Exception as error:  # a tracker's library may raise anything
                self._busy_since = None
                self._note("retrying", f"{type(error).__name__}: {error}"[:500])
                with suppress(Exception):
                    if sink is not None:
                        sink.close()
                sink = None
                wait_s = min(FIRST_BACKOFF_S * 2 ** min(failures, 10), LONGEST_BACKOFF_S)
                failures += 1
                if self.closing.wait(wait_s):
                    time.sleep(FIRST_BACKOFF_S)

    def show(self, total_lines: int) -> None:
        """Write the state with the lag as of now; another thread calls it, because this one may hang."""
        since = self._busy_since
        self._total = total_lines
        if since is not None and time.monotonic() - since > HANGS_AFTER_S:
            self._note("hanging", self.shown.error)
        if self.shown.lag_lines != self._lag():
            self._save()

    def _tail(self) -> LineTail:
        cursor, start = self.shown.cursor, 0
        if not self._recent:
            return LineTail(self._metrics, cursor.offset, cursor.inode)
        with suppress(FileNotFoundError):
            start = max(0, self._metrics.stat().st_size - RECENT_BYTES)
        self.shown.cursor = Cursor()
        return LineTail(self._metrics, start)

    def _feed(self, sink: Sink, tail: LineTail) -> bool:
        """Feed the next lines; returns whether there were any. The cursor moves when the sink has flushed."""
        before = tail.offset, tail.inode
        replaced, lines = tail.read(FEED_BYTES)
        if (tail.offset, tail.inode) == before:
            return False
        cursor = msgspec.structs.replace(self.shown.cursor)
        if replaced:
            cursor.lines = 0
        if points := cursor.take(lines):
            sink.write(points)
        cursor.offset, cursor.inode = tail.offset, tail.inode
        self.shown.cursor = cursor
        self._save()
        return bool(lines)

    def _lag(self) -> int:
        return 0 if self._recent else max(0, self._total - self.shown.cursor.lines)

    def _note(self, state: str, error: str = "") -> None:
        """Log a change once, and write it."""
        if (state, error) == (self.shown.state, self.shown.error):
            return
        self.shown.state, self.shown.error, self.shown.since_s = state, error, time.time()
        level = logging.INFO if state in ("feeding", "ended") else logging.WARNING
        logger.log(level, "%s: %s, %d lines behind%s", self.name, state, self._lag(), f": {error}" if error else "")
        with suppress(OSError):  # `_save` raises again when the cursor moves
            self._save()

    def _save(self) -> None:
        with self._lock:
            self.shown.lag_lines = self._lag()
            write_json(self._file, self.shown)
