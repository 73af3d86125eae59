"""Serves payloads piece by piece: the learner's to nodes, and a node's staging buffer to newcomers.

A server keeps no state about its clients. They ask for ranges of a payload that was offered under a key, and limit the
flow themselves. Pieces are sent from the payload's own memory, without a copy. The owner withdraws the offer before it
overwrites that memory; pieces that are still under way then fail the receiver's checksums.
"""

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
import zmq

from common.security.curve import HANDSHAKE_MS, NO_KEYS, CurveGate, new_keys
from common.weights.collectives import bind_free_port
from common.weights.messages import Source
from common.weights.transports.relay_wire import CREDIT, PIECE_BYTES, Get, Gone, Piece, decode_get, encode

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4096


@dataclass(frozen=True)
class Offer:
    """A payload for the client with one key ('' for any client), valid until a time.monotonic()."""

    flat: torch.Tensor
    client_public: str
    until: float


class RelayServer:
    """Serves from a thread of its own; every method may be called from any thread."""

    def __init__(self, host: str, secured: bool) -> None:
        """Listen on a free port of `host`; `secured`: only clients with the key of an offer get in, encrypted.

        Raises:
            zmq.ZMQError: it cannot be bound.
        """
        self._offers: dict[str, Offer] = {}
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a client that reads nothing fails
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.setsockopt(zmq.SNDHWM, 2 * CREDIT)
        self._router.setsockopt(zmq.RCVHWM, 4 * CREDIT)
        keys = new_keys() if secured else NO_KEYS
        self.public = keys.public
        self._gate = CurveGate(self._context, keys, self) if secured else None
        if self._gate is not None:
            self._gate.secure(self._router)
        try:
            self.address = bind_free_port(self._router, host)
        except zmq.ZMQError:
            self._release()
            raise
        self._wake_in, self._wake_out = socket.socketpair()
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
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!")
        self._thread.join(5)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether an offer is for the client with this key; pyzmq asks it for every new connection."""
        with self._lock:
            return any(o.client_public == key.decode("ascii", "replace") for o in self._offers.values())

    def _release(self) -> None:
        self._router.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._wake_out.fileno() in ready:
                    return
                with contextlib.suppress(zmq.Again):
                    for _ in range(4 * CREDIT):
                        self._answer(*self._router.recv_multipart(zmq.NOBLOCK, copy=False))
        except Exception:
            logger.exception("the relay of weights stopped; nodes fetch elsewhere")
        finally:
            self._release()
            self._wake_in.close()
            self._wake_out.close()

    def _answer(self, identity: zmq.Frame, *frames: zmq.Frame) -> None:
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames")
            get = decode_get(frames[0].buffer)
            piece = self._piece(get, str(frames[0].get("User-Id")) if self.public else "")
        except (ValueError, zmq.ZMQError) as error:
            self._send([identity.bytes, encode(Gone(str(error)))])
            return
        self._send([identity.bytes, encode(Piece(get.start, get.end)), piece])

    def _piece(self, get: Get, client_public: str) -> memoryview:
        with self._lock:
            offer = self._offers.get(get.key)
        if offer is None or offer.client_public != client_public or offer.until < time.monotonic():
            raise ValueError("this version is no longer offered here")
        if not 0 <= get.end - get.start <= PIECE_BYTES or get.end > offer.flat.numel():
            raise ValueError(f"bytes {get.start} to {get.end} of {offer.flat.numel()} cannot be asked for at once")
        return memoryview(cast(Any, offer.flat[get.start : get.end].numpy()))

    def _send(self, frames: list[Any]) -> None:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the client is gone or asked for too much; its own wait has a deadline
            logger.debug("a piece was not sent: %s", error)
