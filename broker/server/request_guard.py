"""Checks between the broker's socket and its handlers: who may send what, and how much memory one connection may cost.

ZeroMQ limits the size of a frame and the number of waiting messages, but not the number of frames of one message. It
collects them in memory. So the broker watches its own memory. When the groups that it stores do not explain the growth,
it closes connections without complete messages, those with the most received bytes first. It also closes connections
that read none of their replies. An innocent client among them reconnects and repeats its request.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import secrets
import socket
import sys
import termios
import time
from typing import Any, cast

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from broker import wire
from broker.delivery.state import DeliveryState
from broker.sockets import tcp_bytes
from common.security.credentials import Identity, belongs_to, load_server
from common.security.curve import CurveGate, KeyRing

logger = logging.getLogger(__name__)

ROLES = ("learner", "observer", "node", "broker")
PERMITTED: dict[str, tuple[type[wire.Request[Any]], ...]] = {
    "learner": (wire.LearnerRequest, wire.ObserverRequest, wire.Gather, wire.Stop),
    "node": (wire.NodeRequest, wire.AskStatus),
    "observer": (wire.ObserverRequest,),
    "broker": (wire.ObserverRequest,),  # another broker process of the run, which asks whether this one is alive
}
LOG_EVERY_S = 3.0  # between two log lines and events about refused messages
UNEXPLAINED_BYTES = 512 << 20  # or twice broker.max_message_bytes
PATIENCE_S = 3.0  # living nodes and learners send messages more often
CUT_AT_ONCE = 16
LEAST_BYTES = 1 << 20  # a connection that received less is not closed
LEAST_UNREAD_BYTES = 64 << 10


class Denied(wire.WireError):
    """A request that its sender may not send."""


class RequestGuard:
    """The checks of one broker. Without credentials every sender may send everything, on a loopback address.

    `context` is that of the broker's socket, `credentials` a key folder. Raises UsageError when the broker's keys or
    the list of allowed ones cannot be read.
    """

    def __init__(self, context: zmq.Context[Any], state: DeliveryState, credentials: str | None) -> None:
        self.curve: CurveGate | None = None
        self._ring: KeyRing | None = None
        self._state = state
        self._floods: FloodGuard | None = None
        self._log_at = state.clock()
        self._silent = 0  # refused messages since the last log line
        if credentials is not None:
            keys = load_server(credentials)
            self._ring = KeyRing(credentials, ROLES)
            self.curve = CurveGate(context, keys, self._ring)

    def watch(self, router: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
        """Begin to cut connections that flood the broker. Call it right after the socket was bound."""
        self._floods = FloodGuard(router, max(UNEXPLAINED_BYTES, 2 * max_message_bytes))

    def receive(self, router: "zmq.Socket[bytes]") -> tuple[bytes, Identity | None]:
        """Read the first frame of the next message: its connection and its sender. Raises zmq.Again."""
        alert = self._floods is not None and self._floods.alert
        if self._ring is None and not alert:
            return router.recv(zmq.NOBLOCK), None
        frame = router.recv(zmq.NOBLOCK, copy=False)
        if alert and self._floods is not None:
            self._floods.heard(frame)
        return frame.bytes, self._ring.sender(frame) if self._ring is not None else None

    def check(self, sender: Identity | None, request: wire.AnyRequest) -> None:
        """Raise Denied when `sender` may not send this request."""
        if self.curve is not None and (reason := refusal(sender, request)):
            raise Denied(reason, request.id)

    def note_refused(self, client: bytes, error: wire.WireError) -> None:
        """Count a message that was refused because of `error`; log it unless another one was logged just now."""
        counts = self._state.rejected
        counts.refused += 1
        counts.denied += isinstance(error, Denied)
        if (now := self._state.clock()) < self._log_at:
            self._silent += 1
            return
        self._log_at = now + LOG_EVERY_S
        if self._silent:
            logger.warning("%d more refused messages were not logged one by one", self._silent)
            self._silent = 0
        who = anonymous(client)
        reason = str(error)[:500]
        logger.warning("refused message %d from %s: %s", counts.refused, who, reason)
        self._state.event_log.add("refused_message", client=who, reason=reason, count=counts.refused)

    def tick(self) -> None:
        """Run about once a second: read added and revoked keys, and check the broker's memory."""
        if self._floods is not None:
            self._floods.tick(self._state.tasks.bytes_held)
        if self._ring is not None:
            self._ring.refresh()

    def close(self) -> None:
        """Call it after the socket was closed and before the context is."""
        if self._floods is not None:
            self._floods.close()
        if self.curve is not None:
            self.curve.close()


