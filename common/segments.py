"""A folder of JSON lines with a limit on its size: full segments are closed, and the oldest ones are removed."""

from pathlib import Path

SEGMENTS = 16  # A full folder has so many. One of them is removed at a time.


class SegmentWriter:
    """Appends lines to FOLDER/PREFIX-NUMBER.jsonl, one writer per prefix; a killed one may leave a torn last line."""

    def __init__(self, folder: Path, prefix: str, limit_bytes: int) -> None:
        """The folder is made by the first line. A new writer begins a new segment, after those that are there."""
        self._folder, self._prefix, self._limit = folder, prefix, limit_bytes
        self._path: Path | None = None
        self._size = 0
        self._torn = False  # a write failed half-way

    def write(self, lines: bytes) -> None:
        """Append whole lines, b'\\n' at their end; raises OSError, for example on a full disk."""
        if self._path is None or self._size + len(lines) > self._limit // SEGMENTS > 0 < self._size:
            self._folder.mkdir(parents=True, exist_ok=True)
            known = segments(self._folder, self._prefix)
            self._path = self._folder / f"{self._prefix}-{number_of(known[-1]) + 1 if known else 0:08d}.jsonl"
            self._size = 0
            self._make_room(known)
        torn, self._torn = self._torn, True
        with self._path.open("ab") as file:
            file.write(b"\n" * torn + lines)
        self._torn = False
        self._size += len(lines)

    def _make_room(self, known: list[Path]) -> None:
        """Remove the oldest segments until one more fits."""
        sizes = [path.stat().st_size for path in known]
        total = sum(sizes) + self._limit // SEGMENTS
        for path, size in zip(known, sizes, strict=True):
            if total > self._limit:
                path.unlink(missing_ok=True)
                total -= size


def segments(folder: Path, prefix: str) -> list[Path]:
    """The segments of one writer, the oldest first."""
    return sorted(path for path in folder.glob(f"{prefix}-*.jsonl") if path.stem[len(prefix) + 1 :].isdecimal())


def number_of(segment: Path) -> int:
    """The number of a segment."""
    return int(segment.stem.rpartition("-")[2])
