"""RUN/trace: SpanBatch lines in segments, written by a thread, because a disk may be slow or full."""

import threading
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from common.segments import LineThread, SegmentWriter
from common.span_buffer import BATCH_BYTES, SPANS
from common.spans import SpanBatch

SHARES = {"learner": 0.25, "nodes": 0.75}  # by the prefix of the file, in telemetry.trace_mib
INTERVAL_S = 1.0
BATCHES = 8  # This process adds no more in an interval.
CLOSE_S = 5.0  # for the last lines


class SpanFile:
    """Writes the spans of this process, and those that others sent to it."""

    def __init__(self, folder: Path, prefix: str, trace_mib: int, who: str) -> None:
        """Begin to write; `prefix` is one of SHARES, `who` this process's name in the trace."""
        writer = SegmentWriter(folder, prefix, int(trace_mib * SHARES[prefix] * (1 << 20)))
        self._lines = LineThread("spans of RUN/trace", writer, lambda: _line, _lost)
        self._lines.start()
        self.put = self._lines.put  # writes a batch soon
        self._who, self._stopping = who, threading.Event()
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


def _lost(batch: SpanBatch) -> None:
    SPANS.lost(len(batch.spans))
