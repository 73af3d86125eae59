"""The spans of this process, from their recording until they are written or sent. Nothing ever waits for them."""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from common.segments import LineThread, SegmentWriter
from common.spans import Span, SpanBatch, Value

MOST_SPANS = 1 << 14  # that wait; likewise for DETAILS. The oldest give way, and are counted.
BATCH_BYTES = 128 << 10  # a batch as JSON
BATCH_SPANS = 1 << 12
ALLOWED_BYTES = 2 * BATCH_BYTES  # a node saves up permission for so many
PIECE_S = 10.0  # a longer state comes in pieces, so that a reader sees it early and a killed process loses little
DRIFT = 5e-5  # seconds by which two clocks move apart in a second, at most
DETAILS = ("microbatch", "stage", "episode", "environment", "engine")  # kinds that are sent after all others
SHARES = {"learner": 0.25, "nodes": 0.75}  # by the prefix of the file, in telemetry.trace_mib
INTERVAL_S = 1.0
BATCHES = 8  # This process adds no more in an interval.
CLOSE_S = 5.0  # for the last lines
_check = msgspec.json.Decoder(Span).decode


class SpanBuffer:
    """Spans that wait, and how far this process's clock is from the broker's. Any thread may call."""

    def __init__(self, unix: Callable[[], float] = time.time) -> None:
        """Records nothing until `open`. `unix` is asked once: a step of the system's time then moves no span."""
        self._base = unix() - time.monotonic()
        self._lock = threading.RLock()
        self._recording = False
        self._others, self._details = deque[Span](maxlen=MOST_SPANS), deque[Span](maxlen=MOST_SPANS)
        self._dropped = self._told = 0  # spans lost so far, and as the last batch said
        self._state = ""
        self._since = 0.0
        self._clock: tuple[float, float] | None = None  # best round trip: offset, and its error less DRIFT * monotonic
        self._allowed = 0  # bytes that the broker lets this node send

    def open(self, state: str = "", reference: bool = False) -> None:
        """Record from now on, beginning in `state`. `reference`: this process's clock is that of the trace."""
        self._recording = True
        if reference:
            self._clock = 0.0, -math.inf
        self.state(state)

    def close(self) -> None:
        """End the state; what follows is not recorded. The last batches may still be taken."""
        self.state("")
        self._recording = False

    def now(self) -> float:
        """Unix seconds of this process's own clock."""
        return self._base + time.monotonic()

    def add(self, name: str, kind: str, began: float, end: float | None = None, track: str = "", **args: Value) -> None:
        """Record a span; `began` and `end` (None: now) are seconds of time.monotonic, or of perf_counter on Linux."""
        if not self._recording:
            return
        start = self._base + began  # no rounding: what ends when another begins must not overlap it
        duration_s = self._base + (time.monotonic() if end is None else end) - start
        span = Span(name, kind, start, max(0.0, duration_s), track, args)
        waiting = self._details if kind in DETAILS else self._others
        with self._lock:
            self._dropped += len(waiting) == MOST_SPANS
            waiting.append(span)

    def state(self, name: str) -> None:
        """The process enters a state, '' for none; repetitions change nothing."""
        with self._lock:
            if name != self._state and self._recording:
                self._end_piece()
                self._state = name

    def _end_piece(self) -> None:
        since = self._since
        self._since = time.monotonic()
        if self._state:
            self.add(self._state, "state", since, self._since, "state")

    def heard(self, sent_s: float, broker_s: float, more_bytes: int = 0) -> None:
        """The broker answered now what was sent at `sent_s` (`now` then): its clock was `broker_s` in between.

        The offset lies within half the round trip. Its error grows until a shorter round trip replaces it.
        `more_bytes`: so many more may be sent.
        """
        if broker_s:  # 0 from a broker that records no spans
            now = self.now()
            error = max(0.0, now - sent_s) / 2 - DRIFT * time.monotonic()
            if self._clock is None or error <= self._clock[1]:
                self._clock = broker_s - (now + sent_s) / 2, error
            self._allowed = min(self._allowed + more_bytes, ALLOWED_BYTES)

    def batch(self, who: str, limit_bytes: int | None = None) -> SpanBatch | None:
        """Take spans of about `limit_bytes`; None stands for what the broker allows.

        Returns None while there are none, or before the first round trip. Only one thread may call it.
        """
        clock = self._clock
        limit = min(BATCH_BYTES, self._allowed if limit_bytes is None else limit_bytes)
        if clock is None or limit <= 0:
            return None
        with self._lock:
            if self._state and time.monotonic() - self._since > PIECE_S:
                self._end_piece()
        taken = list[Span]()
        size = 0
        for waiting in (self._others, self._details):
            while waiting and size < limit and len(taken) < BATCH_SPANS:
                span = waiting.popleft()
                try:
                    data = msgspec.json.encode(span)
                    _check(data)
                except Exception:  # a heartbeat with such a span would be refused
                    self.lost(1)
                else:
                    taken.append(span)
                    size += len(data)
        if not taken and self._told == self._dropped:
            return None
        if limit_bytes is None:
            self._allowed -= size
        self._told, (offset, error) = self._dropped, clock
        error = max(0.0, error + DRIFT * time.monotonic())
        host = socket.gethostname()
        return SpanBatch(who=who, host=host, offset_s=offset, error_s=error, dropped=self._told, spans=taken)

    def lost(self, spans: int) -> None:
        """Spans that were taken did not arrive."""
        with self._lock:
            self._dropped = self._dropped + spans
            self._told = -1


SPANS = SpanBuffer()  # this process's own, as the root logger is for log records


class SpanFile:
    """RUN/trace: writes the spans of this process, and those that others sent to it, as SpanBatch lines in segments."""

    def __init__(self, folder: Path, prefix: str, trace_mib: int, who: str) -> None:
        """Begin to write; `prefix` is one of SHARES, `who` this process's name in the trace."""
        writer = SegmentWriter(folder, prefix, int(trace_mib * SHARES[prefix] * (1 << 20)))
        self._lines = LineThread("spans of RUN/trace", writer, lambda: _line, lambda lost: SPANS.lost(len(lost.spans)))
        self._lines.start()
        self.put = self._lines.put  # writes a batch soon
        self._who = who
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what this process still has, for a bounded time."""
        SPANS.close()
        self._stopping.set()
        self._thread.join(CLOSE_S)
        self._lines.close()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(INTERVAL_S)
            for own in islice(iter(partial(SPANS.batch, self._who, BATCH_BYTES), None), BATCHES):
                self.put(own)


def _line(batch: SpanBatch) -> bytes:
    return msgspec.json.encode(batch) + b"\n"
