"""The synchronous client: the learner's side of the contract, and the observers'."""

import itertools
import logging
import secrets
import threading
import time
from types import TracebackType
from typing import Any, TypeVar, cast

import zmq

from broker.contract import Attached, BrokerEvent, BrokerStatus, LearnerReport, LedgerEntry, StoredGroup
from broker.messaging import wire
from broker.messaging.addresses import NOT_CONNECTED_S, SILENT_S, TURN_PAUSE_S, Addresses
from broker.messaging.sockets import connect_dealer, frame_limit
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.rollouts import Task
from common.security.credentials import Credential
from common.security.curve import Handshakes

logger = logging.getLogger(__name__)

WAITING_PAUSE_S = 0.5  # before a request is repeated whose answer the broker cannot give yet
LONG_POLL_S = 1.0  # a longer wait is asked for in pieces, each a sign of life
VIEW_BYTES = 16 << 10  # smaller frames are copied: their memory may be a small part of a larger buffer
OFFER_TASKS = 512  # tasks in one message
CONNECT_POLL_S = 0.2  # between looks at how connecting goes

R = TypeVar("R", bound=wire.SingleReply)


class BrokerClient:
    """LearnerBroker and ObserverBroker over ZeroMQ; any thread may call, each has a connection of its own.

    Requests are repeated until they are answered, through reconnects and restarts of the broker.

    Args:
        address: tcp://HOST:PORT or ipc://PATH; several with commas between them.
        deadline_s: without an answer for this long (beyond what the request itself waits), give up.
        retry_s: pause before a request is repeated.
        max_message_bytes: broker.max_message_bytes.
        credential: proves who this client is, to a broker that asks for it.

    Every method raises BrokerUnreachable at the deadline, BrokerError when the broker refuses, and UsageError when it
    refuses the credential.
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
        self._deadline_s, self._retry_s = deadline_s, retry_s
        self._frame_limit = frame_limit(max_message_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = threading.local()
        self._channels: list[_Channel] = []
        self._lock = threading.Lock()
        self._sender: dict[str, Any] = {}  # incarnation and instance, once attached

    @property
    def address(self) -> str:
        """The broker that this client uses now."""
        return self._addresses.current

    def __enter__(self) -> "BrokerClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every thread's connection; no call may be under way."""
        with self._lock:
            for channel in self._channels:
                channel.close()
            self._channels.clear()
        self._context.term()

    # ---------------------------------------------------------------- learner

    def attach(self, report: LearnerReport) -> Attached:
        """See LearnerBroker."""
        reply = self._ask(wire.Attached, wire.Attach, report=report)
        self._sender = {"incarnation": report.incarnation, "instance": report.instance}
        return Attached(reply.next_serial, reply.store_id, reply.committed_step)

    def offer(self, tasks: list[Task]) -> int:
        """See LearnerBroker. Long lists go in several messages."""
        new = 0
        for start in range(0, len(tasks), OFFER_TASKS):
            part = tasks[start : start + OFFER_TASKS]
            new += self._ask(wire.Offered, wire.Offer, **self._sender, tasks=part).new
        return new

    def take(self, step: int, count: int, wait_s: float, in_order: bool = False) -> list[StoredGroup] | None:
        """See LearnerBroker."""
        end = time.monotonic() + wait_s
        while True:
            piece_s = min(max(0.0, end - time.monotonic()), LONG_POLL_S)
            reply, payloads = self._exchange(
                wire.Taken,
                wire.Take,
                piece_s,
                **self._sender,
                step=step,
                count=count,
                wait_s=piece_s,
                in_order=in_order,
            )
            if reply.groups is not None:
                return [
                    StoredGroup(g.serial, g.node_id, g.meta, payload)
                    for g, payload in zip(reply.groups, payloads, strict=True)
                ]
            if time.monotonic() >= end:
                return None

    def regenerate(self, step: int, serials: list[int]) -> None:
        """See LearnerBroker."""
        self._ask(wire.Done, wire.Regenerate, **self._sender, step=step, serials=serials)

    def filter(self, step: int, serials: list[int], most_replaced: int) -> None:
        """See LearnerBroker."""
        fields = {"step": step, "serials": serials, "most_replaced": most_replaced}
        self._ask(wire.Done, wire.Filter, **self._sender, **fields)

    def commit(self, step: int) -> None:
        """See LearnerBroker."""
        self._ask(wire.Done, wire.Commit, **self._sender, step=step)

    def report(self, report: LearnerReport) -> None:
        """See LearnerBroker."""
        self._ask(wire.Done, wire.Report, **self._sender, report=report)

    # ---------------------------------------------------------------- observers

    def status(self) -> BrokerStatus:
        """See ObserverBroker."""
        return self._ask(wire.StatusReply, wire.AskStatus).status

    def ledger(self) -> list[LedgerEntry]:
        """See ObserverBroker."""
        return self._ask(wire.LedgerReply, wire.AskLedger).entries

    def events(self, after: int) -> list[BrokerEvent]:
        """See ObserverBroker."""
        return self._ask(wire.EventsReply, wire.AskEvents, after=after).events

    # ---------------------------------------------------------------- inside

    def _ask(self, expected: type[R], kind: type[wire.Request], **fields: Any) -> R:
        return self._exchange(expected, kind, 0.0, **fields)[0]

    def _exchange(
        self, expected: type[R], kind: type[wire.Request], patience_s: float, **fields: Any
    ) -> tuple[R, list[bytes]]:
        channel = self._channel()
        request = kind(id=next(channel.ids), **fields)
        reply, payloads = channel.exchange(request, patience_s + self._deadline_s, self._retry_s)
        return checked(reply, expected), payloads

    def _channel(self) -> "_Channel":
        channel: _Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = _Channel(
                self._context, self._addresses, self._frame_limit, self._credential
            )
            with self._lock:
                self._channels.append(channel)
        return channel


