"""The asynchronous client: many requests in flight on one connection.

A connection loses nothing while it stands, so a request is repeated only when another one stands. A slow link may take
long for a large message: as long as parts of messages come and go, no deadline passes. When nothing moves although an
answer is due, the client connects anew. The queues of the old connection end with it, the broker's answers too. So no
answer ever waits behind a copy of itself.
"""

import asyncio
import concurrent.futures
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from broker.contract import Lease, LogPosition
from broker.messaging import wire
from broker.messaging.client_methods import LEASE_PIECE_S, NodeBroker
from broker.messaging.loop_socket import LoopSocket
from broker.messaging.sockets import frame_limit
from common.errors import BrokerError, BrokerUnreachable, SlipstreamError, StoreChanged, UsageError
from common.security.credentials import Credential

logger = logging.getLogger(__name__)

SEND_PAUSE_S = 0.02  # before another attempt while there is no connection
WAITING_PAUSE_S = 0.5  # before an observer asks again that the broker has told to wait
NOT_CONNECTED_S = 2.0  # without a connection for this long, the next of several addresses is tried
SILENT_S = 8.0  # likewise without any answer; with one address, the client connects anew
LOOK_S = 0.5  # between two looks at what moves
BUFFER_BYTES, BUFFER_BYTES_PER_S = 8 << 20, 1 << 20  # a proxy may acknowledge so much, and pass it on this slowly
TURN_PAUSE_S = 0.2
TIMER_STEP_S = 0.01  # reminders this close come together, so that many calls without an answer cost few timers
NEVER = float("inf")

R = TypeVar("R")
AnyFuture = asyncio.Future[R] | concurrent.futures.Future[R]


@dataclass(slots=True)
class Call:
    """A request under way: given up at `end` (event loop time), unless something moves."""

    request: wire.Request[Any]
    frames: list[bytes]
    limit_s: float
    end: float
    future: AnyFuture[Any]  # the answer
    quiet_until: float = 0.0  # no answer is due before
    remind_at: float = 0.0
    sent_on: int = 0  # the connection that it was sent on; 0: none

    @property
    def id(self) -> int:
        return self.request.id


class Calls:
    """Calls by id. `remind` is called for each that is still here at its `remind_at`.

    Nearly every call is answered long before. A timer for each would cost more than its other bookkeeping.
    """

    def __init__(self, remind: Callable[[Call], None]) -> None:
        self.by_id: dict[int, Call] = {}
        self._remind = remind
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def remind_at(self, call: Call, when: float) -> None:
        """Come back to `call` at event loop time `when`, unless it has left by then."""
        call.remind_at = when
        self._wake_at(when)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_at(self, when: float) -> None:
        if self._timer is None or when < self._timer_at:
            self.close()
            self._timer_at = when
            self._timer = asyncio.get_running_loop().call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for call in [c for c in self.by_id.values() if c.remind_at <= now]:
            if call.id in self.by_id:
                call.remind_at = NEVER
                self._remind(call)
        next_at = min((c.remind_at for c in self.by_id.values()), default=NEVER)
        if next_at < NEVER:
            self._wake_at(max(next_at, now + TIMER_STEP_S))


