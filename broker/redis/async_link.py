"""One asyncio connection to Redis for many callers: what is asked while a round trip is under way goes out together.

callers -> queue -> [all that is queued: one write, one read of every reply] -> callers, or back into the queue
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.redis.endpoint import CONNECT_TIMEOUT_S, Endpoint
from broker.redis.link import FIRST_PAUSE_S, LONGEST_PAUSE_S, Build, unreachable
from broker.redis.moves import Command, packed, refused, verdict
from common.errors import BrokerUnreachable

CLOSE_S = 1.0
ROUND_CALLS = 64  # so that a reply does not wait for very many payloads


@dataclass(slots=True, eq=False)
class _Call:
    build: Build
    end: float
    started: float
    future: "asyncio.Future[list[Any]]"
    repeated: bool = False
    whole: bool = False


class AsyncLink:
    """Belongs to the event loop of the first call.

    Args:
        endpoint: the server.
        role: for errors.
        read_timeout_s: a server that says nothing for this long is asked again over a new connection.
    """

    def __init__(self, endpoint: Endpoint, role: str, read_timeout_s: float) -> None:
        self.endpoint, self._role, self._read_timeout_s = endpoint, role, read_timeout_s
        self._connection: Any = None
        self._queue: deque[_Call] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._pause_s = FIRST_PAUSE_S
        self._closed = False

    async def close(self) -> None:
        """Drop the connection; calls under way raise BrokerUnreachable."""
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        while self._queue:
            self._fail(self._queue.popleft(), BrokerUnreachable(f"the connection to {self.endpoint.name} was closed"))
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(CLOSE_S):
                    await connection.disconnect()

    async def run(self, build: Build, end: float) -> list[Any]:
        """Replies to `build`'s commands, repeated until `end` (monotonic seconds); all must be safe to repeat.

        The last of them is what is asked for, and the only one that has to succeed: it says what the others came to.

        Raises:
            BrokerUnreachable: no answer until `end`, or closed.
            BrokerError: Redis refuses.
        """
        if self._closed:
            raise BrokerUnreachable(f"the connection to {self.endpoint.name} was closed")
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Call(build, end, time.monotonic(), future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Rounds until nothing is queued."""
        while self._queue:
            calls = [self._queue.popleft() for _ in range(min(len(self._queue), ROUND_CALLS))]
            calls = [call for call in calls if not call.future.done()]
            if not calls:
                continue
            try:
                again = await self._round(calls)
            except asyncio.CancelledError:
                self._queue.extendleft(reversed(calls))
                raise
            if again:
                self._queue.extendleft(reversed(again))
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            else:
                self._pause_s = FIRST_PAUSE_S

    async def _round(self, calls: Sequence[_Call]) -> list[_Call]:
        """One write and the replies; returns the calls that must be repeated after a pause."""
        commands = [list(call.build(call.repeated, call.whole)) for call in calls]
        ends = min(call.end for call in calls)
        limit_s = max(0.05, min(self._read_timeout_s, ends - time.monotonic()))
        replies: list[Any] = []
        error: Exception | None = None
        try:
            async with asyncio.timeout(limit_s):
                await self._exchange([c for of_call in commands for c in of_call], replies)
        except Exception as raised:
            error = raised if not isinstance(raised, TimeoutError) else TimeoutError(f"no answer for {limit_s:.1f} s")
            await self._disconnect()
        again: list[_Call] = []
        at = 0
        for call, of_call in zip(calls, commands, strict=True):
            mine = replies[at : at + len(of_call)]
            at += len(of_call)
            wrong = next((r for r in reversed(mine) if isinstance(r, Exception)), None)
            if len(mine) == len(of_call) and not isinstance(mine[-1], Exception):
                if not call.future.done():
                    call.future.set_result(mine)
            elif self._settle(call, wrong or error or ConnectionError("connection closed")):
                again.append(call)
        return again

    def _settle(self, call: _Call, error: Exception) -> bool:
        """After a failed attempt: whether to pause and repeat it. What needs no pause goes back into the queue."""
        kind = verdict(error)
        now = time.monotonic()
        call.repeated = True
        if kind == "fatal":
            self._fail(call, refused(error, self.endpoint.name, self._role))
        elif kind == "whole" and not call.whole:  # also at the deadline: the server answers
            call.whole = True
            self._queue.appendleft(call)
        elif now >= call.end:
            self._fail(call, unreachable(self.endpoint, now - call.started, error))
        else:
            return True
        return False

    async def _exchange(self, commands: Sequence[Command], replies: list[Any]) -> None:
        from redis.exceptions import ResponseError

        if self._connection is None:
            self._connection = self.endpoint.async_connection()
        connection = self._connection
        if not connection.is_connected:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.connect()
        await connection.send_packed_command(packed(commands), check_health=False)
        for _ in commands:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except ResponseError as error:
                replies.append(error)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    def _fail(self, call: _Call, error: Exception) -> None:
        if not call.future.done():
            call.future.set_exception(error)
