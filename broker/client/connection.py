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
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import zmq

from broker import wire
from broker.client.calls import LEASE_PIECE_S, LearnerBroker, NodeBroker
from broker.contract import Lease, LogPosition
from broker.sockets import connect_dealer, frame_limit, tcp_bytes
from common.errors import BrokerError, BrokerUnreachable, SlipstreamError, StoreChanged, UsageError
from common.security.credentials import Credential

logger = logging.getLogger(__name__)

SEND_PAUSE_S = 0.02  # before another attempt while there is no connection
WAITING_PAUSE_S = 0.5  # before an observer asks again that the broker has told to wait
NOT_CONNECTED_S = 2.0  # without a connection for this long, the next of several addresses is tried
SILENT_S = 8.0  # likewise without any answer; with one address, the client connects anew
LOOK_S = 0.5  # between two looks at what moves
BUFFER_BYTES = 8 << 20  # a proxy may acknowledge so much
BUFFER_BYTES_PER_S = 1 << 20  # and pass it on this slowly
TURN_PAUSE_S = 0.2
TIMER_STEP_S = 0.01  # reminders this close come together, so that many calls without an answer cost few timers
NEVER = float("inf")
_EVENTS = int(zmq.EVENTS)  # plain numbers: operators of enums are slow
_IN = int(zmq.POLLIN)
VIEW_BYTES = 16 << 10  # smaller frames are copied: their memory may be a small part of a larger buffer
PART_BYTES = 1 << 10  # less than this is no part of a message, but what ZeroMQ adds to messages

R = TypeVar("R")
AnyFuture = asyncio.Future[R] | concurrent.futures.Future[R]


class LoopSocket:
    """Connects on construction. In the loop, `on_message` is called with the frames of each message, `on_connected`
    when another connection stands. `identity` is a routing id that no other client has.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        max_frame_bytes: int,
        credential: Credential | None,
        on_message: Callable[[list[bytes]], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_connected = on_connected
        self._socket, self.handshakes = connect_dealer(context, address, identity, max_frame_bytes, credential)
        self._fileno = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fileno, self.read)
        self._reading = False  # a read is due in this turn of the loop
        self._watched = self.handshakes.fileno()
        self._loop.add_reader(self._watched, self._watch)
        self._number = 0  # the connection whose bytes are counted here
        self._sent = self._delivered = 0  # in whole messages
        self._received = self._acknowledged = self._unsent = 0  # at the last look

    def close(self) -> None:
        self._loop.remove_reader(self._fileno)
        self._loop.remove_reader(self._watched)
        self.handshakes.close()
        self._socket.close(linger=0)

    def send(self, frames: list[bytes]) -> int:
        """Returns the number of the connection; 0 while there is none, or while what was sent before fills its queue.

        Raises UsageError when the broker has refused this client.
        """
        number = self.handshakes.connection
        if not number:  # a message into a connection that just broke would be lost, and nothing would show it later
            if refusal := self._watch():
                raise UsageError(refusal)
            return 0
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return 0
        finally:
            if not self._reading:  # one read for all that is sent in this turn of the loop
                self._reading = True
                self._loop.call_soon(self.read)
        if number != self._number:
            self._number = number
            self._sent = 0
            self._delivered = 0
        size = sum(map(len, frames))
        if size >= PART_BYTES:  # ZeroMQ has added bytes to all messages before, which would hide a part of this one
            self._sent = max(self._sent, tcp_bytes(self.handshakes.connected_fd)[1])
        self._sent += size
        return number

    def moves(self) -> bool:
        """Whether part of a message came or went since the last look, as on a slow link. Only TCP tells."""
        received, acknowledged = tcp_bytes(self.handshakes.connected_fd)
        received -= self._delivered
        came = received - self._received >= PART_BYTES
        went = self._unsent >= PART_BYTES and acknowledged - self._acknowledged >= PART_BYTES
        self._received = received
        self._acknowledged = acknowledged
        self._unsent = self._sent - acknowledged
        return came or went

    def _watch(self) -> str:
        before = self.handshakes.connection
        refusal = self.handshakes.refusal()
        if self.handshakes.connection not in (0, before):
            self._on_connected()
        return refusal

    def read(self) -> None:
        self._reading = False
        while not self._socket.closed and cast(int, self._socket.get(_EVENTS)) & _IN:  # cheaper than zmq.Again
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)  # large ones are views of ZeroMQ's own memory
            self._delivered += sum(map(len, frames))
            self._on_message([f.bytes if len(f) < VIEW_BYTES else cast(bytes, f.buffer) for f in frames])


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
    rest see broker.client.connect.Access.
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
        self._deadline_s = deadline_s
        self._retry_s = retry_s
        self._max_message_bytes = max_message_bytes
        self._credential = credential
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
            self._socket = LoopSocket(
                self._context,
                self.address,
                self._identity,
                max_frame_bytes=limit,
                credential=self._credential,
                on_message=self._on_message,
                on_connected=self._send_again,
            )
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
            (reason, at) = self._told
            self._told = (reply.reason, self._since)
            if reason != reply.reason or self._since > at + SILENT_S:  # otherwise each call would say so each second
                logger.warning("the broker has this request but cannot answer yet: %s", reply.reason)
            call.end = self._since + call.limit_s
            call.quiet_until = max(call.quiet_until, self._since)
            if isinstance(call.request, wire.ObserverRequest):  # refused for now (broker/server/request_guard.py)
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
        with self._closing:
            if self._thread.is_alive():
                asyncio.run_coroutine_threadsafe(self._connection.close(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
