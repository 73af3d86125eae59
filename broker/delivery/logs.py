"""The broker's events, and the tails of the roles' logs that observers ask for."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile

from msgspec.structs import replace

from broker.contract import BrokerEvent

logger = logging.getLogger(__name__)

RING_EVENTS = 4096


class EventLog:
    """Numbers events and keeps the newest RING_EVENTS; `sink` receives every new one.

    `earlier` are the newest events of the broker that ran before this one. Events are best effort: an OSError of the
    sink, for example on a full disk, is only logged. The next event that the sink takes follows an event
    `events_unwritten` with the number of missed ones.
    """

    def __init__(
        self,
        sink: Callable[[BrokerEvent], None] = lambda event: None,
        wall_clock: Callable[[], float] = time.time,
        earlier: Sequence[BrokerEvent] = (),
    ) -> None:
        self._sink = sink
        self._wall_clock = wall_clock
        self._ring: deque[BrokerEvent] = deque(earlier, maxlen=RING_EVENTS)
        self.next_index = earlier[-1].index + 1 if earlier else 0
        self._unwritten = 0

    def add(self, kind: str, **detail: str | int | float) -> None:
        event = BrokerEvent(self.next_index, self._wall_clock(), kind, detail)
        try:
            if self._unwritten:
                missed = replace(event, kind="events_unwritten", detail={"count": self._unwritten})
                self._sink(missed)
                self._ring.append(missed)
                self._unwritten = 0
                event = replace(event, index=event.index + 1)
            self._sink(event)
        except OSError as error:
            if not self._unwritten:
                logger.error("events cannot be written: %s", error)
            self._unwritten += 1
        self._ring.append(event)
        self.next_index = event.index + 1

    def after(self, index: int) -> list[BrokerEvent]:
        """Events in the ring with a greater index, oldest first."""
        return [*takewhile(lambda event: event.index > index, reversed(self._ring))][::-1]


MOST_LOGS = 16  # questions, and likewise answers; the oldest gives way

FRESH_S = 10.0  # a question that was not repeated by then is out of date, as is an answer that was not fetched

Whose = str | int  # a node id, or a rank of the learner


class LogTails:
    """Observers repeat their question until they have the answer; an answer without a question is dropped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.asked: dict[Whose, float] = {}  # when last, in this order
        self._texts: dict[Whose, tuple[float, str]] = {}  # when it came, and what

    def ask(self, whose: Whose) -> str | None:
        """The end of a role's log; None until the role has sent it."""
        came_at, text = self._texts.pop(whose, (float("-inf"), ""))
        if self._clock() - came_at < FRESH_S:
            return text
        self.asked.pop(whose, None)
        self.asked[whose] = self._clock()
        if len(self.asked) > MOST_LOGS:
            del self.asked[next(iter(self.asked))]
        return None

    def answer(self, whose: Whose, text: str | None) -> None:
        """A role has sent the end of its log, unless it is None."""
        if text is not None and self.asked.pop(whose, None) is not None:
            self._texts[whose] = self._clock(), text
        if len(self._texts) > MOST_LOGS:
            del self._texts[next(iter(self._texts))]

    def next_rank(self, rank: int, text: str | None) -> int:
        """Keep the answer of a rank; returns the rank of the learner whose log is asked for next, -1 for none."""
        self.answer(rank, text)
        fresh = self._clock() - FRESH_S
        return next((asked for asked, at in self.asked.items() if isinstance(asked, int) and at > fresh), -1)
