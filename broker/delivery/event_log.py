"""The broker's events: a bounded ring for clients, and a sink for the file."""

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
        self._sink, self._wall_clock = sink, wall_clock
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
                self._unwritten, event = 0, replace(event, index=event.index + 1)
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
