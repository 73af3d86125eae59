"""A lane per process: its states over time, from RUN/trace, and its deaths, from RUN/events.jsonl."""

from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common.process.run_dir import RunDir
from common.segments import number_of
from common.spans import SpanBatch
from launch.observe.line_tail import LineTail
from launch.web.files import inside

PIECES, LANES = 256, 4096  # kept of a process; processes
DEATHS = {"node_lost": "node", "leave": "node", "role_crashed": "role", "role_gave_up": "role", "role_killed": "role"}
BIRTHS = {"join": "node", "role_restarted": "role", "role_started": "role", "learner_started": ""}
LAST = 1 << 40  # seconds: beyond every time


class Piece(NamedTuple):
    start_s: float  # Unix time
    end_s: float
    state: str


class Lanes:
    """The newest states of every process, in bounded memory."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._events = run, LineTail(run.events)
        self._tails: dict[Path, LineTail] = {}
        self._pieces: dict[str, deque[Piece]] = defaultdict(lambda: deque(maxlen=PIECES))
        self._marks: dict[str, deque[tuple[float, bool]]] = defaultdict(lambda: deque(maxlen=PIECES))

    def update(self) -> None:
        """Read what is new; raises OSError."""
        for line in self._new(self._events):
            self._mark(line)
        parts = [path for path in self._run.trace.glob("*-*.jsonl") if path.stem.rpartition("-")[2].isdecimal()]
        parts.sort(key=lambda path: (path.stem.rpartition("-")[0], number_of(path)))
        known = self._tails
        self._tails = {path: known.get(path) or LineTail(path) for path in parts}
        for index, path in enumerate(parts):
            newest = {part.stem.rpartition("-")[0] for part in parts[index + 2 : index + 3]}
            if (path not in known or path.stem.rpartition("-")[0] not in newest) and inside(self._run, path):
                for line in self._new(self._tails[path]):
                    self._add(line)

    def observed(self, who: str, state: str, since_s: float, now_s: float) -> None:
        """The state that a process reports; used where the run records no spans."""
        if self._tails:
            return
        pieces = self._pieces[who]
        if pieces and pieces[-1].state == state and now_s - since_s <= pieces[-1].end_s + 1.0:
            pieces[-1] = pieces[-1]._replace(end_s=now_s)
        else:
            pieces.append(Piece(max(now_s - since_s, pieces[-1].end_s if pieces else 0.0), now_s, state))

    def page(self, text: str, offset: int, limit: int, window_s: float) -> dict[str, Any]:
        """The lanes of the processes whose names contain `text`, over the last `window_s` seconds that are known."""
        every = list(self._pieces.items())
        names = sorted((name for name, _ in every if text in name), key=lambda name: ("learner" not in name, name))
        newest = [pieces[-1].end_s for _, pieces in every if pieces]
        newest += [marks[-1][0] for marks in list(self._marks.values())]
        end_s = max(newest, default=0.0)
        oldest = min((pieces[0].start_s for _, pieces in every if pieces), default=end_s)
        begin_s = max(end_s - window_s, oldest)
        shown = [{"who": who, "pieces": self._lane(who, begin_s, end_s)} for who in names[offset : offset + limit]]
        return {"total": len(names), "begin_s": begin_s, "end_s": end_s, "rows": shown}

    def _lane(self, who: str, begin_s: float, end_s: float) -> list[Piece]:
        """The pieces of a process in this time, dead ones included."""
        pieces, marks = list(self._pieces[who]), list(self._marks.get(who, ()))
        for index, (died_s, dead) in enumerate(marks):
            if dead:
                back_s = next((at_s for at_s, still in marks[index + 1 :] if not still), LAST)
                seen_s = next((piece.start_s for piece in pieces if piece.start_s > died_s), LAST)
                pieces.append(Piece(died_s, min(back_s, seen_s, end_s), "dead"))
        return sorted(piece for piece in pieces if piece.end_s >= begin_s)

    def _add(self, line: dict[str, Any]) -> None:
        try:
            batch = msgspec.convert(line, SpanBatch)
        except msgspec.ValidationError:
            return
        pieces = self._pieces[batch.who]
        for span in batch.spans:
            if span.kind == "state" and abs(span.start_s) < LAST:
                start_s = span.start_s + batch.offset_s
                end_s = start_s + min(span.duration_s, LAST)
                if pieces and pieces[-1].state == span.name and abs(start_s - pieces[-1].end_s) < 0.05:
                    pieces[-1] = pieces[-1]._replace(end_s=end_s)
                else:
                    pieces.append(Piece(start_s, end_s, span.name))
        if len(self._pieces) > LANES:
            self._pieces.pop(next(iter(self._pieces)))

    def _mark(self, line: dict[str, Any]) -> None:
        """A death or a birth."""
        kind, detail, at_s = str(line.get("kind")), line.get("detail"), line.get("time_s")
        field = DEATHS.get(kind, BIRTHS.get(kind))
        if (
            field is not None
            and isinstance(detail, dict)
            and isinstance(at_s, int | float)
            and len(self._marks) < LANES
        ):
            self._marks[str(detail.get(field, "learner"))].append((float(at_s), kind in DEATHS))

    @staticmethod
    def _new(tail: LineTail) -> Iterator[dict[str, Any]]:
        while lines := tail.read()[1]:
            yield from lines
