"""The control endpoint of the weight plane: a ROUTER for the nodes and an inbox for this process's threads."""

import contextlib
import logging
import queue
import socket
from collections.abc import Callable, Iterator

import zmq

from common.security.credentials import load_credential
from common.security.curve import HANDSHAKE_MS, CurveServer, KeyRing
from common.weights import messages
from common.weights.collectives import bind_free_port

logger = logging.getLogger(__name__)

MAX_NODE_MESSAGE_BYTES = 1 << 20
WAITING_MESSAGES = 32  # unread messages of one node here; more wait at the node
BATCH_MESSAGES = 512
MALFORMED_LOGGED = 100


class Endpoint:
    """Used by one thread, except `post`."""

    def __init__(self, address: str, credentials: str | None = None) -> None:
        """Bind a free port of `address` (host name or IP); with `credentials`, a key folder, for its nodes only.

        Raises:
            zmq.ZMQError: when it cannot be bound.
            UsageError: the learner's keys or the list of allowed ones cannot be read.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._curve: CurveServer | None = None
        if credentials is not None:
            keys, ring = load_credential(credentials, "learner"), KeyRing(credentials, ("node",))
            self._curve = CurveServer(self._context, keys, ring)
        self._router = self._context.socket(zmq.ROUTER)
        if self._curve is not None:
            self._curve.secure(self._router)
        self._router.setsockopt(zmq.LINGER, 200)  # ms that close() waits for the last messages
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a closed connection fails: the death signal
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_NODE_MESSAGE_BYTES)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
        self.address = bind_free_port(self._router, address)
        self.malformed = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_out.fileno(), zmq.POLLIN)

    def post(self, call: Callable[[], None]) -> None:
        """Let the endpoint's thread make this call, and wake it; callable from any thread."""
        self._inbox.put(call)
        with contextlib.suppress(OSError):  # a wake-up is pending already, or the thread has ended
            self._wake_in.send(b"!")

    def wait(self, timeout_ms: int) -> None:
        """Return when a message or a call has come, or after the timeout."""
        if self._curve is not None:
            self._curve.ring.refresh()
        self._poller.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def make_calls(self) -> None:
        """Make the calls that were posted."""
        while not self._inbox.empty():
            self._inbox.get()()

    def received(self) -> Iterator[tuple[bytes, messages.NodeMessage]]:
        """(connection, message) of the nodes. A malformed message is counted, and its sender is told the reason."""
        for _ in range(BATCH_MESSAGES):  # a node that floods the endpoint must not keep its thread from other work
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            connection = identity.bytes
            try:
                if self._curve is not None and self._curve.sender(identity) is None:
                    raise ValueError("this key was revoked")
                if len(frames) != 1:
                    raise ValueError(f"{len(frames)} frames")
                message = messages.decode_from_node(frames[0].buffer)
            except (ValueError, RecursionError) as error:
                self.malformed += 1
                if self.malformed <= MALFORMED_LOGGED or self.malformed % 1000 == 0:
                    logger.warning("message %d that does not decode was ignored: %s", self.malformed, error)
                self.send(connection, messages.Eject(f"malformed message: {str(error)[:500]}"))
                continue
            yield connection, message

    def send(self, identity: bytes, message: messages.LearnerMessage) -> bool:
        """False when the node's connection is closed."""
        try:
            self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a node does not read its messages")  # the kernel keeps the connection; its silence ends it
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._router.close()
        if self._curve is not None:
            self._curve.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
