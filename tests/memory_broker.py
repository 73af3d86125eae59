"""The reference backend: the delivery contract in one process, without sockets or threads.

The contract suite runs against it as well as against the server; simulations use it with their own clock.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from broker import wire
from broker.client.calls import LearnerBroker, NodeBroker
from broker.contract import RunInfo
from broker.delivery.state import DeliveryState
from broker.server.handlers import Handlers, NotYet

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
        self.use(state)

    def use(self, state: DeliveryState) -> None:
        """Ask another broker from now on."""
        self._handlers = Handlers(state)

    def ask(self, request: wire.Request[R], wait_s: float = 0.0) -> R:
        for reply in _looks(self._handlers, request, wait_s):
            if reply is not None:
                self.position = reply.position or self.position
                return reply.value
            time.sleep(POLL_S)
        return None if isinstance(request, wire.Take) else []  # type: ignore[return-value]


class MemoryNode(NodeBroker):
    """A client for a node."""

    def __init__(self, state: DeliveryState) -> None:
        self.use(state)

    def use(self, state: DeliveryState) -> None:
        """Ask another broker from now on."""
        self._handlers = Handlers(state)

    async def ask(self, request: wire.Request[R], wait_s: float = 0.0, payload: bytes | None = None) -> R:
        for reply in _looks(self._handlers, request, wait_s, payload):
            if reply is not None:
                return reply.value
            await asyncio.sleep(POLL_S)
        return []  # type: ignore[return-value]


def _looks(
    handlers: Handlers, request: wire.Request[R], wait_s: float, payload: bytes | None = None
) -> Iterator[wire.Answer[R] | None]:
    """Yield the answer as it is now, and again whenever the caller comes back within `wait_s`; None: not yet."""
    end = time.monotonic() + wait_s
    look: Any = partial(handlers.answers.first, payload=payload)
    while True:
        handlers.answers.nodes.expire()
        try:
            reply = look(request)
            for number, data in enumerate(handlers.payloads(reply) or ()):
                msgspec.structs.force_setattr(reply.value[number], "payload", data)
            yield reply
        except NotYet:
            yield None
        look = handlers.answers.again
        if time.monotonic() >= end:
            return
