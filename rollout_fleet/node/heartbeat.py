"""The node's contact with its broker: heartbeats, and the time after which the node gives a silent broker up.

Heartbeats have a thread with an event loop and a connection of its own. So neither the engine's start, which blocks for
seconds, nor a busy node loop delays them.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

from broker.client.calls import NodeBroker
from broker.contract import HeartbeatReply
from common.errors import BrokerError, BrokerUnreachable, SlipstreamError
from common.process.logs import log_end
from common.span_buffer import SPANS
from rollout_fleet.node.node_status import NodeStatusTracker

logger = logging.getLogger(__name__)

Connect = Callable[[], AbstractAsyncContextManager[NodeBroker]]
T = TypeVar("T")
RETRY_S = 0.5


class BrokerLost(SlipstreamError):
    """The broker stayed unreachable for longer than the node waits."""


class BrokerTimeout:
    """Shared by the node loop and the heartbeat thread: any answer starts it anew."""

    def __init__(self, limit_s: float, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._address = address
        self._clock = clock
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


class Heartbeat:
    """Renews the leases of `status` every `every_s` seconds."""

    def __init__(
        self, connect: Connect, status: NodeStatusTracker, timeout: BrokerTimeout, every_s: float, log: Path
    ) -> None:
        """`log` is the node's log, whose end the broker may ask for."""
        self._connect = connect
        self._status = status
        self._timeout = timeout
        self._every_s = every_s
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, on_reply: Callable[[HeartbeatReply], None], on_lost: Callable[[SlipstreamError], None]) -> None:
        """Begin; both callbacks are called in the event loop that runs now."""
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._owner = asyncio.get_running_loop()
        self._thread.start()

    def beat_now(self) -> None:
        """Do not wait for the next turn."""
        if self._loop is not None and self._wake is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def stop(self) -> None:
        """End the thread; a beat that is under way is waited for."""
        self._stopping = True
        self.beat_now()
        await asyncio.to_thread(self._thread.join, 15.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_until_stopped())
        except (BrokerError, BrokerLost) as error:  # refused: another process has this node's id
            self._tell(self._on_lost, error)
        except Exception as error:
            logger.exception("heartbeats ended")
            self._tell(self._on_lost, SlipstreamError(f"heartbeats ended: {type(error).__name__}: {error}"))

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        log: str | None = None
        async with self._connect() as broker:
            while not self._stopping:
                spans = SPANS.batch(self._status.node_id)
                sent_s = SPANS.now()
                try:
                    reply = await broker.heartbeat(self._status.report(), self._status.leases, log, spans)
                    SPANS.heard(sent_s, reply.time_s, reply.span_bytes)
                    log = log_end(self._log) if reply.log_rank >= 0 else None
                    self._timeout.answered()
                    self._tell(self._on_reply, reply)
                except BrokerError:
                    raise
                except SlipstreamError as error:
                    logger.warning("heartbeat failed: %s", error)
                    SPANS.lost(len(spans.spans) if spans is not None else 0)
                    self._timeout.failed(error)
                if log is not None:
                    self._wake.set()  # an observer waits for it
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._every_s)
                self._wake.clear()

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        if not self._owner.is_closed():
            self._owner.call_soon_threadsafe(callback, *arguments)
