"""Waiting for a version to be staged: asked seldom while most of it is to come, and again when it should be there.

Every question interrupts the engine between two steps, and an answer that comes late keeps a whole version waiting.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from common.weights.receiver import StagingStatus

FIRST_POLL_S, LAST_POLL_S = 0.002, 0.02


class StagingFailed(Exception):
    """A version did not arrive, or not as it was sent."""


async def until_staged(read: Callable[[], Awaitable[StagingStatus]]) -> float:
    """Seconds that the newest publish took to be staged, by its `read` status; raises StagingFailed."""
    started = time.perf_counter()
    pause_s = FIRST_POLL_S
    while True:
        await asyncio.sleep(pause_s)
        status = await read()
        if status.state == "staged":
            return status.receive_s
        if status.state != "receiving":
            raise StagingFailed(status.error or "the transfer was given up")
        pause_s = next_poll_s(time.perf_counter() - started, status.share)


def next_poll_s(took_s: float, share: float) -> float:
    """Until the rest should be there as well, when `share` (0 to 1) took so long; within the bounds of a poll."""
    left_s = took_s * (1 / share - 1) if share > 0 else LAST_POLL_S
    return min(max(left_s, FIRST_POLL_S), LAST_POLL_S)
