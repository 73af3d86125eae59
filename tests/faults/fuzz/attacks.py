"""The messages of the fuzz test: mutations of valid messages, and bytes that are no messages. Deterministic by seed."""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from broker import wire
from common.weights.wire import messages
from tests.rigs.waiting import LIMIT_S
from tests.unit.broker.test_authorization import REQUESTS

Frames = list[bytes]

REQUEST_FRAMES: list[Frames] = [[wire.encode(r), *[b"payload" * 50] * r.payloads] for r, _ in REQUESTS]
CONTROL_FRAMES: list[Frames] = [
    [messages.encode(message)]
    for message in (
        messages.Join("fuzzed-node", 1),
        messages.Staged("fuzzed-node", 0, 0, 0.1),
        messages.Active("fuzzed-node", 0, 0, 0.1, "sum"),
        messages.Rejected("fuzzed-node", 0, 0, "why"),
        messages.Leave("fuzzed-node"),
        messages.Pong("fuzzed-node"),
    )
]
STRANGE: list[Any] = [
    *(None, True, -1, 1 << 31, 1 << 63, -(1 << 63), (1 << 64) - 1, float("nan"), float("inf"), -1e308),
    *("", "x" * 10_000, "\ud7ff\U0010ffff", b"\xff" * 300),
    *([], [0] * 20_000, ["t"] * 20_000, {}, {"a": {"b": {"c": []}}}, [[[[[[[[]]]]]]]]),
]


def mutated(rng: random.Random, corpus: list[Frames]) -> Frames:
    """One strange message: usually a valid one with something wrong in it."""
    return rng.choice(MUTATIONS)(rng, list(rng.choice(corpus)), corpus)


def _random_bytes(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    return [rng.randbytes(rng.choice((0, 1, 7, 100, 5000))) for _ in range(rng.randint(1, 4))]


def _flip_bits(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    data = bytearray(frames[0])
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [bytes(data), *frames[1:]]


def _truncate(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    return [frames[0][: rng.randrange(len(frames[0]))], *frames[1:]]


def _splice(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    other = rng.choice(corpus)[0]
    return [frames[0][: rng.randrange(len(frames[0]))] + other[rng.randrange(len(other)) :], *frames[1:]]


def _repeat_frames(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    return frames * rng.choice((2, 3, 1000))


def _drop_or_add_payload(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    return frames[:1] if len(frames) > 1 else [*frames, rng.randbytes(100)]


def _wrong_value(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    document: Any = msgspec.msgpack.decode(frames[0])
    target = document
    while True:
        key = rng.choice(list(target))
        inner = target[key]
        if isinstance(inner, dict) and inner and rng.random() < 0.7:
            target = inner
            continue
        target[key] = rng.choice(STRANGE)
        return [msgspec.msgpack.encode(document), *frames[1:]]


def _huge_count(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    """A header that announces more elements or bytes than there are."""
    announced = rng.choice(
        (b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\x00")
    )
    return [announced + frames[0], *frames[1:]]


def _deep(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    return [b"\x91" * rng.choice((10, 1000, 200_000)), *frames[1:]]


def _oversized(rng: random.Random, frames: Frames, corpus: list[Frames]) -> Frames:
    return [frames[0], bytes((1 << 20) + 1)]


MUTATIONS: list[Callable[[random.Random, Frames, list[Frames]], Frames]] = [
    _random_bytes,
    *[_flip_bits, _truncate, _splice, _wrong_value] * 6,
    _repeat_frames,
    *[_drop_or_add_payload] * 3,
    *[_huge_count] * 3,
    _deep,
    _oversized,
]

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE_GREETING = GREETING.replace(b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0"))
READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
FRAME = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # another one follows


def raw_streams(rng: random.Random) -> Iterator[bytes]:
    """Endless: what arrives at a port when the sender does not speak ZMTP, or stops half way through speaking it."""
    while True:
        yield rng.randbytes(rng.choice((1, 64, 10_000)))
        yield b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n" * rng.randint(1, 50)
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500)
        yield GREETING[: rng.randrange(1, 64)]
        yield GREETING + rng.randbytes(rng.randint(1, 200))
        yield CURVE_GREETING + rng.randbytes(rng.randint(1, 200))
        yield CURVE_GREETING + b"\x04\xc8\x05HELLO" + rng.randbytes(194)
        yield GREETING + b"\x06" + struct.pack(">Q", rng.choice((1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)))
        yield GREETING + READY + rng.randbytes(rng.randint(1, 2000))
        yield GREETING + READY + b"\x00\x05abc"  # a frame that never ends


def throw(port: int, data: bytes) -> None:
    """Connect, send, and leave without closing properly."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(data)


def half_open(port: int, count: int, rng: random.Random) -> list[socket.socket]:
    """Connections that say little or nothing and stay."""
    opened = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]
    for connection in opened:
        with contextlib.suppress(OSError):
            connection.sendall(GREETING[: rng.randrange(64)])
    return opened


def send_all(socket_: "zmq.Socket[bytes]", many: Iterator[Frames]) -> int:
    """Send each, dropping replies, so that neither side's queue fills; returns how many got out."""
    sent = 0
    for frames in many:
        if socket_.poll(5000, zmq.POLLOUT):
            socket_.send_multipart(frames)
            sent += 1
        while socket_.poll(0):
            socket_.recv_multipart()
    return sent


def speaking(port: int) -> socket.socket:
    """A connection without a key, after its handshake."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    connection.sendall(GREETING)
    connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(READY)
    connection.recv(1)
    return connection


def endless_message(port: int, most_bytes: int) -> int:
    """One message with ever more frames, until the other side cuts it off; returns the bytes that went out."""
    sent = 0
    with speaking(port) as connection, contextlib.suppress(OSError):
        while sent < most_bytes:
            connection.sendall(FRAME)
            sent += len(FRAME)
            if sent % (64 * len(FRAME)) == 0:
                time.sleep(0.1)  # some 40 MB a second
    return sent