def refusal(sender: Identity | None, request: wire.AnyRequest) -> str:
    """The reason for which `sender` may not send this request; '' when it may.

    A node id begins with the name of its credential, so no node can take, read or end the leases of another one.
    """
    if sender is None:
        return "this key was revoked"
    if not isinstance(request, PERMITTED[sender.role]):
        return f"credential {sender.name!r} has the role {sender.role}, which may not send {type(request).__name__}"
    node_id = request.node if isinstance(request, wire.NodeRequest) else None
    if node_id is None or belongs_to(node_id, sender.name):
        return ""
    return f"credential {sender.name!r} may use the node ids {sender.name} and {sender.name}:ANYTHING, not {node_id!r}"


def anonymous(client: bytes) -> str:
    """A name for a connection in logs and events. Its real id is secret, because it identifies the connection."""
    return hashlib.blake2b(client, digest_size=6).hexdigest()


class FloodGuard:
    """Watches the connections of one bound socket, in the socket's thread; growth by `allowed_bytes` is no flood."""

    def __init__(self, router: zmq.Socket[bytes], allowed_bytes: int) -> None:
        self.connections: set[int] = set()  # file descriptors, as of the last tick
        self._limit = own_memory() + allowed_bytes
        self._since: float | None = None  # begin of an alert, monotonic seconds
        self._heard: set[int] = set()  # connections that completed a message during the alert
        self._acked: dict[int, int] = {}  # bytes that each had acknowledged at the last check
        monitor = f"inproc://connections-{secrets.token_hex(8)}"
        router.monitor(monitor, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=cast(Any, router).context.underlying)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop ZeroMQ's own thread
        self._events.connect(monitor)

    @property
    def alert(self) -> bool:
        """Whether `heard` must be called for every message."""
        return self._since is not None

    def heard(self, frame: zmq.Frame) -> None:
        """Note that a complete message arrived on the connection of `frame`."""
        with contextlib.suppress(zmq.ZMQError, KeyError, ValueError):
            self._heard.add(int(str(frame.get("__fd"))))

    def tick(self, explained_bytes: int) -> None:
        """Check the memory, about once a second; `explained_bytes` is the size of all stored groups."""
        while self._events.poll(0):
            message = cast("dict[str, Any]", recv_monitor_message(self._events, zmq.NOBLOCK))
            note = self.connections.add if message["event"] == zmq.EVENT_ACCEPTED else self.connections.discard
            note(int(message["value"]))
        if own_memory() - explained_bytes > self._limit:
            with contextlib.suppress(OSError, AttributeError):  # not every C library can
                ctypes.CDLL(None).malloc_trim(0)  # freed memory of an earlier flood still counts as resident
        if own_memory() - explained_bytes <= self._limit:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
            self._heard.clear()
            self._acked.clear()
        elif time.monotonic() - self._since >= PATIENCE_S:
            self._cut()

    def close(self) -> None:
        """Call it after the socket was closed."""
        self._events.close(linger=0)

    def _cut(self) -> None:
        counts = {fd: tcp_bytes(fd) for fd in self.connections}
        silent = ((received, fd) for fd, (received, _) in counts.items() if fd not in self._heard)
        for received, fd in sorted(silent, reverse=True)[:CUT_AT_ONCE]:
            if received >= LEAST_BYTES:
                _cut_off(fd, f"sent {received} bytes and completed no message")
        for fd, (_, acked) in counts.items():
            if acked == self._acked.get(fd) and unread_bytes(fd) >= LEAST_UNREAD_BYTES:
                _cut_off(fd, "does not read its replies")
        self._acked = {fd: acked for fd, (_, acked) in counts.items()}


def unread_bytes(fd: int) -> int:
    """Bytes in the kernel's send buffer that the other side has not read."""
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def _cut_off(fd: int, why: str) -> None:
    logger.warning("memory is short: cut a connection that %s", why)
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def own_memory() -> int:
    """Resident bytes of this process that belong to no file."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
