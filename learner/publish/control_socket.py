"""The control endpoint of the weight plane: a ROUTER for the nodes and an inbox for this process's threads."""

import logging
import queue
from collections.abc import Callable, Iterator

import zmq

from common.security.credentials import belongs_to, load_credential
from common.security.curve import NO_KEYS, KeyRing
from common.weights import messages
from common.weights.router import Router

logger = logging.getLogger(__name__)

MAX_NODE_MESSAGE_BYTES = 1 << 20  # a source's part has at most half as many bytes of digests
WAITING_MESSAGES = 32  # unread messages of one node here; more wait at the node
BATCH_MESSAGES = 512
MALFORMED_LOGGED = 100


class Endpoint:
    """Used by one thread, except `post`. Nodes are connected to it, and other ranks of this learner."""

    def __init__(self, address: str, credentials: str | None = None) -> None:
        """Bind a free port of `address` (host name or IP); with `credentials`, a key folder, for its nodes only.

        Raises zmq.ZMQError, or UsageError when the learner's keys or the list of allowed ones cannot be read.
        """
        keys = load_credential(credentials, "learner") if credentials is not None else NO_KEYS
        self._ring = KeyRing(credentials, ("node", "learner")) if credentials is not None else None
        self._router = Router(address, MAX_NODE_MESSAGE_BYTES, WAITING_MESSAGES, keys, self._ring)
        self.address = self._router.address
        self.malformed = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        """Let the endpoint's thread make this call, and wake it."""
        self._inbox.put(call)
        self._router.wake()

    def wait(self, timeout_ms: int) -> None:
        """Return when a message has come or calls were posted, which it makes, or after the timeout."""
        if self._ring is not None:
            self._ring.refresh()
        self._router.wait(timeout_ms)
        while not self._inbox.empty():
            self._inbox.get()()

    def received(self) -> Iterator[tuple[bytes, messages.NodeMessage | messages.SourceMessage]]:
        """(connection, message) of the nodes. A malformed message is counted, and its sender is told the reason."""
        for _ in range(BATCH_MESSAGES):  # a node that floods the endpoint must not keep its thread from other work
            try:
                identity, *frames = self._router.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            connection = identity.bytes
            try:
                sender = self._ring.sender(identity) if self._ring is not None else None
                if self._ring is not None and sender is None:
                    raise ValueError("this key was revoked")
                if len(frames) != 1:
                    raise ValueError(f"{len(frames)} frames")
                message = messages.decode_from_node(frames[0].buffer)
                if sender is not None and isinstance(message, messages.SourceMessage) != (sender.role == "learner"):
                    raise ValueError(f"{type(message).__name__} from a {sender.role}")
                joins = sender is not None and isinstance(message, messages.Join)
                if joins and not belongs_to(message.node_id, sender.name):
                    raise ValueError(f"node id {message.node_id!r} with the credential {sender.name!r}")
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
            self._router.send([identity, messages.encode(message)])
        except zmq.Again:
            logger.warning("a node does not read its messages")  # the kernel keeps the connection; its silence ends it
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._router.close()
