"""The writer of RUN/events.jsonl, which broker, learner and supervisor share."""

import os
import time
from pathlib import Path

import msgspec


class Event(msgspec.Struct, frozen=True):
    """One line; the broker's lines have an index besides."""

    time_s: float
    kind: str
    detail: dict[str, object]
    source: str


class EventFile:
    """Appends whole lines, so that several processes can share the file."""

    def __init__(self, path: Path, source: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._source = source

    def add(self, kind: str, **detail: object) -> None:
        """Record that `kind` happened now; raises OSError, for example on a full disk."""
        self.write(Event(time.time(), kind, detail, self._source))

    def write(self, event: msgspec.Struct) -> None:
        """Append an event as it is; raises OSError."""
        os.write(self._file, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        os.close(self._file)
