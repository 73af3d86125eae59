"""Runs environments on a thread with its own event loop, so that one that blocks cannot stall the node.

A call that outlives its deadline is cancelled; when the thread itself no longer answers (an environment that
blocks without awaiting), the thread is given up and a new one takes over for later calls.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
PROBE_S = 5.0
CLOSE_S = 1.0


class EnvironmentHost:
    """The thread that environments live on; use from one event loop."""

    def __init__(self) -> None:
        self._loop, self._thread = _start()
        self._probing = False

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call `function` and await what it returns, both on the environment thread.

        Raises:
            Exception: whatever the environment raises; RuntimeError in place of what would end a thread or task.
            asyncio.CancelledError: the caller was cancelled; the call is cancelled as well.
        """

        async def run() -> T:
            try:
                return await function()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # the caller gave up
                    raise
                raise RuntimeError("the environment cancelled itself") from None
            except (SystemExit, KeyboardInterrupt) as error:
                raise RuntimeError(f"the environment raised {type(error).__name__}") from error

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            self._probe()
            raise

    def _probe(self) -> None:
        """After a cancelled call: replace the thread unless it answers soon."""
        if self._probing or self._loop.is_closed():
            return
        self._probing = True
        loop, answered = self._loop, threading.Event()
        loop.call_soon_threadsafe(answered.set)

        def check() -> None:
            self._probing = False
            if not answered.is_set() and self._loop is loop:
                logger.error("an environment blocks its thread; later episodes run on a new one")
                loop.call_soon_threadsafe(loop.stop)  # for when it unblocks
                self._loop, self._thread = _start()

        asyncio.get_running_loop().call_later(PROBE_S, check)

    def close(self) -> None:
        """End the thread; an environment that still blocks keeps it until the process ends."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)


def _start() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_serve, args=(loop,), name="environments", daemon=True)
    thread.start()
    return loop, thread


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run until stopped; what is left is cancelled."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CLOSE_S))
    loop.close()
