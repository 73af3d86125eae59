"""CURVE on ZeroMQ sockets: which keys are let in, who sent a message, and why a handshake failed.

The broker and the learner's control socket are CURVE servers. A client proves its key in the
handshake, before any of its messages is read. ZeroMQ then attaches the proven key to every message of the connection.
"""

import logging
import secrets
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from common.errors import UsageError
from common.security.credentials import Credential, Identity, KeyFolder, Keys, Role, load_allowed

logger = logging.getLogger(__name__)

ZAP_DOMAIN = "slipstream"
PASSWORD_USER = "slipstream"
HANDSHAKE_MS = 10_000  # a connection that has not proven its key by then is closed
BROKEN_HANDSHAKES = 5  # so many in a row for BROKEN_S: the other side has another key
BROKEN_S = 3.0

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OUTCOMES = _FAILED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CHANGES = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class KeyRing:
    """The allowed keys of a key folder, read again whenever the file has changed. Any thread may ask."""

    def __init__(self, path: str | Path, roles: Collection[Role]) -> None:
        """Only keys of `roles` are let in. Raises UsageError when the list cannot be read."""
        self._path = path
        self._roles = frozenset(roles)
        self._file = KeyFolder(path).allowed
        self._lock = threading.Lock()
        self._signature = self._stat()
        self._keys = self._load()

    def sender(self, frame: zmq.Frame) -> Identity | None:
        """The sender of the message that `frame` belongs to; None when its key was revoked after it connected."""
        try:
            return self._keys.get(str(frame.get("User-Id")))
        except (zmq.ZMQError, KeyError):
            return None

    def refresh(self) -> None:
        """Read the list again if it has changed; one that cannot be read leaves the last good one in force."""
        with self._lock:
            signature = self._stat()
            if signature == self._signature:
                return
            self._signature = signature
            try:
                before = self._keys
                self._keys = self._load()
            except UsageError as error:
                logger.error("the list of allowed keys stays as it was: %s", error)
                return
        added = [i.name for key, i in self._keys.items() if key not in before]
        removed = [i.name for key, i in before.items() if key not in self._keys]
        logger.info("allowed keys: added %s, removed %s", added or "none", removed or "none")

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection with this key is let in; pyzmq calls it."""
        try:
            self.refresh()
            return key.decode("ascii", "replace") in self._keys
        except Exception:  # no error may end the thread that lets clients in
            logger.exception("a key could not be checked")
            return False

    def _load(self) -> dict[str, Identity]:
        return {key: i for key, i in load_allowed(self._path).items() if i.role in self._roles}

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


KeyPair = Keys | Credential
NO_KEYS = Keys("", "")


def new_keys() -> Keys:
    return Keys(*(key.decode() for key in zmq.curve_keypair()))


class Gate:
    """Lets only some clients into the sockets of one context.

    A context has at most one gate, which owns its ZAP endpoint and a thread that serves it. Close the gate after its
    sockets and before its context.
    """

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        self._authenticator.start()

    def secure(self, socket: "zmq.Socket[Any]") -> None:
        """Call it before `bind`. When the gate's thread has ended, the socket lets in no client at all."""
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        self._authenticator.stop()


class PasswordGate(Gate):
    """Lets in the clients that know a password. It travels in the clear, as everything on such a connection."""

    def __init__(self, context: "zmq.Context[Any]", password: str) -> None:
        super().__init__(context)
        self._authenticator.configure_plain(ZAP_DOMAIN, {PASSWORD_USER: password})

    def secure(self, socket: "zmq.Socket[Any]") -> None:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        super().secure(socket)


def give_password(socket: "zmq.Socket[Any]", password: str) -> None:
    """Call it before `connect`; '' where the server asks for none."""
    if password:
        socket.setsockopt(zmq.PLAIN_USERNAME, PASSWORD_USER.encode())
        socket.setsockopt(zmq.PLAIN_PASSWORD, password.encode())


class CurveGate(Gate):
    def __init__(self, context: "zmq.Context[Any]", keys: KeyPair, allowed: Any) -> None:
        """`allowed.callback(domain, key)` says in another thread whether a connection that proved `key` is let in."""
        super().__init__(context)
        self._keys = keys
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, credentials_provider=allowed)

    def secure(self, socket: "zmq.Socket[Any]") -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        _set_keys(socket, self._keys)
        super().secure(socket)


