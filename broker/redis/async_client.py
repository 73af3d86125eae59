"""The asynchronous Redis client: a node's side of the contract."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from broker.contract import LEARNER_ENDED, HeartbeatReply, LearnerReport, Lease, NodeReport, RunInfo
from broker.redis.async_link import AsyncLink
from broker.redis.endpoint import endpoint
from broker.redis.hand_ins import HandIn, HandIns
from broker.redis.keys import RUNS, pointer_key
from broker.redis.moves import Command, Moves, StoreGone
from broker.redis.store_link import FIND_PAUSE_S, WAIT_PIECE_S, choose_run, store_of
from common.errors import BrokerError, BrokerUnreachable
from common.redis_address import parse_redis
from common.rollouts import GroupMeta, Task

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 2000

Arguments = Callable[[bool], tuple[bytes | str | int, ...]]

_json = msgspec.json.Encoder()
_task = msgspec.msgpack.Decoder(Task)
_learner = msgspec.json.Decoder(LearnerReport)


class AsyncRedisClient:
    """NodeBroker over Redis. Belongs to the event loop that makes the first call.

    Args:
        address: see common/redis_address.py.
        credentials: folder, see broker/redis/endpoint.py.
        deadline_s: without an answer for this long (beyond what the request itself waits), give up.
        max_message_bytes: broker.max_message_bytes; a larger group is refused here.

    Every method raises BrokerUnreachable at the deadline and BrokerError when a move is refused. A cancelled `lease`
    hands back what may have been leased to it. A new store of the run is adopted: to a node it is a broker that forgot
    its leases.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: str | None = None,
        deadline_s: float = 30.0,
        max_message_bytes: int = 1 << 30,
    ) -> None:
        self._endpoint = endpoint(address, "node", credentials)
        self.address = address
        self._deadline_s, self._max_message_bytes = deadline_s, max_message_bytes
        self._run = parse_redis(address).run
        self._link = self._new_link()
        self._idle_waiters: list[AsyncLink] = []
        self._moves: Moves | None = None
        self._hand_ins = HandIns(self._hand_in)
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "AsyncRedisClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls under way raise BrokerUnreachable."""
        await self._hand_ins.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for link in (self._link, *self._idle_waiters):
            await link.close()

    # ---------------------------------------------------------------- the contract

    async def register(self, report: NodeReport) -> RunInfo:
        """See NodeBroker."""
        [run] = await self._move("register", lambda _: _report(report))
        return msgspec.json.decode(run, type=RunInfo)

    async def lease(self, node_id: str, version: int, max_groups: int, wait_s: float) -> list[Lease]:
        """See NodeBroker. While it waits, a heartbeat that reports a newer version makes that one count."""
        nonce, end, told = secrets.token_hex(8), time.monotonic() + wait_s, str(version)
        try:
            while True:
                left_s = max(0.0, end - time.monotonic())

                def arguments(repeated: bool, told: str = told, left_s: float = left_s) -> tuple[str | int, ...]:
                    return (node_id, told, max_groups, nonce, int(repeated), int(left_s * 1000))

                hint_ms, lease_ms, *flat = await self._move("lease", arguments)
                if flat:
                    return _leases(flat, lease_ms / 1000)
                if left_s == 0 or hint_ms < 0:
                    return []
                told = ""
                await self._wait(nonce, min(left_s, hint_ms / 1000 + 0.005, WAIT_PIECE_S))
        except asyncio.CancelledError:
            self._in_background(self._move("cancel", lambda _: (nonce, node_id)))
            raise

    async def heartbeat(self, report: NodeReport, tokens: list[str]) -> HeartbeatReply:
        """See NodeBroker."""
        told, lost = await self._move("heartbeat", lambda _: (*_report(report), *tokens))
        names = [token.decode() for token in lost]
        if not told:
            return HeartbeatReply(lost=names)
        learner = _learner.decode(told)
        return HeartbeatReply(
            lost=names,
            weights_address="" if learner.state in LEARNER_ENDED else learner.weights_address,
            learner_incarnation=learner.incarnation,
            drain=learner.state == "done",
        )

    async def complete(self, node_id: str, token: str, meta: GroupMeta, payload: bytes) -> bool:
        """See NodeBroker. The payload goes straight into a key of its own, the move follows it.

        Raises:
            BrokerError: also when the payload is larger than the broker takes; `fail` the lease then.
        """
        size = len(payload)
        if size > self._max_message_bytes:
            raise BrokerError(f"a group of {size} bytes exceeds broker.max_message_bytes ({self._max_message_bytes})")
        return await self._hand_ins.add(HandIn(node_id, token, meta, payload))

    async def _hand_in(self, groups: Sequence[HandIn]) -> list[int]:
        """Groups of one node in one round trip; see `complete` in delivery.lua for the results."""

        def store(moves: Moves) -> list[Command]:
            return [("SET", moves.keys.payload(g.name), g.payload) for g in groups]  # one MSET costs the server more

        def arguments(_: bool) -> tuple[bytes | str | int, ...]:
            return (groups[0].node_id, *(x for g in groups for x in g.arguments))

        return await self._move("complete", arguments, store)

    async def fail(self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """See NodeBroker."""
        short = reason[:MAX_REASON_CHARS]
        await self._move("fail", lambda _: (node_id, token, short, tokens, f"{seconds:.6f}"))

    async def release(self, node_id: str, tokens: list[str]) -> None:
        """See NodeBroker."""
        await self._move("release", lambda _: (node_id, *tokens))

    async def leave(self, node_id: str) -> None:
        """See NodeBroker."""
        await self._move("leave", lambda _: (node_id,))

    # ---------------------------------------------------------------- moves

    async def _move(
        self, name: str, arguments: Arguments, before: Callable[[Moves], list[Command]] | None = None
    ) -> list[Any]:
        end = time.monotonic() + self._deadline_s
        while True:
            moves = self._moves or await self._find(end)

            def build(repeated: bool, whole: bool, moves: Moves = moves) -> list[Command]:
                first = before(moves) if before is not None else []
                return [*first, moves.command(name, *arguments(repeated), whole=whole)]

            try:
                return moves.answer((await self._link.run(build, end))[-1])
            except StoreGone:
                if self._moves is moves:
                    self._moves = None
                if time.monotonic() >= end:
                    raise
                await asyncio.sleep(FIND_PAUSE_S)

    async def _find(self, end: float) -> Moves:
        """The run's store, waiting for it until `end`."""
        while True:
            run, missing = self._run, "no run is registered on the Redis server"
            if not run:
                run = choose_run(await self._ask(("SMEMBERS", RUNS), end))
            if run:
                store = store_of(run, await self._ask(("GET", pointer_key(run)), end))
                if store:
                    self._moves = Moves(run, store)
                    return self._moves
                missing = f"no run {run} is on the Redis server"
            if time.monotonic() >= end:
                at = self._endpoint.name
                raise BrokerUnreachable(f"{missing} (at {at}); is `slipstream broker CONFIG` running?")
            await asyncio.sleep(FIND_PAUSE_S)

    async def _ask(self, command: Command, end: float) -> Any:
        return (await self._link.run(lambda repeated, whole: [command], end))[0]

    async def _wait(self, nonce: str, wait_s: float) -> None:
        """Until somebody wakes `nonce`, on a connection of its own."""
        if self._moves is None:
            return
        key = self._moves.keys.of(f"wake:{nonce}")
        link = self._idle_waiters.pop() if self._idle_waiters else self._new_link()
        try:
            command: Command = ("BLPOP", key, f"{max(0.01, wait_s):.3f}")
            await link.run(lambda repeated, whole: [command], time.monotonic() + self._deadline_s)
        except asyncio.CancelledError:
            await link.close()  # its connection still waits for an answer
            raise
        self._idle_waiters.append(link)

    def _new_link(self) -> AsyncLink:
        return AsyncLink(self._endpoint, "node", max(1.0, self._deadline_s) + WAIT_PIECE_S)

    def _in_background(self, work: Any) -> None:
        async def run() -> None:
            try:
                await work
            except (BrokerError, BrokerUnreachable) as error:
                logger.warning("leases of a cancelled request stay until their deadline: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _report(report: NodeReport) -> tuple[bytes | str | int, ...]:
    return (_json.encode(report), report.node_id, report.pid, report.host, report.policy_version)


def _leases(flat: list[Any], lease_s: float) -> list[Lease]:
    return [
        Lease(_task.decode(body), token.decode(), attempt, lease_s)
        for token, attempt, body in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]
