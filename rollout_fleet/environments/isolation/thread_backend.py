"""Environments on a thread with its own event loop, so that one that blocks cannot stall the node.

A call that outlives its deadline is cancelled. If an environment blocks without awaiting, the thread no longer answers:
it is given up, and a new thread serves later calls.

Many episodes end in the same engine step, and waking a thread costs more than a typical environment's step. So all
calls of one turn of the event loop cross together with one wake-up, and so do their answers.
"""

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from rollout_fleet.environments.isolation import backend
from rollout_fleet.environments.protocol import Action, Observation, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")
PROBE_S = 5.0
THREAD_END_S = 1.0
_kept: list[asyncio.AbstractEventLoop] = []  # the next thread takes it over


class _Crossing:
    """Runs callbacks in another thread's event loop, all of one turn of the posting loop together."""

    def __init__(self, target: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self._waiting: list[Callable[[], None]] = []

    def post(self, callback: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(callback)

    def _flush(self) -> None:
        callbacks = self._waiting
        self._waiting = []
        if not self.target.is_closed():
            self.target.call_soon_threadsafe(lambda: [callback() for callback in callbacks])


class EnvironmentThread:
    """The thread that environments live on; used from one event loop."""

    def __init__(self) -> None:
        self._probing = False
        self._keeps_loop = False
        self._renew(_kept.pop() if _kept else asyncio.new_event_loop())

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a thread; it gets crossings of its own, each used by one thread on either side."""
        self._loop = loop
        self._thread = threading.Thread(target=self._serve, args=(loop,), name="environments", daemon=True)
        self._thread.start()
        self._there = _Crossing(self._loop)
        self._back = _Crossing(self._loop)

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call `function` and await what it returns, both on the environment thread.

        Raises what the environment raises; RuntimeError stands for what would end a thread or task. When the caller is
        cancelled, the call is cancelled as well.
        """
        if self._loop.is_closed():
            raise RuntimeError("the environment thread has ended")
        here = asyncio.get_running_loop()
        there = self._loop
        if self._back.target is not here:
            self._back = _Crossing(here)
        back = self._back
        answer = here.create_future()
        begun: list[asyncio.Task[T]] = []  # used on the environment thread

        def begin() -> None:
            if not answer.cancelled():
                begun.append(there.create_task(_contained(function)))
                begun[0].add_done_callback(lambda task: back.post(lambda: _settle(answer, task)))

        self._there.post(begin)
        try:
            return await answer
        except asyncio.CancelledError:
            if not there.is_closed():
                there.call_soon_threadsafe(lambda: [task.cancel() for task in begun])
            self._probe()
            raise

    def _probe(self) -> None:
        """After a cancelled call: replace the thread unless it answers soon."""
        if self._probing or self._loop.is_closed():
            return
        self._probing = True
        loop = self._loop
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)

        def check() -> None:
            self._probing = False
            if not answered.is_set() and self._loop is loop:
                logger.error("an environment blocks its thread; later episodes run on a new one")
                loop.call_soon_threadsafe(loop.stop)  # for when it unblocks
                self._renew(asyncio.new_event_loop())

        asyncio.get_running_loop().call_later(PROBE_S, check)

    def close(self, keep_loop: bool = False) -> None:
        """End the thread; an environment that still blocks keeps it until the process ends.

        `keep_loop`: the process's next EnvironmentThread takes the event loop over. Clients that user code keeps in
        its modules belong to the loop of their first call.
        """
        self._keeps_loop = keep_loop
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(THREAD_END_S)
        self._keeps_loop = keep_loop and not self._thread.is_alive()
        if self._keeps_loop:
            _kept.append(self._loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run until stopped."""
        loop.run_forever()
        if not self._keeps_loop or loop is not self._loop:
            _end(loop)


def _settle(answer: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    """On the caller's thread: give it the task's result or error."""
    error = None if task.cancelled() else task.exception()  # looked at, also when no caller waits
    if answer.done():
        return
    if task.cancelled():  # not by the caller, whose answer would be done
        answer.set_exception(RuntimeError("the environment's thread was given up"))
    elif error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


async def _contained(function: Callable[[], Awaitable[T]]) -> T:
    """On the environment thread: what would end the thread or the task becomes an error of the environment."""
    try:
        return await function()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the caller gave up, or the thread ends
            raise
        raise RuntimeError("the environment cancelled itself") from None
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the environment raised {type(error).__name__}") from error


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel unfinished tasks, and close the loop."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=THREAD_END_S))
    loop.close()


@atexit.register
def _end_kept() -> None:
    while _kept:
        _end(_kept.pop())


class ThreadBackend(backend.Backend):
    def __init__(self, kind: Callable[..., Any], options: dict[str, Any], thread: EnvironmentThread) -> None:
        super().__init__(options, backend.takes_group_seed(kind))
        self._kind = kind
        self._thread = thread

    def environment(self, problem: dict[str, Any], seed: int, group_seed: int) -> backend.EnvironmentHandle:
        return _ThreadHandle(self._thread, partial(self._kind, problem, **self.keywords(seed, group_seed)))

    async def run_agent(self, problem: dict[str, Any], seed: int, group_seed: int, **access: str) -> Any:
        return await self._thread.call(partial(self._kind, problem, **access, **self.keywords(seed, group_seed)))


class _ThreadHandle(backend.EnvironmentHandle):
    def __init__(self, thread: EnvironmentThread, build: Callable[[], Any]) -> None:
        self._thread = thread
        self._build = build
        self._environment: Any = None

    async def reset(self) -> Observation:
        async def begin() -> Observation:
            self._environment = self._build()
            return await self._environment.reset()

        return await self._thread.call(begin)

    async def step(self, action: Action) -> StepResult:
        return await self._thread.call(lambda: self._environment.step(action))

    async def close(self) -> None:
        if hasattr(self._environment, "close"):  # without it, the thread need not be woken
            with contextlib.suppress(Exception):
                async with asyncio.timeout(backend.CLOSE_S):
                    await self._thread.call(lambda: backend.close_environment(self._environment))
