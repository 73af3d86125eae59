"""Figures as Prometheus text over HTTP, and a role's health for the probes of Kubernetes: telemetry.health_port.

    GET /healthz   200 while the role's loop turns, 503 when it has been silent for too long
    GET /readyz    200 while the role also does its work: a node that starts, joins or drains does not
    GET /metrics   the role's figures as Prometheus text

The port only reads, so it has no authentication. There are at most MOST_CLIENTS connections, each for at most
REQUEST_S. The sink prometheus uses the same server and the same text.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from common.errors import UsageError

logger = logging.getLogger(__name__)

LATE_S = 30.0  # without a turn of the loop
MOST_CLIENTS = 16  # a further one displaces the oldest, so that slow clients cannot keep a probe out
REQUEST_S = 5.0  # for a whole request and its answer


class Series:
    """Series of figures, which `text` writes in Prometheus' text format."""

    def __init__(self, **labels: str) -> None:
        """`labels` are those of every series."""
        self._labels = labels
        self._lines: dict[str, list[str]] = {}  # by family

    def add(self, name: str, value: float, **labels: str) -> None:
        """A value of slipstream_NAME; a name that ends in _total is a counter's."""
        known = self._lines.setdefault(f"slipstream_{name}", [])
        words = ",".join(f'{key}="{escaped(word)}"' for key, word in (self._labels | labels).items())
        known.append(f"slipstream_{name}{f'{{{words}}}' if words else ''} {float(value)!r}\n")

    def text(self) -> str:
        """Families in the order of their first series, each with its type."""
        parts: list[str] = []
        for name, lines in self._lines.items():
            parts.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n")
            parts += lines
        return "".join(parts)


def escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class LifeSigns:
    """The newest sign of life of one role: its loop gives it, the thread of the endpoint reads it."""

    def __init__(self, late_s: float = LATE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._late_s = late_s
        self._clock = clock
        self._newest: tuple[str, bool, float, Mapping[str, float]] = ("starting", False, clock(), {})

    def show(self, state: str, ready: bool, figures: Mapping[str, float] | None = None) -> None:
        """Called in turns of the loop; while `state` is 'starting' the loop may be silent for long.

        `figures` have Prometheus names without 'slipstream_'.
        """
        self._newest = (state, ready, self._clock(), figures or {})

    def answer(self, path: str) -> tuple[int, str]:
        """HTTP status and text for a GET of `path`."""
        state, ready, at, figures = self._newest
        silent_s = self._clock() - at
        alive = state == "starting" or silent_s <= self._late_s
        if path == "/metrics":
            series = Series()
            for name, value in figures.items():
                series.add(name, value)
            return 200 if alive else 503, series.text()
        if path not in ("/healthz", "/readyz"):
            return 404, "expected /healthz, /readyz or /metrics\n"
        good = alive and (ready or path == "/healthz")
        body = {"state": state, "alive": alive, "ready": ready, "silent_s": round(silent_s, 1)}
        return 200 if good else 503, json.dumps(body) + "\n"


class TextServer(ThreadingTCPServer):
    """Binds on construction, for IPv6 and IPv4 where the machine has both; `serve_forever` answers requests."""

    allow_reuse_address = daemon_threads = True

    def __init__(
        self, host: str, port: int, answer: Callable[[str], tuple[int, str]], request_s: float | None = None
    ) -> None:
        """`host` is '' for every interface, or an IPv4 address. Port 0 picks a free one. `answer` gets the path of a
        GET and returns HTTP status and text. A request may take `request_s`, None for REQUEST_S. Raises OSError when
        `port` cannot be had.
        """
        self._request_s = request_s
        self.address_family = socket.AF_INET6 if not host and socket.has_dualstack_ipv6() else socket.AF_INET

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, text = answer(self.path)
                except Exception:
                    logger.exception("no answer to a GET of %s", self.path)
                    status = 500
                    text = "see the log\n"
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Probes would fill the log."""

        self._since: dict[socket.socket, float] = {}  # open connections, oldest first; monotonic seconds
        self._lock = threading.Lock()  # for them: each is closed by its own thread
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._since[request] = time.monotonic()
            if len(self._since) > MOST_CLIENTS:
                self._cut(next(iter(self._since)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called by `serve_forever` several times a second."""
        limit_s = REQUEST_S if self._request_s is None else self._request_s
        with self._lock:
            for client in [client for client, at in self._since.items() if time.monotonic() - at > limit_s]:
                self._cut(client)

    def shutdown_request(self, request: Any) -> None:
        """Called by the thread of a connection at its end."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def _cut(self, client: socket.socket) -> None:
        """Shut its socket down, so that its thread ends."""
        del self._since[client]
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves half-way is no event."""


@contextmanager
def serving(server: TextServer, name: str) -> Generator[None]:
    """While active, a thread called `name` answers the server's requests."""
    with server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name=name, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


@contextmanager
def serving_health(port: int, signs: LifeSigns, credentials: str | None) -> Generator[None]:
    """While active, `signs` are served at `port`; 0: nowhere. Raises UsageError.

    A job without `credentials` keeps to the loopback interface, and one with them serves every interface.
    """
    if port == 0:
        yield
        return
    try:
        server = TextServer("" if credentials else "127.0.0.1", port, signs.answer)
    except OSError as error:
        hint = "roles on one machine need different ports: telemetry.health_port=PORT after the command"
        raise UsageError(f"telemetry.health_port: cannot listen on port {port}: {error.strerror}; {hint}") from None
    with serving(server, "health"):
        yield
