"""Reads RUN/trace, also while the run writes there."""

from collections.abc import Iterator
from contextlib import suppress

from common.json_lines import lines_of
from common.process.run_dir import RunDir
from common.spans import SpanBatch


def read_batches(run: RunDir, since_s: float = 0.0) -> Iterator[SpanBatch]:
    """The batches of every process, in their order; torn lines, and files that are removed meanwhile, are left out.

    Files that were last written before `since_s`, Unix time, are left out, too.
    """
    for path in sorted(run.trace.glob("*.jsonl")):
        with suppress(OSError):
            if path.stat().st_mtime >= since_s:
                yield from lines_of(path.read_bytes(), SpanBatch)
