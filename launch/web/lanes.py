"""A lane per process: its states over time, from RUN/trace, and its ends, from RUN/events.jsonl."""

import threading
from collections import defaultdict, deque
from typing import Any, NamedTuple

from common.json_lines import Event, decoder_of
from common.process.run_dir import RunDir
from common.run_reader import LineTail, read_batches

PIECES = 256  # kept of a process
# kind of an event: the field that names a process, and the state that follows
ENDS = {
    "leave": ("node", "left"), "node_lost": ("node", "dead"),
    "role_crashed": ("role", "dead"), "role_gave_up": ("role", "dead"), "role_killed": ("role", "dead"),
}  # fmt: skip
LATE_S = 60.0  # spans of a node may come so much later than those of others


class Piece(NamedTuple):
    start_s: float  # Unix time
    end_s: float
    state: str


class Lanes:
    """The newest states of every process, in bounded memory; threads may call `page`."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.trace
        self._events = LineTail(run.events, decoder_of(Event))
        self._pieces: dict[str, deque[Piece]] = defaultdict(lambda: deque(maxlen=PIECES))
        self._read: dict[str, float] = {}  # start of the newest state, on the clock of the process
        self._ends: dict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=PIECES))
        self._end_s = 0.0
        self._lock = threading.Lock()

    def page(self, text: str, rows: slice, window_s: float) -> dict[str, Any]:
        """The lanes of the processes whose names contain `text`, over the last `window_s` seconds that are known."""
        with self._lock:
            self._update()
            names = sorted((who for who in self._pieces if text in who), key=lambda who: ("learner" not in who, who))
            end_s = max([self._end_s, *(ends[-1][0] for ends in self._ends.values())])
            oldest_s = min((pieces[0].start_s for pieces in self._pieces.values()), default=end_s)
            begin_s = max(end_s - window_s, oldest_s)
            shown = [{"who": who, "pieces": self._lane(who, begin_s, end_s)} for who in names[rows]]
        return {"total": len(names), "begin_s": begin_s, "end_s": end_s, "rows": shown}

    def _lane(self, who: str, begin_s: float, end_s: float) -> list[Piece]:
        """The pieces of a process in this time; it has left or is dead until its next state begins."""
        pieces = list(self._pieces[who])
        for ended_s, how in self._ends.get(who, ()):
            back_s = next((piece.start_s for piece in pieces if piece.start_s > ended_s), end_s)
            pieces.append(Piece(ended_s, back_s, how))
        return sorted(piece for piece in pieces if piece.end_s >= begin_s)

    def _update(self) -> None:
        """Read what is new; a span that was read before starts no later than the newest one of then."""
        read = dict(self._read)
        for batch in read_batches(self._folder, self._end_s - LATE_S if self._pieces else 0.0):
            for span in batch.spans:
                if span.kind == "state" and span.start_s > read.get(batch.who, 0.0):
                    pieces, start_s = self._pieces[batch.who], span.start_s + batch.offset_s
                    end_s, self._read[batch.who] = start_s + span.duration_s, span.start_s
                    if pieces and pieces[-1].state == span.name and start_s - pieces[-1].end_s < 0.05:
                        start_s = pieces.pop().start_s  # a long state is recorded in parts
                    pieces.append(Piece(start_s, end_s, span.name))
                    self._end_s = max(self._end_s, end_s)
        for event in self._events.all():
            if event.kind in ENDS:
                field, how = ENDS[event.kind]
                self._ends[str(event.detail.get(field))].append((event.time_s, how))
