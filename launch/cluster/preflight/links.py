"""Latency, clocks and bandwidth between two machines, over TCP on one interface. Every wait ends after STALL_S."""

import select
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from secrets import token_hex

from msgspec import Struct

STALL_S = 2.0
PINGS, PING, BLOCK = 100, bytes(64), bytes(1 << 20)
HEAD, FIGURE = struct.Struct("<32sd"), struct.Struct("<d")


class Link(Struct, frozen=True):
    """The way from one machine to another, as the source has measured it."""

    source: str
    target: str
    latency_s: float = 0.0  # median round trip of a small packet; 0: they did not all come back
    bytes_per_s: float = 0.0
    ahead_s: float = 0.0  # the target's clock against the source's, from the fastest round trip
    error: str = ""


class Target:
    """Answers the tests of those who know its token, on a free port of `address`, until the process ends."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port, self.token = int(self._listener.getsockname()[1]), token_hex(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader, suppress(OSError, struct.error):  # the source reports it
            connection.settimeout(STALL_S)
            token, seconds = HEAD.unpack(reader.read(HEAD.size))
            if token == self.token.encode():
                for _ in range(PINGS):
                    reader.read(len(PING))
                    connection.sendall(FIGURE.pack(time.time()))
                _receive(connection, seconds / 4)  # TCP finds its rate
                connection.sendall(FIGURE.pack(_receive(connection, seconds)))
                _receive(connection, STALL_S)  # a close now would take the figure back


def _receive(connection: socket.socket, seconds: float) -> float:
    """Bytes per second that arrive."""
    begun, count, buffer = time.perf_counter(), 0, bytearray(len(BLOCK))
    while (taken := time.perf_counter() - begun) < seconds and (size := connection.recv_into(buffer)):
        count += size
    return count / taken


def measure(source: str, own: str, target: str, at: tuple[str, int], token: str, seconds: float) -> Link:
    """The link with its figures, or with the error that ended the test; bulk data flows for `seconds`."""
    trips: list[tuple[float, float]] = []
    latency_s, rate, error = 0.0, 0.0, ""
    try:
        with socket.create_connection(at, STALL_S, (own, 0)) as connection, connection.makefile("rb") as reader:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # drop the surplus
            connection.sendall(HEAD.pack(token.encode(), seconds))
            for _ in range(PINGS):
                sent = time.time()
                connection.sendall(PING)
                there = FIGURE.unpack(reader.read(FIGURE.size))[0]
                trips.append((time.time() - sent, there - (time.time() + sent) / 2))
            latency_s = statistics.median(taken for taken, _ in trips)
            while not select.select([connection], [], [], 0)[0]:
                connection.send(BLOCK)
            rate = FIGURE.unpack(reader.read(FIGURE.size))[0]
    except (OSError, struct.error) as problem:
        error = str(problem) if isinstance(problem, OSError) else "the other side closed the connection"
    return Link(source, target, latency_s, rate, min(trips)[1] if trips else 0.0, error)
