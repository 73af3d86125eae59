"""Follow RUN/metrics.jsonl and a run's other files of JSON lines while they are written; torn lines are left out."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.json_lines import lines_of
from common.metrics import no_file
from common.process.run_dir import RunDir
from common.spans import SpanBatch

LATEST = slice(-10, None)  # the steps whose mean stands for the present
READ_BYTES = 1 << 24  # at once; a longer line is passed over


class LineTail:
    """The whole lines of a file that are JSON objects; only what was added is read again."""

    def __init__(self, path: Path, offset: int = 0, inode: int = -1) -> None:
        """`offset` and `inode`: where an earlier reader of this file was, its own fields."""
        self.path, self.offset, self.inode = path, offset, inode

    def read(self, limit: int = READ_BYTES) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file was replaced, so that earlier lines are void; the new lines). Raises OSError.

        At most `limit` bytes are read, and as many again while they have no such line. So there may be more lines when
        some are returned. A file that does not exist has none.
        """
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                replaced = self.inode != -1 and (stat.st_ino != self.inode or stat.st_size < self.offset)
                self.offset, self.inode = 0 if replaced else self.offset, stat.st_ino
                while True:
                    file.seek(self.offset)
                    data = file.read(limit)
                    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == limit else b"")
                    self.offset += len(whole)
                    lines = list(lines_of(whole, dict[str, Any]))
                    if lines or not whole:
                        return replaced, lines
        except FileNotFoundError:
            return False, []


def read_batches(run: RunDir, since_s: float = 0.0) -> Iterator[SpanBatch]:
    """The batches of every process in RUN/trace, in their order; files that are removed meanwhile are left out.

    Files that were last written before `since_s`, Unix time, are left out, too.
    """
    for path in sorted(run.trace.glob("*.jsonl")):
        with suppress(OSError):
            if path.stat().st_mtime >= since_s:
                yield from lines_of(path.read_bytes(), SpanBatch)


class MetricsTail:
    """Steps seen so far, one entry per step; a resumed learner's rewritten file is read from its start."""

    def __init__(self, path: Path | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []  # lines of kind evaluation
        self._tail = LineTail(path) if path else None

    @classmethod
    def of(cls, run: RunDir | None) -> "MetricsTail":
        """The metrics that a run has by now, none without a run folder; raises as `update`."""
        tail = cls(run.metrics if run else None)
        tail.update()
        return tail

    @property
    def last(self) -> dict[str, Any]:
        """The newest step, without metrics that were no number, which JSON has as null; {} before the first."""
        return {name: value for name, value in self.lines[-1].items() if value is not None} if self.lines else {}

    def update(self) -> None:
        """Read what is new. Raises UsageError when it is no file, or may not be read."""
        while self._tail is not None:
            try:
                replaced, lines = self._tail.read()
            except OSError as error:
                raise no_file(self._tail.path, error) from None
            if replaced:
                self.lines, self.evaluations = [], []
            if not lines:
                return
            self.lines += [line for line in lines if "kind" not in line]
            self.evaluations += [line for line in lines if line.get("kind") == "evaluation"]

    def series(self, name: str) -> list[float]:
        """Values of one metric over the steps that have it."""
        return [float(line[name]) for line in self.lines if isinstance(line.get(name), int | float)]

    def total(self, name: str) -> float:
        """The sum of one metric over all steps."""
        return sum(self.series(name))

    def mean(self, name: str, steps: slice = slice(None)) -> float | None:
        """The mean of one metric over `steps`; None when no step has it."""
        return mean(self.series(name)[steps])


def mean(values: list[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def ends(values: list[float]) -> dict[str, float | None]:
    """The means of the first and of the last steps, as reports name them."""
    return {"first_5_steps": mean(values[:5]), "last_10_steps": mean(values[LATEST])}
