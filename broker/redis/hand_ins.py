"""Groups that a node hands in: those that come while a round trip is under way share the next one."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from common.errors import BrokerError, BrokerUnreachable
from common.rollouts import GroupMeta

logger = logging.getLogger(__name__)

AGAIN_S = 0.5  # before payloads that Redis did not take are sent again
MOST_GROUPS = 32  # in one round trip
MOST_BYTES = 8 << 20  # likewise, unless one group is larger

_json = msgspec.json.Encoder()


class HandIn:
    """One group on its way. `name` is that of its payload key, the same in every repetition."""

    __slots__ = ("arguments", "future", "name", "node_id", "payload")

    def __init__(self, node_id: str, token: str, meta: GroupMeta, payload: bytes) -> None:
        nonce = secrets.token_hex(4)
        self.node_id, self.payload = node_id, payload
        self.name = f"{token}:{nonce}".encode()
        self.arguments = (token, nonce, _json.encode(meta), meta.sampled_tokens, len(payload))
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class HandIns:
    """Sends what is added, in order, some at once.

    Args:
        send: hands in groups of one node; gives for each 1 (accepted), 0 (refused) or -1 (its payload is gone).
    """

    def __init__(self, send: Callable[[Sequence[HandIn]], Awaitable[list[int]]]) -> None:
        self._send = send
        self._waiting: deque[HandIn] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def add(self, group: HandIn) -> bool:
        """Hand in; returns whether it was accepted. Raises what `send` raises."""
        self._waiting.append(group)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await group.future

    async def close(self) -> None:
        """Give up what is under way; it raises BrokerUnreachable."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._fail(self._waiting, BrokerUnreachable("the connection was closed"))

    async def _work(self) -> None:
        while self._waiting:
            groups = self._next()
            try:
                results = await self._send(groups)
            except asyncio.CancelledError:
                self._fail(groups, BrokerUnreachable("the connection was closed"))
                raise
            except (BrokerError, BrokerUnreachable) as error:
                self._fail(groups, error)
                continue
            for group, result in zip(groups, results, strict=True):
                if result < 0:
                    logger.warning("Redis has no payload %s, as when it is full; sending it again", group.name)
                    self._waiting.append(group)
                elif not group.future.done():
                    group.future.set_result(bool(result))
            if min(results) < 0:
                await asyncio.sleep(AGAIN_S)

    def _next(self) -> list[HandIn]:
        """The oldest group, and those behind it that fit: of the same node, not too many, not too large."""
        groups, size = [self._waiting.popleft()], 0
        while self._waiting and len(groups) < MOST_GROUPS:
            group = self._waiting[0]
            size += len(groups[-1].payload)
            if group.node_id != groups[0].node_id or size + len(group.payload) > MOST_BYTES:
                break
            groups.append(self._waiting.popleft())
        return groups

    def _fail(self, groups: Sequence[HandIn] | deque[HandIn], error: Exception) -> None:
        for group in list(groups):
            if not group.future.done():
                group.future.set_exception(error)
