"""The writer of RUN/events.jsonl, which broker, learner and supervisor share."""

import time
from pathlib import Path

import msgspec

from common.json_lines import LineFile


class Event(msgspec.Struct, frozen=True):
    """One line; the broker's lines have an index besides."""

    time_s: float
    kind: str
    detail: dict[str, object]
    source: str


class EventFile(LineFile):
    """The events of one writer."""

    def __init__(self, path: Path, source: str) -> None:
        super().__init__(path)
        self._source = source

    def add(self, kind: str, **detail: object) -> None:
        """Record that `kind` happened now; raises OSError, for example on a full disk."""
        self.write(Event(time.time(), kind, detail, self._source))
