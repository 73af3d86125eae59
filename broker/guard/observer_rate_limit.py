"""Limits the replies to observers, because replies that their receiver does not read fill the broker's memory."""

import time
from collections.abc import Callable

from broker.delivery.state import DeliveryState
from broker.messaging import wire

BYTES_A_SECOND = 256 << 20  # replies to all observers together
BURST_BYTES = 512 << 20
LEDGER_ENTRY_BYTES, NODE_BYTES, EVENTS_BYTES = 128, 1024, 1 << 20


class Pace:
    """A token bucket: the budget grows with time up to BURST_BYTES."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._at = float(BURST_BYTES), clock()

    def spend(self, cost_bytes: int) -> bool:
        """Take `cost_bytes` from the budget; returns False, and takes nothing, when it is too small."""
        now = self._clock()
        self._left = min(float(BURST_BYTES), self._left + (now - self._at) * BYTES_A_SECOND)
        self._at = now
        if cost_bytes > self._left and self._left < BURST_BYTES:
            return False
        self._left -= cost_bytes  # negative after a reply larger than the whole budget
        return True


def reply_bytes(request: wire.AnyRequest, state: DeliveryState) -> int:
    """Estimated size of the reply to an observer's request; 0 for other requests."""
    if isinstance(request, wire.AskLedger):
        return LEDGER_ENTRY_BYTES * state.tasks.next_serial
    if isinstance(request, wire.AskStatus):
        return NODE_BYTES * len(state.fleet.nodes) + len(state.run.config)
    return EVENTS_BYTES if isinstance(request, wire.AskEvents) else 0
