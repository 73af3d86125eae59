"""The control endpoint of the weight plane: a ROUTER for the nodes and an inbox for this process's threads."""

import contextlib
import logging
import queue
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

import zmq

from common.weights import messages

logger = logging.getLogger(__name__)

MAX_NODE_MESSAGE_BYTES = 1 << 20

Item = TypeVar("Item")


class Endpoint(Generic[Item]):
    """Used by one thread, except `post`."""

    def __init__(self, address: str) -> None:
        """Bind a free port of `address` (host name or IP); raises zmq.ZMQError when that fails."""
        self._router = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 200)  # ms that close() waits for the last words
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a closed connection fails: the death signal
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_NODE_MESSAGE_BYTES)
        self._router.setsockopt(zmq.IPV6, int(":" in address))
        host = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
        self.address = f"{host}:{self._router.bind_to_random_port(host)}"
        self.malformed = 0
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_out.fileno(), zmq.POLLIN)

    def post(self, item: Item) -> None:
        """Hand `item` to the endpoint's thread and wake it; callable from any thread."""
        self._inbox.put(item)
        with contextlib.suppress(OSError):  # a wake-up is pending already, or the thread has ended
            self._wake_in.send(b"!")

    def wait(self, timeout_ms: int) -> None:
        """Return when a node or a thread has something to say, or after the timeout."""
        self._poller.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def items(self) -> Iterator[Item]:
        """What was posted."""
        while not self._inbox.empty():
            yield self._inbox.get()

    def received(self) -> Iterator[tuple[bytes, messages.NodeMessage]]:
        """(connection, message) of the nodes; what does not decode is counted and its sender hears why."""
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ValueError(f"{len(frames)} frames")
                message = messages.decode_from_node(frames[0])
            except ValueError as error:
                self.malformed += 1
                logger.warning("a message that does not decode was ignored: %s", error)
                self.send(identity, messages.Eject(f"malformed message: {error}"))
                continue
            yield identity, message

    def send(self, identity: bytes, message: messages.LearnerMessage) -> bool:
        """False when the node's connection is closed."""
        try:
            self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a node does not read its messages")  # alive for the kernel; its silence will tell
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._router.close()
        self._wake_in.close()
        self._wake_out.close()
