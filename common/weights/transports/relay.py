"""Fetching a payload point to point over ZeroMQ, for newcomers and for nodes that no collective reaches.

A client (DEALER) asks a server (ROUTER) for the pieces of a payload that was offered under a key:

    client -> server  Get    asks for a range of bytes of the payload `key`
    server -> client  Piece  has them as a second frame of end - start bytes
    server -> client  Gone   they are not, or no longer, offered here; with the reason

The client has at most CREDIT pieces under way, which bounds every queue at both ends. Pieces come in the order of the
requests, and none is of two buckets. The server sends them from the payload's own memory. The owner withdraws the offer
before it overwrites that memory; pieces that are still under way then fail the receiver's checksums.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import torch
import zmq

from common.security.curve import NO_KEYS, Keys, new_keys, secure_client
from common.weights.messages import Epoch, Source
from common.weights.router import Router

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
CREDIT = 8  # pieces asked for and not yet received
MAX_REQUEST_BYTES = 4096
LOOK_S = 0.1  # a fetch notices within this time that it was closed

Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
PayloadKey = Annotated[str, msgspec.Meta(max_length=256)]


class Get(msgspec.Struct, frozen=True):
    key: PayloadKey
    start: Offset
    end: Offset


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    start: Offset
    end: Offset


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_get = msgspec.msgpack.Decoder(Get).decode
decode_answer = msgspec.msgpack.Decoder(Piece | Gone).decode


class RelayGroup:
    """One node's way to the source that the learner named; encrypted when the source came with keys."""

    def __init__(self, epoch: Epoch) -> None:
        """Connect in the background; raises RuntimeError when the epoch names no source."""
        if epoch.source is None:
            raise RuntimeError(f"epoch {epoch.epoch} is a relay's and names no source")
        self._source = epoch.source
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 2 * CREDIT)
        self._socket.setsockopt(zmq.SNDHWM, 2 * CREDIT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + 4096)  # encryption adds some bytes
        self._socket.setsockopt(zmq.IPV6, int("[" in epoch.source.address))
        if epoch.source.server_public:
            keys = Keys(epoch.source.public, epoch.source.secret)  # made for this fetch
            secure_client(self._socket, keys, epoch.source.server_public)
        self._socket.connect(epoch.source.address)
        self._one_fetch = threading.Lock()
        self._closing = False
        self._posted = self._asked = self._got = 0  # bytes of the payload
        self._ends = deque[int]()  # where buckets end that were posted and not yet asked for

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Receive the payload's next bytes into `bucket` [n] uint8 while the caller waits; raises as `Group.post`."""
        self._posted += len(bucket)
        self._ends.append(self._posted)
        return partial(self._receive, bucket, self._posted, timeout_s)

    def close(self) -> None:
        """Disconnect; a fetch in another thread ends within LOOK_S."""
        self._closing = True
        if self._one_fetch.acquire(blocking=False):
            try:
                self._socket.close(linger=0)
                self._context.term()
            finally:
                self._one_fetch.release()

    def _receive(self, bucket: torch.Tensor, end: int, timeout_s: float) -> None:
        try:
            with self._one_fetch:
                self._fill(bucket.numpy(), end, timeout_s)
        finally:
            if self._closing:
                self.close()

    def _fill(self, bucket: "np.ndarray[tuple[int], np.dtype[np.uint8]]", end: int, timeout_s: float) -> None:
        """The payload's bytes up to `end`, which are the last of `bucket`."""
        start, deadline = end - len(bucket), time.monotonic() + timeout_s
        while self._got < end:
            if self._closing:
                raise RuntimeError("the group was closed")
            left_s = deadline - time.monotonic()
            at = self._got - start
            if left_s <= 0:
                source = self._source.address
                raise RuntimeError(f"{at} of {len(bucket)} bytes came from {source} within {timeout_s:g} s")
            self._ask()
            if self._socket.poll(int(1000 * min(left_s, LOOK_S)) + 1):
                piece = self._take(end)
                bucket[at : at + len(piece)] = piece

    def _ask(self) -> None:
        while self._ends and self._asked - self._got < CREDIT * PIECE_BYTES:
            end = min(self._asked + PIECE_BYTES, self._ends[0])
            try:
                self._socket.send(encode(Get(self._source.key, self._asked, end)), zmq.NOBLOCK)
            except zmq.Again:
                return
            self._asked = end
            if end == self._ends[0]:
                self._ends.popleft()

    def _take(self, end: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """The next piece, which does not go beyond `end`; the array keeps its memory alive."""
        frames = self._socket.recv_multipart(copy=False)
        try:
            answer = decode_answer(frames[0].buffer)
        except ValueError as error:
            raise RuntimeError(f"{self._source.address} answered what does not decode: {error}") from error
        if isinstance(answer, Gone):
            raise RuntimeError(f"{self._source.address}: {answer.reason}")
        size = len(frames[1].buffer) if len(frames) == 2 else -1
        if answer.start != self._got or answer.end - answer.start != size or answer.end > end:
            raise RuntimeError(f"{self._source.address} sent {size} bytes for byte {answer.start}, not {self._got}")
        self._got = answer.end
        return np.frombuffer(frames[1].buffer, np.uint8)


@dataclass(frozen=True)
class Offer:
    """A payload for the client with one key ('' for any client), valid until a time.monotonic()."""

    flat: torch.Tensor
    client_public: str
    until: float


class RelayServer:
    """Serves from a thread of its own; every method may be called from any thread."""

    def __init__(self, host: str, secured: bool) -> None:
        """Listen on `host`; `secured`: only clients with the key of an offer get in, encrypted. Raises zmq.ZMQError."""
        self._offers: dict[str, Offer] = {}
        self._lock = threading.Lock()
        keys = new_keys() if secured else NO_KEYS
        self.public = keys.public
        self._router = Router(host, MAX_REQUEST_BYTES, 4 * CREDIT, keys, self, 2 * CREDIT)
        self.address = self._router.address
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="relay-weights")
        self._thread.start()

    def offer(self, key: str, flat: torch.Tensor, timeout_s: float, client_public: str = "") -> None:
        """Serve `flat` [n] uint8 under `key` for `timeout_s`, to the owner of `client_public` if one is given."""
        now = time.monotonic()
        with self._lock:
            self._offers = {k: o for k, o in self._offers.items() if o.until > now}
            self._offers[key] = Offer(flat, client_public, now + timeout_s)

    def source(self, key: str, flat: torch.Tensor, timeout_s: float) -> Source:
        """Offer `flat` to one node, with keys made for it if this server is secured; its Epoch names the result."""
        keys = new_keys() if self.public else NO_KEYS
        self.offer(key, flat, timeout_s, keys.public)
        return Source(self.address, key, self.public, keys.public, keys.secret)

    def withdraw(self, key: str | None = None) -> None:
        """Serve nothing more under `key`, or under any key; the memory may be written again."""
        with self._lock:
            if key is None:
                self._offers.clear()
            else:
                self._offers.pop(key, None)

    def close(self) -> None:
        """Stop at once."""
        self._closing = True
        self._router.wake()
        self._thread.join(5)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether an offer is for the client with this key; pyzmq asks it for every new connection."""
        with self._lock:
            return any(o.client_public == key.decode("ascii", "replace") for o in self._offers.values())

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._router.wait()
                with contextlib.suppress(zmq.Again):
                    for _ in range(4 * CREDIT):
                        self._answer(*self._router.socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except Exception:
            logger.exception("the relay of weights stopped; nodes fetch elsewhere")
        finally:
            self._router.close()

    def _answer(self, identity: zmq.Frame, *frames: zmq.Frame) -> None:
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames")
            get = decode_get(frames[0].buffer)
            client_public = str(frames[0].get("User-Id")) if self.public else ""
            with self._lock:
                offer = self._offers.get(get.key)
            if offer is None or offer.client_public != client_public or offer.until < time.monotonic():
                raise ValueError("this version is no longer offered here")
            if not 0 <= get.end - get.start <= PIECE_BYTES or get.end > offer.flat.numel():
                raise ValueError(f"bytes {get.start} to {get.end} of {offer.flat.numel()} cannot be asked for at once")
            piece = memoryview(cast(Any, offer.flat[get.start : get.end].numpy()))
            answer: list[Any] = [encode(Piece(get.start, get.end)), piece]
        except (ValueError, zmq.ZMQError) as error:
            answer = [encode(Gone(str(error)))]
        try:
            self._router.send([identity.bytes, *answer])
        except zmq.ZMQError as error:  # the client is gone or asked for too much; its own wait has a deadline
            logger.debug("a piece was not sent: %s", error)
