"""One client socket that the running event loop reads.

ZeroMQ's file descriptor signals edges only, so the socket is read until it is empty after every signal and every send.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import cast

import zmq

from broker.messaging.sockets import connect_dealer
from common.errors import UsageError
from common.security.credentials import Credential

_EVENTS, _IN = int(zmq.EVENTS), int(zmq.POLLIN)  # plain numbers: operators of enums are slow
VIEW_BYTES = 16 << 10  # smaller frames are copied: their memory may be a small part of a larger buffer


class LoopSocket:
    """Connects on construction; `on_message` is called in the loop with the frames of each message."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        max_frame_bytes: int,
        credential: Credential | None,
        on_message: Callable[[list[bytes]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        identity = b"c" + secrets.token_bytes(12)  # a routing id that no other client has
        self._socket, self.handshakes = connect_dealer(context, address, identity, max_frame_bytes, credential)
        self._fileno = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fileno, self.read)
        self._reading = False  # a read is due in this turn of the loop

    def close(self) -> None:
        self._loop.remove_reader(self._fileno)
        self.handshakes.close()
        self._socket.close(linger=0)

    def send(self, frames: list[bytes]) -> bool:
        """False while there is no connection; raises UsageError when the broker has refused this client."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if refusal := self.handshakes.refusal():
                raise UsageError(refusal) from None
            return False
        finally:
            if not self._reading:  # one read for all that is sent in this turn of the loop
                self._reading = True
                self._loop.call_soon(self.read)
        self.handshakes.proven()
        return True

    def read(self) -> None:
        self._reading = False
        while not self._socket.closed and cast(int, self._socket.get(_EVENTS)) & _IN:  # cheaper than zmq.Again
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)  # large ones are views of ZeroMQ's own memory
            self._on_message([f.bytes if len(f) < VIEW_BYTES else cast(bytes, f.buffer) for f in frames])
