"""The asynchronous client: a node's side of the contract, many requests in flight on one connection.

It reads the ZeroMQ socket's file descriptor with the running event loop. That descriptor signals edges only, so the
socket is read until it is empty after every signal and after every send.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

import zmq

from broker.contract import HeartbeatReply, Lease, NodeReport, RunInfo
from broker.messaging import wire
from broker.messaging.addresses import NOT_CONNECTED_S, SILENT_S, TURN_PAUSE_S, Addresses
from broker.messaging.pending_requests import Call, Calls
from broker.messaging.sockets import connect_dealer, frame_limit
from broker.messaging.sync_client import checked, new_identity, received, unreachable
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.rollouts import GroupMeta
from common.security.credentials import Credential
from common.security.curve import Handshakes

logger = logging.getLogger(__name__)

LONG_POLL_S = 5.0  # a longer wait is asked for in pieces, each a sign of life
MAX_REASON_CHARS = 2000
SEND_PAUSE_S = 0.02  # before another attempt while there is no connection

R = TypeVar("R", bound=wire.SingleReply)


class AsyncBrokerClient:
    """NodeBroker over ZeroMQ. Belongs to the event loop that makes the first call.

    Args:
        address: tcp://HOST:PORT or ipc://PATH; several with commas between them.
        deadline_s: without an answer for this long (beyond what the request itself waits), give up.
        retry_s: pause before a request is repeated.
        max_message_bytes: broker.max_message_bytes; a larger group is refused here.
        credential: proves who this client is, to a broker that asks for it.

    Every method raises BrokerUnreachable at the deadline, BrokerError when the broker refuses, and UsageError when it
    refuses the credential. A cancelled `lease` hands back what the broker may have leased to it.
    """

    def __init__(
        self,
        address: str,
        *,
        deadline_s: float = 30.0,
        retry_s: float = 2.0,
        max_message_bytes: int = 1 << 30,
        credential: Credential | None = None,
    ) -> None:
        self._addresses = Addresses(address)
        self._credential = credential
        self._handshakes: Handshakes | None = None
        self._deadline_s, self._retry_s = deadline_s, retry_s
        self._max_message_bytes = max_message_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count()
        self._calls = Calls(self._attempt)
        self._reading = False  # a read is due in this turn of the loop
        self._since = 0.0  # when the broker was connected to or last heard of, event loop time
        self._turning: asyncio.TimerHandle | None = None
        self._cancelled_leases: dict[int, str] = {}  # request id -> node
        self._background: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """The broker that this client uses now."""
        return self._addresses.current

    async def __aenter__(self) -> "AsyncBrokerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way raise BrokerUnreachable."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for call in list(self._calls.by_id.values()):
            self._finish(call, BrokerUnreachable(f"the connection to the broker at {self.address} was closed"))
        self._calls.close()
        if self._turning is not None:
            self._turning.cancel()
        self._disconnect()
        self._context.term()

    # ---------------------------------------------------------------- the contract

    async def register(self, report: NodeReport) -> RunInfo:
        """See NodeBroker."""
        return (await self._ask(wire.Registered, wire.Register, report=report)).run

    async def lease(self, node_id: str, version: int, max_groups: int, wait_s: float) -> list[Lease]:
        """See NodeBroker. While it waits, a heartbeat that reports a newer version makes that one count."""
        end = self._running_loop().time() + wait_s
        while True:
            left_s = max(0.0, end - self._running_loop().time())
            leases = await self._lease_piece(node_id, version, max_groups, min(left_s, LONG_POLL_S))
            if leases or left_s <= LONG_POLL_S:
                return leases

    async def heartbeat(self, report: NodeReport, tokens: list[str]) -> HeartbeatReply:
        """See NodeBroker."""
        return (await self._ask(wire.Beaten, wire.Heartbeat, report=report, tokens=tokens)).reply

    async def complete(self, node_id: str, token: str, meta: GroupMeta, payload: bytes) -> bool:
        """See NodeBroker.

        Raises:
            BrokerError: also when the payload is larger than the broker takes; `fail` the lease then.
        """
        if len(payload) > self._max_message_bytes:
            raise BrokerError(
                f"a group of {len(payload)} bytes exceeds broker.max_message_bytes ({self._max_message_bytes})"
            )
        reply = await self._ask(wire.Completed, wire.Complete, payload=payload, node_id=node_id, token=token, meta=meta)
        return reply.accepted

    async def fail(self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """See NodeBroker."""
        fields = {"reason": reason[:MAX_REASON_CHARS], "tokens": tokens, "seconds": seconds}
        await self._ask(wire.Done, wire.Fail, None, node_id=node_id, token=token, **fields)

    async def release(self, node_id: str, tokens: list[str]) -> None:
        """See NodeBroker."""
        await self._ask(wire.Done, wire.Release, node_id=node_id, tokens=tokens)

    async def leave(self, node_id: str) -> None:
        """See NodeBroker."""
        await self._ask(wire.Done, wire.Leave, node_id=node_id)

    # ---------------------------------------------------------------- calls

    async def _ask(self, expected: type[R], kind: type[wire.Request], payload: bytes | None = None, **fields: Any) -> R:
        call = self._start(kind(id=next(self._ids), **fields), 0.0, payload)
        try:
            return checked(await call.future, expected)
        finally:
            self._forget(call)

    async def _lease_piece(self, node_id: str, version: int, max_groups: int, wait_s: float) -> list[Lease]:
        request = wire.AskLease(
            id=next(self._ids), node_id=node_id, version=version, max_groups=max_groups, wait_s=wait_s
        )
        call = self._start(request, wait_s)
        call.lease_for = node_id
        try:
            return checked(await call.future, wire.Leased).leases
        except asyncio.CancelledError:
            if call.future.done() and not call.future.cancelled():
                self._hand_back(node_id, call.future.result())
            else:
                self._cancelled_leases[call.id] = node_id
                self._in_background(partial(self._cancel, call.id))
            raise
        finally:
            self._forget(call)

    async def _cancel(self, target: int) -> None:
        await self._ask(wire.Done, wire.Cancel, target=target)
        self._cancelled_leases.pop(target, None)

    def _hand_back(self, node_id: str, reply: wire.SingleReply) -> None:
        if isinstance(reply, wire.Leased) and reply.leases:
            self._in_background(partial(self.release, node_id, [lease.token for lease in reply.leases]))

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except (BrokerError, BrokerUnreachable) as error:
                logger.warning("leases of a cancelled request stay until their deadline: %s", error)

        task = self._running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _start(self, request: wire.Request, wait_s: float, payload: bytes | None = None) -> Call:
        loop = self._running_loop()
        frames = [wire.encode(request)] if payload is None else [wire.encode(request), payload]
        limit_s = wait_s + self._deadline_s
        call = Call(request.id, frames, limit_s, loop.time() + limit_s, loop.create_future())
        self._calls.by_id[call.id] = call
        self._attempt(call)
        return call

    def _attempt(self, call: Call) -> None:
        """Send, and come back here when no answer came in time."""
        loop = self._running_loop()
        now = loop.time()
        if call.future.done():
            return
        if now >= call.end:
            self._finish(call, unreachable(",".join(self._addresses.all), call.limit_s, call.connected))
            return
        silent_s = now - max(self._since, call.end - call.limit_s)
        if self._addresses.several and silent_s > (SILENT_S if call.connected else NOT_CONNECTED_S):
            self._turn()
        sent = self._send(call.frames)
        refusal = self._refusal(sent)
        if refusal:
            self._finish(call, UsageError(refusal))
            return
        call.connected = sent
        self._calls.remind_at(call, min(call.end, now + (self._retry_s if sent else SEND_PAUSE_S)))
        if not self._reading:  # one read for all that is sent in this turn of the loop
            self._reading = True
            loop.call_soon(self._read)

    def _refusal(self, sent: bool) -> str:
        """Why the broker will not have this client, as far as an attempt to send tells."""
        if self._handshakes is None:
            return ""
        if not sent:
            return self._handshakes.refusal()
        self._handshakes.proven()
        return ""

    def _finish(self, call: Call, error: Exception) -> None:
        self._forget(call)
        if not call.future.done():
            call.future.set_exception(error)

    def _forget(self, call: Call) -> None:
        self._calls.by_id.pop(call.id, None)

    # ---------------------------------------------------------------- the socket

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._connect(self._loop)
        return self._loop

    def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._handshakes = connect_dealer(
            self._context, self.address, new_identity(), frame_limit(self._max_message_bytes), self._credential
        )
        loop.add_reader(cast(int, self._socket.getsockopt(zmq.FD)), self._read)
        self._since = loop.time()

    def _disconnect(self) -> None:
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(cast(int, self._socket.getsockopt(zmq.FD)))
            if self._handshakes is not None:
                self._handshakes.close()
            self._socket.close(linger=0)
            self._socket = None

    def _turn(self, leader: str = "") -> None:
        """Connect to another broker; calls under way are sent again."""
        loop, self._turning = self._running_loop(), None
        if self._socket is None or not (self._addresses.several or leader):
            return
        self._disconnect()
        self._addresses.turn(self.address, leader)
        self._connect(loop)
        for call in self._calls.by_id.values():
            call.connected = False
            self._calls.remind_at(call, loop.time() + SEND_PAUSE_S)

    def _send(self, frames: list[bytes]) -> bool:
        if self._socket is None:
            raise BrokerUnreachable(f"the connection to the broker at {self.address} was closed")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        self._reading = False
        while self._socket is not None:
            try:
                header, *payloads = received(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = wire.decode_reply(header, len(payloads))
            except wire.WireError as error:
                reply = wire.Refused(id=error.request_id, reason=f"the broker's answer cannot be read: {error}")
            for single in wire.singles(reply):
                self._dispatch(single)

    def _dispatch(self, reply: wire.SingleReply) -> None:
        self._since = self._running_loop().time()
        if isinstance(reply, wire.Waiting):
            call = self._calls.by_id.get(reply.id)
            if call is not None:
                logger.warning("the broker has this request but cannot answer yet: %s", reply.reason)
                call.end = self._running_loop().time() + call.limit_s
            return
        if isinstance(reply, wire.NotLeading):
            if self._turning is None:
                self._turning = self._running_loop().call_later(TURN_PAUSE_S, self._turn, reply.leader)
            return
        call = self._calls.by_id.pop(reply.id, None)
        if call is not None:
            if not call.future.done():
                call.future.set_result(reply)
            elif call.future.cancelled() and call.lease_for:  # before the cancelled task had its turn
                self._hand_back(call.lease_for, reply)
            return
        node_id = self._cancelled_leases.pop(reply.id, None)
        if node_id is not None:
            self._hand_back(node_id, reply)
        elif isinstance(reply, wire.Refused):
            logger.error("the broker refused a message: %s", reply.reason)
