"""How many episodes a node runs at once: a number, or one that follows the pressure on the engine's KV cache."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)

STEADY_USAGE = 0.9  # of the KV cache; with more in use the limit does not double
SHRINK = 0.75
THRASHING = 0.05  # share of the running requests thrown out between two looks; a few are the price of a full cache
QUEUE = 4  # steps' worth of requests in front of the engine that are enough
SETTLE_LOOKS = 3  # looks after a decrease before the next change: what runs has to end first


class Places:
    """Places for episodes, given out in the order of asking; the limit may change at any time.

    A limit below what is taken stops nobody: fewer places are given out until enough episodes have ended.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.taken < self.limit and not self._waiting:
            self.taken += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given and is not wanted any more
                self._free()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._free()

    def resize(self, limit: int) -> None:
        """Give out `limit` places from now on."""
        self.limit = limit
        self._give()

    def _free(self) -> None:
        self.taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and self.taken < self.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.taken += 1
                place.set_result(None)


@dataclass(frozen=True)
class Pressure:
    """The engine at one look.

    Attributes:
        kv_cache_usage: share of the KV cache in use.
        waiting: requests that the engine has not let in, for want of KV cache or of room in its batch.
        preemptions: requests thrown out of the KV cache so far; each is computed again from its prompt.
    """

    kv_cache_usage: float
    waiting: int
    preemptions: int


class AdaptiveLimit:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989), doubling until the first sign of pressure.

    More places while every one is taken and the queue in front of the engine is short: a short one keeps the engine
    full and costs nothing, a long one only makes samples older. A quarter fewer when the engine throws out many.
    """

    def __init__(self, low: int, high: int, step: int) -> None:
        """Between `low` and `high`, `step` more at a time; starts where four steps fit."""
        self._low, self._high, self._step = low, max(low, high), step
        self.limit = min(self._high, max(low, 4 * step))
        self._doubling = True
        self._preemptions = 0
        self._settling = 0

    def look(self, pressure: Pressure, taken: int) -> int:
        """The limit from now on, after a look at the engine while `taken` places were taken."""
        thrown_out = pressure.preemptions - self._preemptions
        self._preemptions = pressure.preemptions
        if self._settling > 0:
            self._settling -= 1
        elif thrown_out >= max(2, THRASHING * taken):
            self._change(max(self._low, int(self.limit * SHRINK)), f"{thrown_out} requests lost their KV cache")
            self._settling, self._doubling = SETTLE_LOOKS, False
        elif pressure.waiting >= QUEUE * self._step:
            self._doubling = False
        elif taken >= self.limit:
            self._doubling &= pressure.kv_cache_usage <= STEADY_USAGE and not pressure.waiting
            grown = 2 * self.limit if self._doubling else self.limit + self._step
            self._change(min(self._high, grown), f"{pressure.kv_cache_usage:.0%} of the KV cache is in use")
        return self.limit

    def _change(self, limit: int, why: str) -> None:
        if limit != self.limit:
            logger.info("concurrency %d instead of %d: %s", limit, self.limit, why)
            self.limit = limit
