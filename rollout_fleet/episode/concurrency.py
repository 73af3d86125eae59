"""How many episodes a node runs at once: a fixed number, or a limit that follows the load of the engine's KV cache."""

import asyncio
import logging
from collections import deque
from dataclasses import replace

from rollout_fleet.episode.sampler_protocol import EngineCounters

logger = logging.getLogger(__name__)

STEADY_USAGE = 0.9  # share of the KV cache; with more in use the limit does not double
QUEUE = 4  # a queue of so many groups in front of the engine is long enough
CHEAP, COSTLY = 0.025, 0.05  # shares of engine time lost to preemptions: up to CHEAP it grows, from COSTLY it shrinks
LOOKS = 3  # a share is measured over so many looks, all after the last decrease
SHRINK, HALF = 0.9, 0.5  # the shrink factor lies in [HALF, SHRINK]
GROWTH = 0.125  # share by which the slots grow while as many requests end as there are slots


class Slots:
    """Slots for episodes, given out in the order of asking; the limit may change at any time.

    Lowering the limit stops no running episode: new slots are given out again when enough episodes have ended.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.taken < self.limit and not self._waiting:
            self.taken += 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():  # it was given and is not wanted any more
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.taken -= 1
        self._give()

    def resize(self, limit: int) -> None:
        """Give out `limit` slots from now on."""
        self.limit = limit
        self._give()

    def _give(self) -> None:
        while self._waiting and self.taken < self.limit:
            slot = self._waiting.popleft()
            if not slot.done():
                self.taken += 1
                slot.set_result(None)


class AdaptiveLimit:
    """As many slots as fill the engine, but no more than fit its KV cache without much lost time.

    The limit follows the share of engine time that goes into computing preempted requests again. Growth is clocked by
    requests that end, as TCP's is by acknowledgements (Jacobson 1988), because new requests fill little of the cache.
    A decrease takes effect when the slots beyond it are free again; until then there is no second one.
    """

    def __init__(self, low: int, high: int, step: int, holds: int = 0) -> None:
        """Between `low` and `high`; starts with four groups of `step`, or with `holds`, which surely fit the cache."""
        self._low = low
        self._high = max(low, high)
        self._step = step
        self.limit = min(self._high, max(low, 4 * step, holds))
        self._doubling = True
        self._credit = 0.0  # slots earned by requests that ended
        self._requests: int | None = None  # that had ended at the last look
        self._looks: deque[tuple[float, EngineCounters]] = deque(maxlen=LOOKS + 1)  # with the time of each

    def look(self, now: EngineCounters, at_s: float, taken: int) -> int:
        """The limit from now on, after a look at the engine at `at_s`, on any clock, while `taken` slots were taken."""
        ended = 0 if self._requests is None else now.requests - self._requests
        self._requests = now.requests
        self._looks.append((at_s, replace(now)))
        began_s, first = self._looks[0]
        enough = QUEUE * self._step
        lost = (now.recompute_s - first.recompute_s) / (at_s - began_s) if at_s > began_s else 0.0
        settled = len(self._looks) > LOOKS and taken <= self.limit
        spare = min(look.waiting for _, look in self._looks) - enough
        if lost > COSTLY and settled:
            self._doubling = False
            running = sum(look.running for _, look in self._looks)
            share = running / max(1, running + sum(look.waiting for _, look in self._looks))  # that the engine ran
            limit = int(self.limit * min(SHRINK, max(HALF, share)))
            self._lower(limit, f"{lost:.0%} of the engine's time goes into computing preempted requests again")
        elif now.waiting >= enough:
            self._doubling = False
            if settled and spare > 0:
                self._lower(self.limit - spare, f"{enough + spare} requests wait in front of the engine")
        elif taken >= self.limit and lost <= CHEAP:
            self._grow(now, ended)
        return self.limit

    def _lower(self, limit: int, why: str) -> None:
        self._change(max(self._low, limit), why)
        self._looks.clear()

    def _grow(self, now: EngineCounters, ended: int) -> None:
        self._doubling &= now.kv_cache_usage <= STEADY_USAGE and not now.waiting
        self._credit += ended if self._doubling else GROWTH * ended
        earned = min(self.limit, int(self._credit))
        self._credit %= 1
        self._change(min(self._high, self.limit + earned), f"{now.kv_cache_usage:.0%} of the KV cache is in use")

    def _change(self, limit: int, why: str) -> None:
        if limit != self.limit:
            logger.info("concurrency %d instead of %d: %s", limit, self.limit, why)
            self.limit = limit
