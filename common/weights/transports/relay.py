"""Fetching a payload point to point over ZeroMQ, for newcomers and for nodes that no collective reaches."""

import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import zmq

from common.security.curve import Keys, secure_client
from common.weights.messages import Epoch, Source
from common.weights.transports.relay_wire import CREDIT, PIECE_BYTES, Get, Gone, decode_answer, encode

LOOK_S = 0.1  # a fetch notices within this time that it was closed


class RelayGroup:
    """One node's way to the source that the learner named; encrypted when the source came with keys."""

    def __init__(self, epoch: Epoch) -> None:
        """Connect in the background; the first bucket shows whether the source answers.

        Raises:
            RuntimeError: the epoch names no source.
        """
        if epoch.source is None:
            raise RuntimeError(f"epoch {epoch.epoch} is a relay's and names no source")
        self._source = epoch.source
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connected(self._context, epoch.source)
        self._one_fetch = threading.Lock()
        self._closing = False
        self._total = self._asked = self._got = 0  # bytes of the payload
        self._rest = np.empty(0, np.uint8)  # the part of a piece that belongs to the next bucket

    def begin(self, payload_bytes: int) -> None:
        """A relay's group serves one payload: its key is the source's."""
        self._total = payload_bytes

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Receive the payload's next bytes into `bucket` [n] uint8 while the caller waits.

        The wait raises:
            RuntimeError: the source does not have them, they did not come within `timeout_s`, or `close` was called.
        """
        return lambda: self._receive(bucket, timeout_s)

    def close(self) -> None:
        """Disconnect; a fetch in another thread ends within LOOK_S."""
        self._closing = True
        if self._one_fetch.acquire(blocking=False):
            try:
                self._socket.close(linger=0)
                self._context.term()
            finally:
                self._one_fetch.release()

    def _receive(self, bucket: torch.Tensor, timeout_s: float) -> None:
        try:
            with self._one_fetch:
                self._fill(bucket.numpy(), timeout_s)
        finally:
            through = 0 < self._total <= self._got and not len(self._rest)
            if self._closing or through:  # nothing more will come this way: an epoch of the relay serves one payload
                self.close()

    def _fill(self, bucket: "np.ndarray[tuple[int], np.dtype[np.uint8]]", timeout_s: float) -> None:
        at = min(len(bucket), len(self._rest))
        bucket[:at], self._rest = self._rest[:at], self._rest[at:]
        deadline = time.monotonic() + timeout_s
        while at < len(bucket):
            if self._closing:
                raise RuntimeError("the group was closed")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(
                    f"{at} of {len(bucket)} bytes came from {self._source.address} within {timeout_s:g} s"
                )
            self._ask()
            if not self._socket.poll(int(1000 * min(left_s, LOOK_S)) + 1):
                continue
            piece = self._take()
            used = min(len(piece), len(bucket) - at)
            bucket[at : at + used] = piece[:used]
            at += used
            self._rest = piece[used:]  # not empty only when the bucket is full

    def _ask(self) -> None:
        while self._asked < self._total and self._asked - self._got < CREDIT * PIECE_BYTES:
            end = min(self._asked + PIECE_BYTES, self._total)
            try:
                self._socket.send(encode(Get(self._source.key, self._asked, end)), zmq.NOBLOCK)
            except zmq.Again:
                return
            self._asked = end

    def _take(self) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """The next piece; the array keeps its memory alive."""
        frames = self._socket.recv_multipart(copy=False)
        try:
            answer = decode_answer(frames[0].buffer)
        except ValueError as error:
            raise RuntimeError(f"{self._source.address} answered what does not decode: {error}") from error
        if isinstance(answer, Gone):
            raise RuntimeError(f"{self._source.address}: {answer.reason}")
        size = len(frames[1].buffer) if len(frames) == 2 else -1
        if answer.start != self._got or answer.end - answer.start != size:
            raise RuntimeError(f"{self._source.address} sent {size} bytes for byte {answer.start}, not {self._got}")
        self._got = answer.end
        return np.frombuffer(frames[1].buffer, np.uint8)


def connected(context: "zmq.Context[zmq.Socket[bytes]]", source: Source) -> "zmq.Socket[bytes]":
    """A DEALER that connects to the source, with the keys of this fetch where there are any."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 2 * CREDIT)
    socket.setsockopt(zmq.SNDHWM, 2 * CREDIT)
    socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + 4096)  # encryption adds some bytes
    socket.setsockopt(zmq.IPV6, int("[" in source.address))
    if source.server_public:
        secure_client(socket, Keys(source.public, source.secret), source.server_public)
    socket.connect(source.address)
    return socket
