"""The broker's events: a bounded ring for clients, and a sink for the file."""

import time
from collections import deque
from collections.abc import Callable

from broker.contract import BrokerEvent

RING_EVENTS = 4096


class EventLog:
    """Numbers events and keeps the newest RING_EVENTS; `sink`, when given, sees every one."""

    def __init__(
        self, sink: Callable[[BrokerEvent], None] | None = None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._sink = sink
        self._wall_clock = wall_clock
        self._ring: deque[BrokerEvent] = deque(maxlen=RING_EVENTS)
        self._next_index = 0

    def add(self, kind: str, **detail: str | int | float) -> None:
        """Record that `kind` happened now."""
        event = BrokerEvent(index=self._next_index, time_s=self._wall_clock(), kind=kind, detail=detail)
        self._next_index += 1
        self._ring.append(event)
        if self._sink is not None:
            self._sink(event)

    def after(self, index: int) -> list[BrokerEvent]:
        """Events with a greater index that the ring still holds, oldest first."""
        newest = self._next_index - 1
        if index >= newest:
            return []
        return [e for e in self._ring if e.index > index]
