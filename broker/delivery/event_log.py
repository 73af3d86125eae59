"""The broker's events: a bounded ring for clients, and a sink for the file."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from broker.contract import BrokerEvent

logger = logging.getLogger(__name__)

RING_EVENTS = 4096


class EventLog:
    """Numbers events and keeps the newest RING_EVENTS; `sink`, when given, receives every new one.

    `earlier` are the newest events of the broker that ran before this one. Events are best effort: an OSError of the
    sink, for example on a full disk, is only logged. The next event that the sink takes follows an event
    `events_unwritten` with the number of missed ones.
    """

    def __init__(
        self,
        sink: Callable[[BrokerEvent], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
        earlier: Sequence[BrokerEvent] = (),
    ) -> None:
        self._sink = sink
        self._wall_clock = wall_clock
        self._ring: deque[BrokerEvent] = deque(earlier, maxlen=RING_EVENTS)
        self.next_index = earlier[-1].index + 1 if earlier else 0
        self._unwritten = 0

    def add(self, kind: str, **detail: str | int | float) -> None:
        """Add an event of `kind`, which happened now."""
        if self._sink is not None and self._unwritten:
            missed = BrokerEvent(self.next_index, self._wall_clock(), "events_unwritten", {"count": self._unwritten})
            if self._write(missed):
                self._keep(missed)
                self._unwritten = 0
        event = BrokerEvent(index=self.next_index, time_s=self._wall_clock(), kind=kind, detail=detail)
        self._keep(event)
        if self._sink is not None and (self._unwritten or not self._write(event)):
            self._unwritten += 1

    def _keep(self, event: BrokerEvent) -> None:
        self.next_index += 1
        self._ring.append(event)

    def _write(self, event: BrokerEvent) -> bool:
        assert self._sink is not None
        try:
            self._sink(event)
        except OSError as error:
            if not self._unwritten:
                logger.error("events cannot be written: %s", error)
            return False
        return True

    def after(self, index: int) -> list[BrokerEvent]:
        """Events in the ring with a greater index, oldest first."""
        newest = self.next_index - 1
        if index >= newest:
            return []
        return [e for e in self._ring if e.index > index]
