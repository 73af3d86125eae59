"""The embedded broker: a ZeroMQ ROUTER in front of the delivery state, one thread, one loop.

Each turn of the loop reads the new requests and answers or parks them. A lease without an admissible task is parked,
and so is a take without enough groups. Then the turn takes back expired leases and serves the parked requests that can
be served now. It waits only in the poll, at most until the next deadline. No message of a client can stop the loop: the
worst answer is Refused.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import zmq

from broker.delivery.state import DeliveryState
from broker.guard.rejected_messages import Later
from broker.guard.request_guard import Gate
from broker.journal.journal import Journal
from broker.journal.store import PayloadLost
from broker.messaging import wire
from broker.messaging.bind_address import reachable
from broker.messaging.sockets import bind_router, frame_limit
from broker.server.durable_replies import Held, HeldReplies, promises
from broker.server.handlers import Handlers
from broker.server.long_polls import ParkedLease, ParkedTake
from broker.server.reply_batches import Outbox
from common.errors import BrokerError
from common.security.credentials import Identity

logger = logging.getLogger(__name__)

BATCH_MESSAGES = 512  # read in one turn
FLUSH_MESSAGES = 64  # after so many, what was answered so far goes out
TICK_S = 1.0
FLUSH_MS = 1000  # for the last replies at the end
HOLD_FRAME_BYTES = 16 << 10  # smaller payloads are copied out of ZeroMQ's receive buffer, which they would pin


class BrokerServer:
    """Binds on construction; `run` serves until `stop`.

    Args:
        state: the delivery state; only the thread in `run` touches it from then on.
        address: tcp://HOST:PORT (0: a free one) or ipc://PATH; beyond loopback only with credentials.
        max_message_bytes: largest header or payload that is accepted.
        on_tick: called in every turn of the loop, at least about once a second.
        credentials: key folder; clients must then prove a key of it.
        quarantine: folder for the first messages that do not decode.
        journal: the state's journal; None: nothing outlives this process, and no reply waits.

    Clients connect to `address`.

    Raises:
        UsageError: when the address is refused or in use, or the keys cannot be used.
    """

    def __init__(
        self,
        state: DeliveryState,
        address: str,
        max_message_bytes: int,
        on_tick: Callable[[], None] = lambda: None,
        credentials: str | None = None,
        quarantine: Path | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._state = state
        self._max_message_bytes = max_message_bytes
        self._on_tick = on_tick
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate: Gate | None = None
        try:
            gate = self._gate = Gate(self._context, state, credentials, quarantine)
            self._router = bind_router(self._context, address, frame_limit(max_message_bytes), gate.curve)
        except Exception:
            if gate is not None:
                gate.close()
            self._context.term()
            raise
        gate.watch(self._router, max_message_bytes)
        self.address = reachable(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        state.address = self.address
        self._handlers = Handlers(state)
        self._outbox = Outbox(self._router, self._undelivered)
        self._journal = journal
        self._held = HeldReplies(journal) if journal is not None else None
        self._remembered: OrderedDict[tuple[bytes, int], wire.Reply] = OrderedDict()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._stopping = False
        self._next_tick = 0.0

    def stop(self) -> None:
        """End `run` after it has answered what is parked; may be called from any thread or signal handler."""
        self._stopping = True
        try:
            os.write(self._wake_write, b"x")
        except OSError:
            logger.debug("the loop has ended already")

    def run(self) -> None:
        """Serve until `stop`, then answer what waits and close."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self._journal is not None:
            poller.register(self._journal.fileno(), zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(self._timeout_ms())
                self._turn()
            self._read_all()
            self._serve_parked()
            for parked in self._handlers.parked.everything():
                self._answer_empty(parked)
            self._finish_journal()
            self._outbox.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets; `run` does it at its end."""
        self._router.close(linger=FLUSH_MS)
        self._gate.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _turn(self) -> None:
        drained = self._read_all()
        now = time.monotonic()
        ticking = now >= self._next_tick
        if drained or ticking:  # heartbeats that wait in the socket are read before leases are called lost
            self._state.expire()
        self._serve_parked()
        for parked in self._handlers.parked.overdue(now):
            self._answer_empty(parked)
        if ticking:
            self._next_tick = now + TICK_S
            self._gate.tick()
        self._send_released()
        self._outbox.flush()
        self._on_tick()  # last, because it may take a while

    def _send_released(self) -> None:
        """The end of a turn: what was recorded goes to the disk, and replies go out whose records are there."""
        if self._held is not None and self._journal is not None:
            self._journal.noticed()
            for held in [*self._held.end_turn(), *self._held.waiting(time.monotonic())]:
                self._outbox.put(held.client, held.reply, held.payloads)

    def _finish_journal(self) -> None:
        """The last promises: kept and sent, or not sent."""
        if self._held is not None and self._journal is not None:
            self._held.end_turn()
            self._journal.close()
            for held in self._held.released():
                self._outbox.put(held.client, held.reply, held.payloads)

    def _timeout_ms(self) -> int:
        times = (self._next_tick, self._state.next_deadline(), self._handlers.parked.next_deadline())
        wait_s = min(t for t in times if t is not None) - time.monotonic()
        return max(0, int(wait_s * 1000) + 1)

    def _read_all(self) -> bool:
        """Handle up to BATCH_MESSAGES; returns whether nothing is left."""
        for number in range(1, BATCH_MESSAGES + 1):
            if number % FLUSH_MESSAGES == 0:
                self._outbox.flush()
            try:
                client, sender = self._gate.receive(self._router)
            except zmq.Again:
                return True
            self._handle(client, sender, *self._read_frames())
        return False

    def _read_frames(self) -> tuple[bytes, list[bytes | zmq.Frame]]:
        """The rest of the current message; of many payload frames only the number matters."""
        if not self._router.getsockopt(zmq.RCVMORE):
            return b"", []
        header = self._router.recv()
        payloads: list[bytes | zmq.Frame] = []
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv(copy=False)
            if not payloads:
                payloads.append(frame if len(frame) >= HOLD_FRAME_BYTES else frame.bytes)
            elif len(payloads) < 3:
                payloads.append(b"")
        return header, payloads

    def _handle(self, client: bytes, sender: Identity | None, header: bytes, payloads: list[bytes | zmq.Frame]) -> None:
        limit = self._max_message_bytes
        try:
            request = wire.decode_request(header, len(payloads))
            largest = max(len(header), *(len(p) for p in payloads)) if payloads else len(header)
            if largest > limit:
                raise wire.WireError(f"{largest} bytes; broker.max_message_bytes is {limit}", request.id)
            self._gate.check(sender, request)
        except Later as error:
            self._outbox.put(client, wire.Waiting(id=error.request_id, reason=str(error)))
            return
        except wire.WireError as error:
            self._gate.refusals.note(client, error, header, len(payloads))
            self._send(client, wire.Refused(id=error.request_id, reason=str(error)))
            return
        try:
            reply = self._remembered.get((client, request.id)) or self._answer(client, request, payloads)
        except Exception:
            logger.exception("%s failed", type(request).__name__)
            reply = wire.Refused(id=request.id, reason="internal error of the broker; its log has the details")
        if reply is not None:
            self._send(client, reply, promised=promises(request))

    def _answer(self, client: bytes, request: wire.AnyRequest, payloads: list[bytes | zmq.Frame]) -> wire.Reply | None:
        reply, displaced = self._handlers.handle(client, request, payloads[0] if payloads else None)
        for parked in displaced:
            self._answer_empty(parked)
        return reply

    def _serve_parked(self) -> None:
        for client, reply in self._handlers.serve_parked():
            self._send(client, reply, promised=isinstance(reply, wire.Taken))

    def _answer_empty(self, parked: ParkedLease | ParkedTake) -> None:
        request = parked.request
        if isinstance(request, wire.Take):
            self._send(parked.client, wire.Taken(id=request.id, groups=None))
        else:
            self._send(parked.client, wire.Leased(id=request.id, leases=[]))

    def _send(self, client: bytes, reply: wire.Reply, promised: bool = False) -> None:
        """Answer at once; only a promise is delayed until it is durable."""
        try:
            payloads = self._handlers.payloads(reply)
        except PayloadLost:
            assert isinstance(reply, wire.Taken)
            reply, payloads = self._handlers.give_up_lost(reply), []
        except BrokerError as error:
            reply, payloads = wire.Refused(id=reply.id, reason=str(error)), []
        if _must_not_repeat(reply):
            self._remember((client, reply.id), reply)
        if promised and self._held is not None and not isinstance(reply, wire.Refused):
            self._held.hold(Held(client, reply, payloads))
        else:
            self._outbox.put(client, reply, payloads)

    def _undelivered(self, client: bytes, reply: wire.Reply) -> None:
        logger.debug("no answer to a client that is gone: %s", type(reply).__name__)
        self._remembered.pop((client, reply.id), None)
        if isinstance(reply, wire.Leased):
            self._handlers.undo_leases(reply)

    def _remember(self, key: tuple[bytes, int], reply: wire.Reply) -> None:
        self._remembered[key] = reply
        if len(self._remembered) > 4096:
            self._remembered.popitem(last=False)


def _must_not_repeat(reply: wire.Reply) -> bool:
    """Whether a repeated request must get this same reply: leases would be given twice, a count would be 0."""
    return (isinstance(reply, wire.Leased) and bool(reply.leases)) or isinstance(reply, wire.Offered)
