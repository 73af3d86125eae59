"""Requests under way on one asynchronous connection, and the one timer that reminds of those without an answer.

Nearly every call is answered long before its reminder. A timer for each would cost more than its other bookkeeping.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from broker.messaging import wire

TIMER_STEP_S = 0.01  # reminders this close come together, so that many calls without an answer cost few timers
NEVER = float("inf")

R = TypeVar("R")
AnyFuture = asyncio.Future[R] | concurrent.futures.Future[R]


@dataclass(slots=True)
class Call:
    """A request under way: repeated until answered, or given up at `end` (event loop time)."""

    request: wire.Request[Any]
    frames: list[bytes]
    limit_s: float
    end: float
    future: AnyFuture[Any]  # the answer
    quiet_until: float = 0.0  # so long may the broker wait with the answer
    remind_at: float = 0.0
    connected: bool = False
    sent_at: int = 0  # how often the connection had changed when the request was sent

    @property
    def id(self) -> int:
        return self.request.id


class Calls:
    """Calls by id. `remind` is called for each that is still here at its `remind_at`."""

    def __init__(self, remind: Callable[[Call], None]) -> None:
        self.by_id: dict[int, Call] = {}
        self._remind = remind
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def remind_at(self, call: Call, when: float) -> None:
        """Come back to `call` at event loop time `when`, unless it has left by then."""
        call.remind_at = when
        self._wake_at(when)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_at(self, when: float) -> None:
        if self._timer is None or when < self._timer_at:
            self.close()
            self._timer_at = when
            self._timer = asyncio.get_running_loop().call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for call in [c for c in self.by_id.values() if c.remind_at <= now]:
            if call.id in self.by_id:
                call.remind_at = NEVER
                self._remind(call)
        next_at = min((c.remind_at for c in self.by_id.values()), default=NEVER)
        if next_at < NEVER:
            self._wake_at(max(next_at, now + TIMER_STEP_S))
