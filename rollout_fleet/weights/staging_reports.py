"""A node tells the learner while a version arrives: where its group can be met, and which parts stand still."""

import time
from collections.abc import Awaitable, Callable

from common.weights.messages import Meet, NodeMessage, Stalled
from common.weights.receiver import StagingStatus
from common.weights.transports.relay import Stall

AGAIN_S = 1.0  # between two reports that a part stands still


class StagingReports:
    """The reports about one publish."""

    def __init__(self, node_id: str, send: Callable[[NodeMessage], Awaitable[None]]) -> None:
        self._node_id, self._send = node_id, send
        self._entries: set[str] = set()
        self._said: dict[int, tuple[Stall, float]] = {}  # by part: the last report, and when

    async def tell(self, status: StagingStatus) -> None:
        """Report what is new in `status`."""
        new = {key: value for key, value in status.entries.items() if key not in self._entries}
        if new:
            self._entries |= new.keys()
            await self._send(Meet(status.epoch, new))
        now = time.monotonic()
        for part, stall in status.stalls.items():
            said = self._said.get(part)
            if said is None or said[0] != stall or now - said[1] >= AGAIN_S:
                self._said[part] = stall, now
                reason = stall.reason[:1000]
                await self._send(Stalled(self._node_id, status.epoch, part, stall.source, stall.pieces, reason))
