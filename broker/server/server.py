"""The embedded broker: a ZeroMQ ROUTER in front of the delivery state, one thread, one loop.

Each turn of the loop answers the new requests, or parks those that must wait for a task or for groups. Then it takes
back expired leases and serves the parked requests that can be served now. It waits only in the poll. No message of a
client can stop the loop: the worst answer is Refused.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import zmq

from broker import wire
from broker.delivery.state import DeliveryState
from broker.journal.group_memory import GroupMemory
from broker.journal.journal import Journal
from broker.server.handlers import AnyParked, Handlers, nothing
from broker.server.replies import Delayed, DelayedReplies, Outbox, Payload
from broker.server.request_guard import RateLimited, RequestGuard
from broker.sockets import bind_router, frame_limit, reachable
from common.errors import BrokerError
from common.process.wake import Wake
from common.security.credentials import Identity

logger = logging.getLogger(__name__)

BATCH_MESSAGES = 512  # read in one turn
ANSWER_EVERY_S = 0.01  # while reading, answers go out at least this often
MOST_REMEMBERED = 4096  # replies
TICK_S = 1.0
LINGER_MS = 1000  # the socket sends its last replies for so long
STOPPED_S = 2.0  # after a stop, serve this long, so that `slipstream stop` sees the last role leave
HOLD_FRAME_BYTES = 16 << 10  # smaller payloads are copied out of ZeroMQ's receive buffer, which they would pin


class BrokerServer:
    """Binds on construction; `run` serves until `stop`.

    Raises UsageError when all addresses are refused or in use, or the keys cannot be used.
    """

    def __init__(
        self,
        state: DeliveryState,  # only the thread in `run` touches it from then on
        addresses: Sequence[str],  # the first one that can be had is bound; beyond loopback only with credentials
        max_message_bytes: int,  # largest header or payload that is accepted
        on_tick: Callable[[], None] = lambda: None,  # called in every turn of the loop, at least about once a second
        credentials: str | None = None,  # A key folder; clients must then prove a key of it.
        quarantine: Path | None = None,  # A folder for the first messages that do not decode.
        journal: Journal | None = None,  # None: nothing outlives this process, and no reply waits.
        bind_wait_s: float = 0.0,  # Seconds to keep trying an address in use.
    ) -> None:
        self._state = state
        self._max_message_bytes = max_message_bytes
        self._on_tick = on_tick
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.term)
            self._guard = RequestGuard(self._context, state, credentials, quarantine)
            undo.callback(self._guard.close)
            limit = frame_limit(max_message_bytes)
            self._router = bind_router(self._context, addresses, limit, self._guard.curve, wait_s=bind_wait_s)
            undo.pop_all()
        self._guard.watch(self._router, max_message_bytes)
        self.address = reachable(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        state.address = self.address
        self._wake = Wake()
        self._memory: GroupMemory | None = None
        if journal is not None and state.run.memory_bytes:
            self._memory = GroupMemory(state, journal, self._wake.send)
        self._handlers = Handlers(state, self._memory)
        self._outbox = Outbox(self._router, self._undelivered)
        self._journal = journal
        self._delayed = DelayedReplies(journal) if journal is not None else None
        self._remembered: OrderedDict[tuple[bytes, int], wire.Reply] = OrderedDict()
        self._stopping = False
        self._next_tick = 0.0

    def stop(self) -> None:
        """May be called from any thread or signal handler."""
        self._stopping = True
        self._wake.send()

    def run(self) -> None:
        """Serve until `stop`, then answer what waits and close."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if self._journal is not None:
            poller.register(self._journal.wake.fileno(), zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(self._timeout_ms())
                self._turn()
            poller.unregister(self._wake.fileno())
            end = time.monotonic() + STOPPED_S * self._state.stopping
            while time.monotonic() < end:
                poller.poll(self._timeout_ms())
                self._turn()
            self._read_all()
            self._serve_parked()
            parked = self._handlers.parked
            self._give_up([*parked.leases.values(), *parked.takes.values()])
            for delayed in self._delayed.close() if self._delayed is not None else ():
                self._outbox.put(*delayed)
            self._outbox.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets; `run` does it at its end."""
        if self._memory is not None:
            self._memory.close()
        self._router.close(linger=LINGER_MS)
        self._guard.close()
        self._context.term()

    def _turn(self) -> None:
        self._wake.drain()
        drained = self._read_all()
        now = time.monotonic()
        ticking = now >= self._next_tick
        if drained or ticking:  # heartbeats that wait in the socket are read before leases are called lost
            self._handlers.answers.nodes.expire()
        self._serve_parked()
        self._give_up(self._handlers.parked.overdue(now))
        if self._memory is not None:
            self._memory.tend(now)
        if ticking:
            self._next_tick = now + TICK_S
            self._guard.tick()
            if self._state.stopping and not self._state.status().present:
                self.stop()
        self._flush()
        self._on_tick()  # last, because it may take a while

    def _flush(self) -> None:
        for delayed in self._delayed.end_turn(time.monotonic()) if self._delayed is not None else ():
            self._outbox.put(*delayed)
        self._outbox.flush()

    def _timeout_ms(self) -> int:
        times = (self._next_tick, self._state.next_deadline(), self._handlers.parked.deadlines.next())
        wait_s = min(t for t in times if t is not None) - time.monotonic()
        return max(0, int(wait_s * 1000) + 1)

    def _read_all(self) -> bool:
        """Handle up to BATCH_MESSAGES; returns whether nothing is left."""
        flush_at = time.monotonic() + ANSWER_EVERY_S
        for _ in range(BATCH_MESSAGES):
            if (now := time.monotonic()) >= flush_at:
                self._flush()
                flush_at = now + ANSWER_EVERY_S
            try:
                client, sender = self._guard.receive(self._router)
            except zmq.Again:
                return True
            self._handle(client, sender, *self._read_frames())
        return False

    def _read_frames(self) -> tuple[bytes, list[Payload]]:
        """The rest of the message. A request has one payload; further frames are only counted, to be refused."""
        header = self._router.recv()  # a ROUTER puts the client's frame before each message, which has one or more
        payloads: list[Payload] = []
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv(copy=False)
            if not payloads:
                payloads.append(frame if len(frame) >= HOLD_FRAME_BYTES else frame.bytes)
            elif len(payloads) < 3:
                payloads.append(b"")
        return header, payloads

    def _handle(self, client: bytes, sender: Identity | None, header: bytes, payloads: list[Payload]) -> None:
        limit = self._max_message_bytes
        try:
            request = wire.decode_request(header, len(payloads))
            largest = max(map(len, [header, *payloads]))
            if largest > limit:
                raise wire.WireError(f"{largest} bytes; broker.max_message_bytes is {limit}", request.id)
            self._guard.check(sender, request)
        except RateLimited as error:
            self._outbox.put(client, wire.Waiting(id=error.request_id, reason=str(error)))
            return
        except wire.WireError as error:
            self._guard.rejections.note(client, error, header, len(payloads))
            self._outbox.put(client, wire.Refused(id=error.request_id, reason=str(error)))
            return
        try:
            reply = self._remembered.get((client, request.id))
            if reply is None:
                reply, displaced = self._handlers.handle(client, request, payloads[0] if payloads else None)
                self._give_up(displaced)
        except Exception:
            logger.exception("%s failed", type(request).__name__)
            reply = wire.Refused(id=request.id, reason="internal error of the broker; its log has the details")
        if reply is not None:
            self._send(client, request, reply)

    def _serve_parked(self) -> None:
        for parked, reply in self._handlers.serve_parked():
            self._send(parked.client, parked.request, reply)

    def _give_up(self, waiting: list[AnyParked]) -> None:
        for parked in waiting:
            self._outbox.put(parked.client, nothing(parked.request))

    def _send(self, client: bytes, request: wire.AnyRequest, reply: wire.Reply) -> None:
        """Answer at once; only a promise is delayed until it is durable."""
        payloads: list[Payload] | None = []
        try:
            payloads = self._handlers.payloads(reply)
        except BrokerError as error:
            reply = wire.Refused(id=reply.id, reason=str(error))
        if payloads is None:
            reply = wire.Answer(id=reply.id, value=None)
        if request.once and wire.value_of(reply):
            self._remembered[client, reply.id] = reply
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        if request.promised and self._delayed is not None and not isinstance(reply, wire.Refused):
            self._delayed.add(Delayed(client, reply, payloads or []))
        else:
            self._outbox.put(client, reply, payloads)

    def _undelivered(self, client: bytes, reply: wire.Reply) -> None:
        logger.debug("no answer to a client that is gone: %s", type(reply).__name__)
        self._remembered.pop((client, reply.id), None)
        self._handlers.undo(reply)