class Connection:
    """Carries requests to the broker that leads. Belongs to the event loop that makes the first call.

    It takes one address or several with commas between them; the attribute `address` is the one in use. For the
    rest see broker.connect.Access.
    """

    def __init__(
        self,
        address: str,
        deadline_s: float = 30.0,
        retry_s: float = 2.0,
        max_message_bytes: int = 1 << 30,
        credential: Credential | None = None,
    ) -> None:
        self._addresses = tuple(address.split(","))  # one of these brokers leads
        self.address = self._addresses[0]
        self._deadline_s, self._retry_s = deadline_s, retry_s
        self._max_message_bytes, self._credential = max_message_bytes, credential
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: LoopSocket | None = None
        self._identity = b"c" + secrets.token_bytes(12)  # the broker knows repeated requests by it
        self._closed = False
        self._calls = Calls(self._attempt)
        self._since = 0.0  # when the broker was connected to or last heard of, event loop time
        self._asked_at = 0.0  # when the first request after that was made
        self._due_at = NEVER  # when the first answer was due of those that were missed since
        self._moved_at = self._looked_at = 0.0  # when part of a message came or went, and the last look at that
        self._turning: asyncio.TimerHandle | None = None
        self._unwanted: dict[int, wire.AskLease] = {}  # requests that were cancelled, by id
        self._background: set[asyncio.Task[None]] = set()
        self.position: LogPosition | None = None  # the one in the newest answer that had one
        self._told = ("", 0.0)  # the last reason for no answer yet, and its time

    async def close(self) -> None:
        """Close the connection; calls under way raise BrokerUnreachable."""
        self._closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for call in list(self._calls.by_id.values()):
            self._fail(call, self._was_closed())
        self._calls.close()
        if self._turning is not None:
            self._turning.cancel()
        self._disconnect()
        self._context.term()

    async def ask(self, request: wire.Request[R], wait_s: float = 0.0, payload: bytes | None = None) -> R:
        """The answer to a request, which `payload` follows and for which the broker may wait `wait_s`.

        Raises BrokerUnreachable, or BrokerError when the broker refuses the request or the payload is too large, or
        UsageError when it refuses the credential.
        """
        most = self._max_message_bytes
        if payload is not None and len(payload) > most:
            raise BrokerError(f"a group of {len(payload)} bytes exceeds broker.max_message_bytes ({most})")
        frames = [wire.encode(request)] if payload is None else [wire.encode(request), payload]
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        try:
            self.start(request, frames, future, wait_s)
            return await future
        except asyncio.CancelledError:
            if isinstance(request, wire.AskLease):
                self._abandon(request, future)
            raise
        finally:
            self._calls.by_id.pop(request.id, None)

    def start(self, request: wire.Request[R], frames: list[bytes], future: AnyFuture[R], wait_s: float = 0.0) -> None:
        """Send a request from the loop; `future` gets the answer, or an error as `ask` raises them."""
        limit_s = wait_s + self._deadline_s
        now = asyncio.get_running_loop().time()
        if self._asked_at <= self._since:
            self._asked_at = now
        call = Call(request, frames, limit_s, now + limit_s, future)
        self._calls.by_id[request.id] = call
        self._attempt(call)

    def _abandon(self, request: wire.AskLease, future: "asyncio.Future[Any]") -> None:
        if not future.done() or future.cancelled():
            self._unwanted[request.id] = request
            self._in_background(wire.Cancel(target=request.id))
        elif future.exception() is None:
            self._hand_back(request, future.result())

    def _hand_back(self, request: wire.AskLease, leases: list[Lease]) -> None:
        if leases:
            self._in_background(wire.Release(node_id=request.node_id, tokens=[lease.token for lease in leases]))

    def _in_background(self, request: wire.Cancel | wire.Release) -> None:
        async def run() -> None:
            try:
                await self.ask(request)
            except SlipstreamError as error:
                logger.warning("leases of a cancelled request stay until their deadline: %s", error)
            if isinstance(request, wire.Cancel):
                self._unwanted.pop(request.target, None)

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _attempt(self, call: Call) -> None:
        """Send, unless that was done on the connection that stands; come back here when no answer came in time."""
        now = asyncio.get_running_loop().time()
        if call.future.done():
            return
        try:
            socket = self._connected()
            if call.remind_at and self._is_lost(call, socket, now):
                socket = self._connected()
            if call.sent_on == 0 or call.sent_on != socket.handshakes.connection:
                call.sent_on = socket.send(call.frames)
                call.quiet_until = now + call.limit_s - self._deadline_s  # the broker may wait so long again
        except Exception as error:  # no caller may wait for ever, and the timer has other calls to remind
            self._fail(call, error)
            return
        again_at = now + (self._retry_s if call.sent_on else SEND_PAUSE_S)
        self._calls.remind_at(call, min(call.end, again_at) if call.end > now else again_at)

    def _is_lost(self, call: Call, socket: LoopSocket, now: float) -> bool:
        """Whether the broker or the connection seemed to be lost, and was left. Raises when the call gives up."""
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self._moved_at = now if socket.moves() else self._moved_at
        self._due_at = min(self._due_at, call.quiet_until if call.sent_on else NEVER)
        if self._in_vain(now, call.end - self._deadline_s, self._deadline_s):
            raise self._unreachable(call, socket)
        limit_s = SILENT_S if call.sent_on else NOT_CONNECTED_S
        if len(self._addresses) > 1 and self._in_vain(now, max(self._since, self._asked_at), limit_s):
            self._turn()
        elif call.sent_on and self._in_vain(now, self._due_at, SILENT_S):
            logger.warning("the broker at %s does not answer; connecting anew", self.address)
            self._disconnect()
            self._send_again()
        else:
            return False
        return True

    def _in_vain(self, now: float, since: float, limit_s: float) -> bool:
        """Whether nothing has moved for `limit_s`, and no request can still be in a buffer on its way."""
        late_s = now - max(since, self._moved_at) - limit_s
        if late_s < 0:
            return False
        sent = sum(len(frame) for call in self._calls.by_id.values() if call.sent_on for frame in call.frames)
        return late_s >= min(sent, BUFFER_BYTES) / BUFFER_BYTES_PER_S

    def _fail(self, call: Call, error: Exception) -> None:
        self._calls.by_id.pop(call.id, None)
        if not call.future.done():
            call.future.set_exception(error)

    def _unreachable(self, call: Call, socket: LoopSocket) -> SlipstreamError:
        if not call.sent_on and (suspicion := socket.handshakes.suspicion()):
            return UsageError(suspicion)
        why = "is connected but does not answer" if call.sent_on else "cannot be connected to; is it running?"
        return BrokerUnreachable(f"the broker at {','.join(self._addresses)} {why} (waited {call.limit_s:.0f} s)")

    def _was_closed(self) -> BrokerUnreachable:
        return BrokerUnreachable(f"the connection to the broker at {self.address} was closed")

    def _connected(self) -> LoopSocket:
        if self._closed:
            raise self._was_closed()
        if self._socket is None:
            limit = frame_limit(self._max_message_bytes)
            where = self._context, self.address, self._identity, limit, self._credential
            self._socket = LoopSocket(*where, self._on_message, self._send_again)
            self._heard()
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _turn(self, leader: str = "") -> None:
        """Leave this broker for the leader that it named, or else the next one; calls under way are sent again."""
        self._turning = None
        if leader and leader not in self._addresses:
            self._addresses = (*self._addresses, leader)
        if len(self._addresses) > 1 or leader:
            self._disconnect()
            self.address = leader or self._addresses[(self._addresses.index(self.address) + 1) % len(self._addresses)]
        self._send_again()

    def _send_again(self) -> None:
        self._due_at = NEVER
        for call in self._calls.by_id.values():
            call.sent_on = 0
            self._calls.remind_at(call, asyncio.get_running_loop().time())

    def _heard(self) -> None:
        self._since = asyncio.get_running_loop().time()
        self._due_at = NEVER

    def _on_message(self, frames: list[bytes]) -> None:
        header, *payloads = frames
        try:
            reply = wire.decode_reply(header)
        except wire.WireError as error:
            reply = wire.Refused(id=error.request_id, reason=f"the broker's answer cannot be read: {error}")
        self._heard()
        for single in reply.replies if isinstance(reply, wire.Batch) else [reply]:
            if isinstance(single, wire.Waiting):
                self._wait_longer(single)
            elif not isinstance(single, wire.NotLeading):
                self._settle(single, payloads)
            elif self._turning is None:
                self._turning = asyncio.get_running_loop().call_later(TURN_PAUSE_S, self._turn, single.leader)

    def _wait_longer(self, reply: wire.Waiting) -> None:
        if (call := self._calls.by_id.get(reply.id)) is not None:
            (reason, at), self._told = self._told, (reply.reason, self._since)
            if reason != reply.reason or self._since > at + SILENT_S:  # otherwise each call would say so each second
                logger.warning("the broker has this request but cannot answer yet: %s", reply.reason)
            call.end, call.quiet_until = self._since + call.limit_s, max(call.quiet_until, self._since)
            if isinstance(call.request, wire.ObserverRequest):  # refused for now (broker/guard/request_guard.py)
                call.sent_on = 0
                self._calls.remind_at(call, self._since + min(self._retry_s, WAITING_PAUSE_S))

    def _settle(self, reply: wire.Refused | wire.AnyAnswer, payloads: list[bytes]) -> None:
        call = self._calls.by_id.pop(reply.id, None)
        request = call.request if call is not None else self._unwanted.pop(reply.id, None)
        if isinstance(reply, wire.Refused):
            if call is not None:
                self._fail(call, (StoreChanged if reply.store_changed else BrokerError)(reply.reason))
            elif request is None:
                logger.error("the broker refused a message: %s", reply.reason)
            return
        if request is None:
            return
        self.position = reply.position or self.position
        try:
            value = request.read(reply.value, payloads)
        except wire.WireError as error:
            if call is not None:
                self._fail(call, BrokerError(f"the broker's answer cannot be read: {error}"))
            return
        if call is not None and not call.future.done():
            call.future.set_result(value)
        elif isinstance(request, wire.AskLease):  # cancelled; perhaps the cancelled task has not had its turn yet
            self._hand_back(request, value)


class AsyncBrokerClient(Connection, NodeBroker):
    """NodeBroker over ZeroMQ; see Connection."""

    @property
    def lease_piece_s(self) -> float:
        """A client with several addresses takes a broker for lost that answers nothing for SILENT_S."""
        return LEASE_PIECE_S if len(self._addresses) == 1 else SILENT_S / 2
