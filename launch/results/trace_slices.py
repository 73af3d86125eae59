"""The spans of one process on the broker's clock, in the order of their beginning, in threads in which they nest."""

import heapq
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from common.span_buffer import DRIFT
from common.spans import Span, SpanBatch

KNOT_S = 1.0  # between two offsets of a clock that are used
JOIN_S = 1e-3  # pieces of one state that are closer than this are one slice
Slice = tuple[float, float, Span]  # its begin and end on the broker's clock, Unix seconds


class Process:
    """A process of the trace; `name` is learner, broker or a node id."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.dropped = 0
        self._spans: list[tuple[float, float, bytes]] = []  # begin and end on its own clock; JSON takes less memory
        self._clock: list[tuple[float, float, float]] = []  # own time, offset and its error
        self._state: tuple[int, Span] | None = None  # the newest one, and where it is in `_spans`

    def read(self, batch: SpanBatch) -> None:
        """Take in the next batch of this process."""
        self.dropped = max(self.dropped, batch.dropped)
        for span in batch.spans:
            place, begin, end = len(self._spans), span.start_s, span.start_s + span.duration_s
            if span.kind == "state":
                if self._state is not None and self._state[1].name == span.name:
                    before = self._state[1].start_s + self._state[1].duration_s
                    if abs(begin - before) < JOIN_S:
                        place, begin = self._state[0], self._state[1].start_s
                        span = msgspec.structs.replace(span, start_s=begin, duration_s=end - begin)
                self._state = place, span
            self._spans[place : place + 1] = [(begin, end, msgspec.json.encode(span))]
            if not self._clock or end > self._clock[-1][0] + KNOT_S:
                self._clock.append((end, batch.offset_s, batch.error_s))

    def settle(self) -> float:
        """All batches are read. Returns the largest error of this clock in seconds: later round trips help, too."""
        for i in range(len(self._clock) - 2, -1, -1):
            (own, _, error), (later, offset, smaller) = self._clock[i : i + 2]
            if smaller + DRIFT * (later - own) < error:
                self._clock[i] = own, offset, smaller + DRIFT * (later - own)
        self.error_s = max((error for *_, error in self._clock), default=0.0)
        return self.error_s

    def at(self, own_s: np.ndarray) -> np.ndarray:
        """[n] own times on the broker's clock. Offsets are interpolated, so that slices which nest still nest."""
        return own_s + (np.interp(own_s, *np.array(self._clock).T[:2]) if self._clock else 0.0)

    def slices(self) -> Iterator[Slice]:
        """In the order of their beginning, outer ones before those inside."""
        begins, ends = (self.at(np.array([span[i] for span in self._spans])) for i in (0, 1))
        for i in np.lexsort((-ends, begins)):
            yield float(begins[i]), float(ends[i]), msgspec.json.decode(self._spans[i][2], type=Span)


class Threads:
    """Gives each slice of a process a thread where it nests. Slices come in the order of their beginning."""

    def __init__(self) -> None:
        self.names: list[str] = []  # the thread's number is one more than the place
        self._open: dict[str, tuple[int, list[float]]] = {}  # per track its thread, and the ends of its open slices
        self._free: dict[str, list[tuple[float, int]]] = defaultdict(list)  # heaps: when which thread of a row is free
        self._counts: dict[str, int] = defaultdict(int)

    def place(self, track: str, begin: float, end: float) -> int:
        """The thread of a slice."""
        thread, ends = self._open.get(track, (0, []))
        while ends and ends[-1] <= begin:
            ends.pop()
        if ends and end <= ends[-1]:
            ends.append(end)
            return thread
        row = track.partition("/")[0]
        free = self._free[row]
        if free and free[0][0] <= begin:
            _, thread = heapq.heappop(free)
        else:
            self._counts[row] += 1
            self.names.append(f"{row} {self._counts[row]}" if self._counts[row] > 1 else row)
            thread = len(self.names)
        heapq.heappush(free, (end, thread))
        self._open[track] = thread, [end]
        return thread
