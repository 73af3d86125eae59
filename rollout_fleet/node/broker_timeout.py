"""Requests to a broker that may be away for a while, and the time after which a node gives it up."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import BrokerUnreachable, SlipstreamError

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 0.5


class BrokerLost(SlipstreamError):
    """The broker stayed unreachable for longer than the node waits."""


class BrokerTimeout:
    """Shared by the node loop and the heartbeat thread: any answer starts it anew."""

    def __init__(self, limit_s: float, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._address, self._clock = limit_s, address, clock
        self._lock = threading.Lock()
        self._silent_since: float | None = None

    def answered(self) -> None:
        with self._lock:
            self._silent_since = None

    def failed(self, error: Exception) -> None:
        """The broker did not answer; raises BrokerLost when the limit has passed."""
        with self._lock:
            now = self._clock()
            if self._silent_since is None:
                self._silent_since = now
            silent_s = now - self._silent_since
        if silent_s >= self._limit_s:
            raise BrokerLost(f"the broker at {self._address} has not answered for {silent_s:.0f} s: {error}")

    async def retry_later(self, error: BrokerUnreachable) -> None:
        """Wait before the next try; raises BrokerLost."""
        logger.warning("%s; trying again", error)
        self.failed(error)
        await asyncio.sleep(RETRY_S)

    async def repeat(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until the broker answers; raises BrokerLost."""
        while True:
            try:
                answer = await request()
                self.answered()
                return answer
            except BrokerUnreachable as error:
                await self.retry_later(error)
