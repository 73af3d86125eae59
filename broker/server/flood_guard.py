"""Bounds on what one connection may cost: bytes without a complete message, unread replies, and replies a second.

ZeroMQ limits the size of a frame and the number of waiting messages, but not the number of frames of one message. It
collects them in memory. So the broker watches its own memory. When the groups that it stores do not explain the growth,
it closes connections without complete messages, those with the most received bytes first. It also closes connections
that read none of their replies. An innocent client among them reconnects and repeats its request.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import socket
import sys
import termios
import time
from collections.abc import Callable
from typing import Any, cast

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from broker.sockets import tcp_bytes

logger = logging.getLogger(__name__)

UNEXPLAINED_BYTES = 512 << 20  # or twice broker.max_message_bytes
PATIENCE_S = 3.0  # living nodes and learners send messages more often
CUT_AT_ONCE = 16
LEAST_BYTES = 1 << 20  # a connection that received less is not closed
LEAST_UNREAD_BYTES = 64 << 10


class TokenBucket:
    """A budget that grows by `rate` a second up to `burst`."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._left = burst
        self._at = clock()

    def spend(self, cost: float) -> bool:
        """Take `cost` from the budget; returns False, and takes nothing, when it is too small."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if cost > self._left and self._left < self._burst:
            return False
        self._left -= cost  # negative after a cost larger than the whole budget
        return True


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
        """Check the memory, about once a second; `explained_bytes` is the size of the groups in memory."""
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
