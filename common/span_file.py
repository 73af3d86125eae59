"""RUN/trace: SpanBatch lines in segments, written by a thread, because a disk may be slow or full."""

import logging
import threading
from pathlib import Path

import msgspec

from common.segments import SEGMENTS, SegmentWriter
from common.span_buffer import BATCH_BYTES, SPANS
from common.spans import SpanBatch

logger = logging.getLogger(__name__)

SHARES = {"learner": 0.25, "nodes": 0.75}  # by the prefix of the file, in telemetry.trace_mib
INTERVAL_S = 1.0
WAITING_BYTES = 1 << 20  # more lines than this in an interval are lost, and counted
CLOSE_S = 5.0  # for the last lines


class SpanFile:
    """Writes the spans of this process, and those that others sent to it."""

    def __init__(self, folder: Path, prefix: str, trace_mib: int, who: str) -> None:
        """Begin to write; `prefix` is one of SHARES, `who` this process's name in the trace."""
        limit = int(trace_mib * SHARES[prefix] * (1 << 20))
        self._writer, self._who, self._failed = SegmentWriter(folder, prefix, limit), who, False
        self._most = max(2 * BATCH_BYTES, min(WAITING_BYTES, limit // SEGMENTS))
        self._lock = threading.Lock()
        self._lines, self._spans = bytearray(), 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def put(self, batch: SpanBatch) -> None:
        """Write a batch soon."""
        line = msgspec.json.encode(batch) + b"\n"
        with self._lock:
            if fits := len(self._lines) + len(line) <= self._most:
                self._lines += line
                self._spans += len(batch.spans)
        if not fits:
            SPANS.lost(len(batch.spans))

    def close(self) -> None:
        """Write what this process still has, for a bounded time."""
        SPANS.close()
        self._stopping.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._write()
        self._write()

    def _write(self) -> None:
        while len(self._lines) < self._most - BATCH_BYTES and (own := SPANS.batch(self._who, BATCH_BYTES)) is not None:
            self.put(own)
        with self._lock:
            lines, spans, self._lines, self._spans = bytes(self._lines), self._spans, bytearray(), 0
        try:
            if lines:
                self._writer.write(lines)
                self._failed = False
        except Exception as error:  # nothing may depend on a trace
            SPANS.lost(spans)
            if not self._failed:
                logger.error("RUN/trace cannot be written; spans are lost until it can: %s", error)
            self._failed = True
