"""The reference backend: the delivery contract in one process, without sockets or threads.

The contract suite runs against it as well as against the server; simulations use it with their own clock.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from broker.contract import RunInfo
from broker.delivery.state import DeliveryState
from broker.messaging import wire
from broker.messaging.client_methods import LearnerBroker, NodeBroker
from broker.server.handlers import NOT_YET, answer, nothing

POLL_S = 0.005

R = TypeVar("R")


class MemoryBroker:
    """A shared state; `learner()` and `node()` return clients of it."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = DeliveryState(run, clock)
        self.state.address = "memory"

    def learner(self) -> "MemoryLearner":
        return MemoryLearner(self.state)

    def node(self) -> "MemoryNode":
        return MemoryNode(self.state)


class MemoryLearner(LearnerBroker):
    """A client for a learner or an observer."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state

    def ask(self, request: wire.Request[R], wait_s: float = 0.0) -> R:
        for value in _looks(self._state, request, wait_s):
            if value is not NOT_YET:
                if isinstance(request, wire.LearnerRequest) and request.promised:
                    self.position = self._state.position
                return value
            time.sleep(POLL_S)
        return nothing(cast(wire.AnyRequest, request))


class MemoryNode(NodeBroker):
    """A client for a node."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state

    async def ask(self, request: wire.Request[R], wait_s: float = 0.0, payload: bytes | None = None) -> R:
        for value in _looks(self._state, request, wait_s, payload):
            if value is not NOT_YET:
                return value
            await asyncio.sleep(POLL_S)
        return nothing(cast(wire.AnyRequest, request))


def _looks(state: DeliveryState, request: wire.Request[Any], wait_s: float, payload: bytes | None = None) -> Any:
    """Yield the answer as it is now, and again whenever the caller comes back within `wait_s`."""
    end, again = time.monotonic() + wait_s, False
    while not again or time.monotonic() < end:
        state.expire()
        yield answer(state, cast(wire.AnyRequest, request), payload, again)
        again = True