class _Channel:
    """One connection with one request at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Addresses,
        max_frame_bytes: int,
        credential: Credential | None,
    ) -> None:
        self.ids = itertools.count()
        self._context, self._addresses = context, addresses
        self._frame_limit, self._credential = max_frame_bytes, credential
        self._connect(addresses.current)

    def _connect(self, address: str) -> None:
        self.address = address
        self.socket, self._handshakes = connect_dealer(
            self._context, address, new_identity(), self._frame_limit, self._credential
        )
        self._since = time.monotonic()

    def close(self) -> None:
        self._handshakes.close()
        self.socket.close(linger=0)

    def exchange(self, request: wire.Request, limit_s: float, retry_s: float) -> tuple[wire.SingleReply, list[bytes]]:
        """Send `request`, again every `retry_s`, until its reply comes; BrokerUnreachable after `limit_s`.

        UsageError as soon as the broker has refused the credential, or at the end when it seems so.
        """
        header = wire.encode(request)
        end = time.monotonic() + limit_s
        connected, self._since = False, time.monotonic()
        while (now := time.monotonic()) < end:
            self._turn_away(SILENT_S if connected else NOT_CONNECTED_S)
            try:
                self.socket.send(header, zmq.NOBLOCK)
            except zmq.Again:
                connected = False
                raise_refusal(self._handshakes)
                self.socket.poll(int(min(CONNECT_POLL_S, end - now) * 1000) + 1, zmq.POLLOUT)
                continue
            connected = True
            self._handshakes.proven()
            answer = self._answer(request.id, min(end, now + retry_s))
            if answer is None:
                continue
            if isinstance(answer[0], wire.NotLeading):
                time.sleep(TURN_PAUSE_S)
                self._turn_away(0, answer[0].leader)
            elif isinstance(answer[0], wire.Waiting):
                logger.warning("the broker has this request but cannot answer yet: %s", answer[0].reason)
                self._since = time.monotonic()
                end = self._since + limit_s
                time.sleep(min(retry_s, WAITING_PAUSE_S))
            else:
                return answer
        suspicion = "" if connected else self._handshakes.suspicion()
        if suspicion:
            raise UsageError(suspicion)
        raise unreachable(",".join(self._addresses.all), limit_s, connected)

    def _turn_away(self, after_s: float, leader: str = "") -> None:
        """Connect to another broker when this one has been of no use for `after_s`, or another thread has turned."""
        if not self._addresses.several and not leader:
            return
        if time.monotonic() - self._since >= after_s:
            self._addresses.turn(self.address, leader)
        if self._addresses.current != self.address:
            self.close()
            self._connect(self._addresses.current)

    def _answer(self, request_id: int, until: float) -> tuple[wire.SingleReply, list[bytes]] | None:
        while (left_s := until - time.monotonic()) > 0:
            if not self.socket.poll(int(left_s * 1000) + 1):
                return None
            header, *payloads = received(self.socket)
            for reply in wire.singles(decoded(header, len(payloads))):
                if reply.id in (request_id, -1):
                    return reply, payloads
        return None


def received(socket: "zmq.Socket[bytes]", flags: int = 0) -> list[bytes]:
    """The frames of the next message; large ones are views of ZeroMQ's own memory, which is theirs alone."""
    frames: list[bytes] = []
    more = True
    while more:
        frame = socket.recv(flags, copy=False)
        more = frame.more
        frames.append(frame.bytes if len(frame) < VIEW_BYTES else cast(bytes, frame.buffer))
    return frames


def raise_refusal(handshakes: Handshakes) -> None:
    """Raise UsageError when the broker will not have this client."""
    refusal = handshakes.refusal()
    if refusal:
        raise UsageError(refusal)


def new_identity() -> bytes:
    """A routing id that no other client has."""
    return b"c" + secrets.token_bytes(12)


def decoded(header: bytes, payloads: int) -> wire.AnyReply:
    """The reply; raises BrokerError when it cannot be read."""
    try:
        return wire.decode_reply(header, payloads)
    except wire.WireError as error:
        raise BrokerError(f"the broker's answer cannot be read: {error}") from error


def checked(reply: wire.SingleReply, expected: type[R]) -> R:
    """The reply as `expected`; raises BrokerError when it is a refusal or something else."""
    if isinstance(reply, wire.Refused):
        raise BrokerError(reply.reason)
    if not isinstance(reply, expected):
        raise BrokerError(f"the broker answered {type(reply).__name__} instead of {expected.__name__}")
    return reply


def unreachable(address: str, waited_s: float, connected: bool) -> BrokerUnreachable:
    """The error after a deadline."""
    why = "is connected but does not answer" if connected else "cannot be connected to; is it running?"
    return BrokerUnreachable(f"the broker at {address} {why} (waited {waited_s:.0f} s)")
