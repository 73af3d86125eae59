"""The ROUTER sockets of the weight plane: one that other threads can wake, and with it the learner's control socket."""

import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from common.process.local_address import bracketed
from common.process.wake import Wake
from common.security.credentials import belongs_to, load_credential
from common.security.curve import HANDSHAKE_MS, NO_KEYS, CurveGate, Gate, KeyPair, KeyRing, PasswordGate
from common.weights.wire import messages
from common.weights.wire.messages import EjectCode

logger = logging.getLogger(__name__)
MAX_NODE_MESSAGE_BYTES = 1 << 20  # a source's part has at most half as many bytes of digests
WAITING_MESSAGES = 32  # unread messages of one node here; more wait at the node
BATCH_MESSAGES = 512
BEHIND_S = 5.0  # that a flood of messages may delay the discovery of a silent node
NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # an enum's `|` takes 5 us
COPIED_BYTES = 64 << 10  # a smaller frame is copied, which takes less time than a reference to it
MALFORMED_LOGGED = 100


class RouterSocket:
    """One thread uses it; any thread may call `wake`."""

    def __init__(
        self,
        host: str,
        *,
        max_message_bytes: int,
        waiting_messages: int,
        keys: KeyPair = NO_KEYS,
        allowed: Any = None,
        unread_messages: int = 1000,
        password: str = "",
    ) -> None:
        """Bind a free port of `host` (name or IP); raises zmq.ZMQError.

        A larger message ends its connection. Beyond `waiting_messages` of one connection more wait at its other end,
        and sending more than `unread_messages` to a connection that reads none fails. `allowed`: as in CurveGate.
        With `password` only clients that know it are let in.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: Gate | None = CurveGate(self._context, keys, allowed) if keys.public else None
        if password:
            self._gate = PasswordGate(self._context, password)
        self.socket = self._context.socket(zmq.ROUTER)
        if self._gate is not None:
            self._gate.secure(self.socket)
        self.socket.setsockopt(zmq.LINGER, 200)  # ms that close() waits for the last messages
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a closed connection fails: the death signal
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.RCVHWM, waiting_messages)
        self.socket.setsockopt(zmq.SNDHWM, unread_messages)  # connections have what is set before the bind
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        self._wake = Wake()
        self.wake = self._wake.send  # lets `wait` return; callable from any thread
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        interface = f"tcp://{bracketed(host)}"
        try:
            self.address = f"{interface}:{self.socket.bind_to_random_port(interface)}"
        except zmq.ZMQError:
            self.close()
            raise

    def wait(self, timeout_ms: int | None = None) -> None:
        """Return when a message has come, after `wake`, or after the timeout; None: there is none."""
        self._poller.poll(timeout_ms)
        self._wake.drain()

    def send(self, frames: list[Any]) -> None:
        """Raises zmq.Again when this connection has read too little, another zmq.ZMQError when it is closed."""
        self.socket.getsockopt(zmq.EVENTS)  # a send by itself looks only once a millisecond at what was read since
        for number, frame in enumerate(frames, 1):
            flags = NOBLOCK_MORE if number < len(frames) else NOBLOCK  # only the first frame can fail
            self.socket.send(frame, flags, copy=len(frame) < COPIED_BYTES)

    def receive(self) -> list[zmq.Frame]:
        """The next message, its sender's identity first; raises zmq.Again when there is none."""
        frames = [self.socket.recv(NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(self.socket.recv(NOBLOCK, copy=False))
        return frames

    def close(self) -> None:
        """Close the socket; call it from its thread."""
        self.socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()


class Refused(Exception):
    """A message that its sender may not say, or that is none."""

    def __init__(self, code: EjectCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class ControlSocket:
    """Where nodes, and other ranks of this learner, talk to the control thread. Only `post` is for other threads."""

    def __init__(self, address: str, credentials: str | None = None) -> None:
        """Bind a free port of `address` (host name or IP); with `credentials`, a key folder, for its nodes only.

        Raises zmq.ZMQError, or UsageError when the learner's keys or the list of allowed ones cannot be read.
        """
        keys = load_credential(credentials, "learner") if credentials is not None else NO_KEYS
        self._ring = KeyRing(credentials, ("node", "learner")) if credentials is not None else None
        self._router = RouterSocket(
            address,
            max_message_bytes=MAX_NODE_MESSAGE_BYTES,
            waiting_messages=WAITING_MESSAGES,
            keys=keys,
            allowed=self._ring,
        )
        self.address = self._router.address
        self.malformed = 0
        self._drained = 0.0
        self._encoded: tuple[messages.LearnerMessage, bytes] | None = None  # the message that was sent last
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
        began = time.perf_counter()
        for _ in range(BATCH_MESSAGES):  # a node that floods the endpoint must not keep its thread from other work
            try:
                identity, *frames = self._router.receive()
            except zmq.Again:
                self._drained = began
                return
            try:
                message = self._decoded(identity, frames)
            except (Refused, ValueError, RecursionError) as error:
                self.malformed += 1
                if self.malformed <= MALFORMED_LOGGED or self.malformed % 1000 == 0:
                    logger.warning("message %d was refused: %s", self.malformed, error)
                code = error.code if isinstance(error, Refused) else EjectCode.MALFORMED
                self.send(identity.bytes, messages.Eject(f"malformed message: {str(error)[:500]}", code=code))
                continue
            yield identity.bytes, message

    def read_until(self, now: float) -> float:
        """All that came before this time was read, so a silence ends here; perf_counter seconds."""
        return max(self._drained, now - BEHIND_S)

    def _decoded(self, identity: zmq.Frame, frames: list[zmq.Frame]) -> messages.NodeMessage | messages.SourceMessage:
        """The message, if its sender may say it; raises Refused, ValueError or RecursionError."""
        sender = self._ring.sender(identity) if self._ring is not None else None
        if self._ring is not None and sender is None:
            raise Refused(EjectCode.REVOKED, "this key was revoked")
        if len(frames) != 1:
            raise Refused(EjectCode.MALFORMED, f"{len(frames)} frames")
        message = messages.decode_from_node(frames[0].buffer)
        if sender is None:
            return message
        if isinstance(message, messages.SourceMessage) != (sender.role == "learner"):
            raise Refused(EjectCode.ROLE, f"{type(message).__name__} from a {sender.role}")
        if isinstance(message, messages.Join) and not belongs_to(message.node_id, sender.name):
            raise Refused(EjectCode.NODE_ID, f"node id {message.node_id!r} with the credential {sender.name!r}")
        return message

    def send(self, identity: bytes, message: messages.LearnerMessage) -> bool:
        """False when the node's connection is closed. A message that goes to many nodes in turn is encoded once."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = message, messages.encode(message)
        try:
            self._router.send([identity, self._encoded[1]])
        except zmq.Again:
            logger.warning("a node does not read its messages")  # the kernel keeps the connection; its silence ends it
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._router.close()
