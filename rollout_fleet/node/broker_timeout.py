"""How long a node bears a broker that does not answer."""

import threading
import time
from collections.abc import Callable

from common.errors import SlipstreamError


class BrokerLost(SlipstreamError):
    """The broker stayed unreachable for longer than the node waits."""


class Patience:
    """Shared by the node loop and the heartbeat thread: any answer resets it."""

    def __init__(self, limit_s: float, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._address, self._clock = limit_s, address, clock
        self._lock = threading.Lock()
        self._silent_since: float | None = None

    def answered(self) -> None:
        """The broker spoke."""
        with self._lock:
            self._silent_since = None

    def failed(self, error: Exception) -> None:
        """No answer.

        Raises:
            BrokerLost: when the limit is passed.
        """
        with self._lock:
            now = self._clock()
            if self._silent_since is None:
                self._silent_since = now
            silent_s = now - self._silent_since
        if silent_s >= self._limit_s:
            raise BrokerLost(f"the broker at {self._address} has not answered for {silent_s:.0f} s: {error}")
