"""Bounds on what one connection may cost: bytes without a complete message, unread replies, and replies a second.

ZeroMQ limits the size of a frame and the number of waiting messages, but not the number of frames of one message. It
collects them in memory. So the broker watches its own memory. When what it stores does not explain the growth, it
closes these connections:

    connections whose unfinished message is longer than any that the broker accepts
    connections on which hardly anything moves; a client that waits for an answer connects anew sooner by itself
    connections that read none of their replies
    half of the other unfinished messages when the growth exceeds the memory that is left: first those that
    hardly move, then the shortest

So a slow upload comes through, however many there are. A client that is cut off reconnects and repeats its request.
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
from dataclasses import dataclass
from typing import Any, cast

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from broker.sockets import tcp_bytes
from common.process.memory import free_memory

logger = logging.getLogger(__name__)

UNEXPLAINED_BYTES = 512 << 20  # or twice broker.max_message_bytes
PATIENCE_S = 3.0  # living nodes and learners send messages more often
QUIET_TICKS = 20  # a client that waits for an answer connects anew after 8 s in which nothing moves
FEW_TICKS = 3  # about PATIENCE_S
MOVES_BYTES = 64 << 10  # a connection that gets fewer in QUIET_TICKS stands still, also if a byte comes now and then
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


@dataclass(slots=True)
class Progress:
    """The bytes of one connection, as of the last check of an alert."""

    received: int
    begin: int  # bytes received before its unfinished message, as far as known
    acked: int
    moved: int  # bytes received when it last moved
    quiet: int = 0  # checks since then
    too_long: int = 0  # checks in a row at which its message was too long
    finished: bool = False  # whether it completed a message in this alert


class FloodGuard:
    """Watches the connections of one bound socket, in the socket's thread; growth by `allowed_bytes` is no flood.

    A header or payload has at most `max_message_bytes`.
    """

    def __init__(self, router: zmq.Socket[bytes], allowed_bytes: int, max_message_bytes: int) -> None:
        self.connections: set[int] = set()  # file descriptors, as of the last tick
        self._start = own_memory()
        self._allowed = allowed_bytes
        self._longest = 2 * max_message_bytes + LEAST_BYTES  # with what ZeroMQ adds
        self._since: float | None = None  # begin of an alert, monotonic seconds
        self._progress: dict[int, Progress] = {}  # by connection, during an alert
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
        with contextlib.suppress(zmq.ZMQError, ValueError):
            fd = int(str(frame.get("__fd")))
            received, acked = tcp_bytes(fd)
            seen = self._progress.setdefault(fd, Progress(received, received, acked, received))
            seen.begin = seen.moved = received
            seen.quiet = seen.too_long = 0
            seen.finished = True

    def tick(self, explained_bytes: int) -> None:
        """Check the memory, about once a second; `explained_bytes` is the size of what the broker stores in memory."""
        while self._events.poll(0):
            message = cast("dict[str, Any]", recv_monitor_message(self._events, zmq.NOBLOCK))
            fd = int(message["value"])
            if message["event"] == zmq.EVENT_ACCEPTED:
                self.connections.add(fd)
            else:
                self.connections.discard(fd)
                self._progress.pop(fd, None)
        if self._growth(explained_bytes) > self._allowed:
            with contextlib.suppress(OSError, AttributeError):  # not every C library can
                ctypes.CDLL(None).malloc_trim(0)  # freed memory of an earlier flood still counts as resident
        growth = self._growth(explained_bytes)
        if growth <= self._allowed:
            self._since = None
            self._progress.clear()
            return
        known = self._since is not None
        unread = self._look(known)
        if self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= PATIENCE_S:
            self._cut(unread, growth > free_memory())

    def close(self) -> None:
        """Call it after the socket was closed."""
        self._events.close(linger=0)

    def _growth(self, explained_bytes: int) -> int:
        return own_memory() - explained_bytes - self._start

    def _look(self, known: bool) -> list[int]:
        """Compare all connections with the last check; returns those that read none of their replies since.

        `known`: connections that are new here came after the last check, so their first message is not finished.
        """
        unread: list[int] = []
        for fd in self.connections:
            received, acked = tcp_bytes(fd)
            seen = self._progress.get(fd)
            if seen is None:
                self._progress[fd] = Progress(received, 0 if known else received, acked, received)
                continue
            if acked == seen.acked and unread_bytes(fd) >= LEAST_UNREAD_BYTES:
                unread.append(fd)
            if received - seen.moved >= MOVES_BYTES:
                seen.moved, seen.quiet = received, 0
            else:
                seen.quiet += 1
            seen.too_long = seen.too_long + 1 if received - seen.begin > self._longest else 0
            seen.received, seen.acked = received, acked
        return unread

    def _cut(self, unread: list[int], short: bool) -> None:
        """Cut off `unread` and the harmful connections; `short`: the machine has little memory left."""
        unfinished: list[tuple[bool, int, int]] = []
        for fd, seen in self._progress.items():
            size = seen.received - seen.begin
            if seen.too_long >= 2:  # it may have been complete at the first check, and not read yet
                _cut_off(fd, f"sent {size} bytes and completed no message")
            elif seen.quiet >= QUIET_TICKS and seen.received >= LEAST_BYTES:
                _cut_off(fd, f"sent {seen.received} bytes, and then next to nothing and no message's end")
            else:
                # How much came of a message that began before the alert is not known.
                halted = seen.quiet >= FEW_TICKS and not seen.finished and seen.received >= LEAST_BYTES
                if halted or size >= LEAST_BYTES:
                    unfinished.append((not halted, size, fd))
        for _, size, fd in sorted(unfinished)[: min(CUT_AT_ONCE, len(unfinished) // 2)] if short else ():
            _cut_off(fd, f"sent {size} bytes of a message, and hardly moves or has less than others")
        for fd in unread:
            _cut_off(fd, "does not read its replies")


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
