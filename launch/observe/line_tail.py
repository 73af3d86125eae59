"""Readers of a run's files of JSON lines, also while another process writes them; torn lines are passed over."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.json_lines import lines_of
from common.process.run_dir import RunDir
from common.spans import SpanBatch

READ_BYTES = 1 << 24  # at once; a longer line is passed over


class LineTail:
    """The whole lines of a file that are JSON objects; only what was added is read again."""

    def __init__(self, path: Path, offset: int = 0, inode: int = -1) -> None:
        """`offset` and `inode`: where an earlier reader of this file was, its own fields."""
        self.path, self.offset, self.inode = path, offset, inode

    def read(self, limit: int = READ_BYTES) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file was replaced, so that earlier lines are void; the new lines). Raises OSError.

        At most `limit` bytes are read, so there may be more lines when some are returned. A file that does not exist
        has none.
        """
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                replaced = self.inode != -1 and (stat.st_ino != self.inode or stat.st_size < self.offset)
                self.offset, self.inode = 0 if replaced else self.offset, stat.st_ino
                file.seek(self.offset)
                data = file.read(limit)
        except FileNotFoundError:
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == limit:
            whole = data
        self.offset += len(whole)
        return replaced, list(lines_of(whole, dict[str, Any]))


def read_batches(run: RunDir, since_s: float = 0.0) -> Iterator[SpanBatch]:
    """The batches of every process in RUN/trace, in their order; files that are removed meanwhile are left out.

    Files that were last written before `since_s`, Unix time, are left out, too.
    """
    for path in sorted(run.trace.glob("*.jsonl")):
        with suppress(OSError):
            if path.stat().st_mtime >= since_s:
                yield from lines_of(path.read_bytes(), SpanBatch)