def secure_client(socket: "zmq.Socket[Any]", keys: KeyPair, server_public: str) -> None:
    """Call it before `connect`: the client proves `keys`, and the server must prove that it has `server_public`."""
    _set_keys(socket, keys)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())


def _set_keys(socket: "zmq.Socket[Any]", keys: KeyPair) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


_PROVEN: set[tuple[str, str]] = set()  # (server, public key or "") of the clients here that ever got in


class Handshakes:
    """Watches a client socket's attempts to connect."""

    def __init__(self, socket: "zmq.Socket[Any]", server: str, credential: Credential | None) -> None:
        """Make it before `connect`. `server` names the other side in messages."""
        self._socket = socket
        self._server = server
        self._credential = credential
        endpoint = f"inproc://handshakes-{secrets.token_hex(8)}"
        socket.monitor(endpoint, _CHANGES | _OUTCOMES)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=cast(Any, socket).context.underlying)
        self._events = context.socket(zmq.PAIR)  # never an asyncio one
        self._events.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop ZeroMQ's own thread
        self._events.connect(endpoint)
        self._broken = 0  # connections in a row
        self._broken_since = 0.0  # when the first of them broke, monotonic seconds
        self._us = (server, credential.public if credential is not None else "")
        self._proven = self._us in _PROVEN
        self._refusal = ""
        self.connection = 0  # the number of the one that stands, as of the last look; 0: none
        self.connected_fd = -1  # its file descriptor; -1: none
        self._connections = 0

    def fileno(self) -> int:
        """Becomes readable when `refusal` has something to look at. As for each ZeroMQ socket, only edges count."""
        return cast(int, self._events.getsockopt(zmq.FD))

    def refusal(self) -> str:
        """Why the other side refuses this client; '' when it does not. Never waits."""
        while self._events.poll(0):
            message = cast("dict[str, Any]", recv_monitor_message(self._events, zmq.NOBLOCK))
            self._note(int(message["event"]), int(message["value"]))
        return self._refusal

    def suspicion(self) -> str:
        """The reason that `refusal` would give if connections kept breaking; '' when none broke. Never waits."""
        return self.refusal() or (self._broken_off() if self._broken else "")

    def close(self) -> None:
        """Stop watching. Call it before the socket is closed."""
        self._socket.monitor(None, 0)
        self._events.close(linger=0)

    def _note(self, event: int, value: int) -> None:
        who = self._credential
        if event == zmq.EVENT_CONNECTED:
            self.connected_fd = value
        elif event == zmq.EVENT_DISCONNECTED:
            self.connection = 0
            self.connected_fd = -1  # another connection of this process may get the number
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connections += 1
            self.connection = self._connections
            self._refusal = ""
            self._broken = 0
            self._proven = True  # both sides know each other: later ones break for other reasons than keys
            _PROVEN.add(self._us)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            name = f"of {who.role} {who.name!r}" if who is not None else "of this client"
            why = f"the credential {name} is not in its list of allowed keys; `slipstream keys DIR` adds one"
            self._refusal = f"{self._server} refused this key: {why}"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # ZeroMQ does not try again after this
            self._refusal = self._mismatch(value)
        elif event == _FAILED and not self._proven:
            if not self._broken:
                self._broken_since = time.monotonic()
            self._broken += 1
            often = self._broken >= BROKEN_HANDSHAKES and time.monotonic() - self._broken_since >= BROKEN_S
            if often and who is not None:  # without a key only a forwarder's other side may be missing for a while
                self._refusal = self._broken_off()

    def _broken_off(self) -> str:
        """Why handshakes break; also a side with other keys, whose reset overtakes its greeting."""
        who = self._credential
        forwards = "or it only forwards connections to something that is down"
        if who is None:
            return f"{self._mismatch(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)}, {forwards}"
        other = f"another one than the credential of {who.role} {who.name!r} names (are both from one key folder?)"
        return f"{self._server} refused this key: it has no keys, or {other}, {forwards}"

    def _mismatch(self, value: int) -> str:
        if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return f"{self._server} does not speak the same protocol (ZMTP error {value:#x}); is it a broker?"
        if self._credential is None:
            hint = "set broker.credentials, or --credentials DIR"
            return f"{self._server} asks for a key and this client has none; {hint}"
        return f"{self._server} has no keys and this client wants proof; both sides need broker.credentials"
