"""Reads RUN/trace, also while the run writes there."""

from collections.abc import Iterator

import msgspec

from common.process.run_dir import RunDir
from common.spans import SpanBatch
from launch.observe.line_tail import READ_BYTES


def read_batches(run: RunDir, since_s: float | None = None) -> Iterator[SpanBatch]:
    """The batches of every process, those of one process in their order; one line in memory at a time.

    Torn lines and files that are removed meanwhile are passed over. With `since_s`, Unix seconds of the broker's clock,
    batches without a span that ended later are left out.
    """
    decode = msgspec.json.Decoder(SpanBatch).decode
    for path in sorted(run.trace.glob("*.jsonl")):
        try:
            if since_s is not None and path.stat().st_mtime < since_s:
                continue
            with path.open("rb") as file:
                while line := file.readline(READ_BYTES):
                    try:
                        batch = decode(line)
                    except ValueError:  # msgspec's errors, and text that is no UTF-8
                        continue
                    if since_s is None or any(s.start_s + s.duration_s + batch.offset_s > since_s for s in batch.spans):
                        yield batch
        except OSError:
            continue
