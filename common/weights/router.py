"""A ROUTER socket of the weight plane, with a thread that others can wake."""

from typing import Any

import zmq

from common.process.local_address import bracketed
from common.process.wake import Wake
from common.security.curve import HANDSHAKE_MS, NO_KEYS, CurveGate, Gate, KeyPair, PasswordGate


class Router:
    """One thread uses it; any thread may call `wake`."""

    def __init__(
        self,
        host: str,
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
        self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket; call it from its thread."""
        self.socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
