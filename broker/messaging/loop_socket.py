"""One client socket that the running event loop reads.

ZeroMQ's file descriptor signals edges only, so the socket is read until it is empty after every signal and every send.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import zmq

from broker.messaging.sockets import connect_dealer, tcp_bytes
from common.errors import UsageError
from common.security.credentials import Credential

_EVENTS, _IN = int(zmq.EVENTS), int(zmq.POLLIN)  # plain numbers: operators of enums are slow
VIEW_BYTES = 16 << 10  # smaller frames are copied: their memory may be a small part of a larger buffer
PART_BYTES = 1 << 10  # less than this is no part of a message, but what ZeroMQ adds to messages


class LoopSocket:
    """Connects on construction. In the loop, `on_message` is called with the frames of each message, `on_connected`
    when another connection stands. `identity` is a routing id that no other client has.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        max_frame_bytes: int,
        credential: Credential | None,
        on_message: Callable[[list[bytes]], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_connected = on_message, on_connected
        self._socket, self.handshakes = connect_dealer(context, address, identity, max_frame_bytes, credential)
        self._fileno = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fileno, self.read)
        self._reading = False  # a read is due in this turn of the loop
        self._watched = self.handshakes.fileno()
        self._loop.add_reader(self._watched, self._watch)
        self._number = 0  # the connection whose bytes are counted here
        self._sent = self._delivered = 0  # in whole messages
        self._received = self._acknowledged = self._unsent = 0  # at the last look

    def close(self) -> None:
        self._loop.remove_reader(self._fileno)
        self._loop.remove_reader(self._watched)
        self.handshakes.close()
        self._socket.close(linger=0)

    def send(self, frames: list[bytes]) -> int:
        """Returns the number of the connection; 0 while there is none, or while what was sent before fills its queue.

        Raises UsageError when the broker has refused this client.
        """
        number = self.handshakes.connection
        if not number:  # a message into a connection that just broke would be lost, and nothing would show it later
            if refusal := self._watch():
                raise UsageError(refusal)
            return 0
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return 0
        finally:
            if not self._reading:  # one read for all that is sent in this turn of the loop
                self._reading = True
                self._loop.call_soon(self.read)
        if number != self._number:
            self._number, self._sent, self._delivered = number, 0, 0
        size = sum(map(len, frames))
        if size >= PART_BYTES:  # ZeroMQ has added bytes to all messages before, which would hide a part of this one
            self._sent = max(self._sent, tcp_bytes(self.handshakes.connected_fd)[1])
        self._sent += size
        return number

    def moves(self) -> bool:
        """Whether part of a message came or went since the last look, as on a slow link. Only TCP tells."""
        received, acknowledged = tcp_bytes(self.handshakes.connected_fd)
        received -= self._delivered
        came = received - self._received >= PART_BYTES
        went = self._unsent >= PART_BYTES and acknowledged - self._acknowledged >= PART_BYTES
        self._received, self._acknowledged, self._unsent = received, acknowledged, self._sent - acknowledged
        return came or went

    def _watch(self) -> str:
        before, refusal = self.handshakes.connection, self.handshakes.refusal()
        if self.handshakes.connection not in (0, before):
            self._on_connected()
        return refusal

    def read(self) -> None:
        self._reading = False
        while not self._socket.closed and cast(int, self._socket.get(_EVENTS)) & _IN:  # cheaper than zmq.Again
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)  # large ones are views of ZeroMQ's own memory
            self._delivered += sum(map(len, frames))
            self._on_message([f.bytes if len(f) < VIEW_BYTES else cast(bytes, f.buffer) for f in frames])
