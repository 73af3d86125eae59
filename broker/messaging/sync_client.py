"""The synchronous client: the asynchronous one in an event loop of its own thread."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from broker.contract import LogPosition
from broker.messaging import wire
from broker.messaging.async_client import Connection
from broker.messaging.client_methods import LearnerBroker
from common.errors import BrokerUnreachable

R = TypeVar("R")


class BrokerClient(LearnerBroker):
    """LearnerBroker and ObserverBroker over ZeroMQ; any thread may call. The arguments are those of Connection."""

    def __init__(self, address: str, **options: Any) -> None:
        self._connection = Connection(address, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker-client", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def position(self) -> LogPosition | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._connection.position

    def ask(self, request: wire.Request[R], wait_s: float = 0.0) -> R:
        answer: Future[R] = Future()
        frames = [wire.encode(request)]
        with self._closing:  # so that the loop does not end between the check and the call
            if not self._thread.is_alive():  # closed, or this process was forked from the one that connected
                raise BrokerUnreachable(f"the connection to the broker at {self.address} was closed")
            self._loop.call_soon_threadsafe(self._connection.start, request, frames, answer, wait_s)
        return answer.result()

    def close(self) -> None:
        """Close the connection; calls under way raise BrokerUnreachable."""
        with self._closing:
            if self._thread.is_alive():
                asyncio.run_coroutine_threadsafe(self._connection.close(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
