"""A thread that makes lines and writes them. Its caller never waits: a line that cannot be written is only counted."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from common.segments import SegmentWriter

logger = logging.getLogger(__name__)

MOST_WAITING = 256  # items

T = TypeVar("T")


class LineThread(Generic[T]):
    """Writes one line per item. One thread may put items."""

    def __init__(self, name: str, writer: SegmentWriter, build: Callable[[], Callable[[T], bytes]]) -> None:
        """`build` returns the function from item to line, which runs in the thread. Both may raise anything."""
        self._name, self._writer, self._build = name, writer, build
        self._line_of: Callable[[T], bytes] | None = None  # None: it could not be built
        self._queue: queue.Queue[T | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._refused = self._failed = 0
        self._logged = False

    @property
    def dropped(self) -> int:
        """Items that are in no file: the queue was full, or their line could not be made or written."""
        return self._refused + self._failed

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
        """Hand an item over; never blocks."""
        self.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._refused += 1
            self._log("too many wait to be written")

    def close(self, wait_s: float = 5.0) -> None:
        """End the thread after what waits; it is left behind when that takes longer than `wait_s`."""
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=wait_s)
                self._thread.join(wait_s)
            except queue.Full:
                self._log(f"not all were written within {wait_s:g} s")

    def _run(self) -> None:
        for item in iter(self._queue.get, None):
            try:
                if self._line_of is None:
                    self._failed += 1
                else:
                    self._writer.write(self._line_of(item))
            except Exception as error:
                self._failed += 1
                self._log(repr(error))

    def _log(self, reason: str) -> None:
        if not self._logged:
            self._logged = True
            logger.warning("%s are dropped; later ones are counted and not logged: %s", self._name, reason)
