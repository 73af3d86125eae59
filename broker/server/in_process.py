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
from broker.server.answers import NOT_YET, answer, nothing

POLL_S = 0.005

R = TypeVar("R")


class MemoryBroker:
    """A shared state; `learner()` and `node()` return clients of it."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = DeliveryState(run, clock)
        self.state.address = "memory"

    def learner(self) -> "MemoryLearner":
        """Make a client for a learner or an observer."""
        return MemoryLearner(self.state)

    def node(self) -> "MemoryNode":
        """Make a client for a node."""
        return MemoryNode(self.state)


class MemoryLearner(LearnerBroker):
    """A LearnerBroker over a state in this process."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state

    def ask(self, request: wire.Request[R], wait_s: float = 0.0) -> R:
        """See ObserverBroker."""
        value, end = _look(self._state, request), time.monotonic() + wait_s
        while value is NOT_YET and time.monotonic() < end:
            time.sleep(POLL_S)
            value = _look(self._state, request, again=True)
        return nothing(cast(wire.AnyRequest, request)) if value is NOT_YET else value


class MemoryNode(NodeBroker):
    """A NodeBroker over a state in this process."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state

    async def ask(self, request: wire.Request[R], wait_s: float = 0.0, payload: bytes | None = None) -> R:
        """See NodeBroker."""
        value, end = _look(self._state, request, payload), time.monotonic() + wait_s
        while value is NOT_YET and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
            value = _look(self._state, request, again=True)
        return nothing(cast(wire.AnyRequest, request)) if value is NOT_YET else value


def _look(state: DeliveryState, request: wire.Request[Any], payload: bytes | None = None, again: bool = False) -> Any:
    state.expire()
    return answer(state, cast(wire.AnyRequest, request), payload, again)
