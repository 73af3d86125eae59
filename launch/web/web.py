"""slipstream web RUN [RUN ...]: a page that shows runs while they are trained. It only reads."""

import argparse
import errno
import ipaddress
import logging
import signal
import socket
from pathlib import Path

import uvicorn

from common.errors import UsageError
from launch.web.app import make_app
from launch.web.files import run_of
from launch.web.guard import LOOPBACK
from launch.web.run_view import RunView

PORT = 8642
TRIED = 100  # ports beyond one that is in use
SHORTEST = 16  # characters of a token


def command(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="slipstream web: %(message)s")
    token = read_token(Path(args.token_file)) if args.token_file else None
    if token is None and not is_loopback(args.host):
        raise UsageError(f"--host {args.host}: beyond this machine the page needs --token-file FILE; docs/web.md")
    runs = [run_of(word) for word in args.runs]
    listener = listen(args.host, args.port)
    port = listener.getsockname()[1]
    shown = f"[{args.host}]" if ":" in args.host else args.host
    print(f"the page is at http://{shown}:{port}/{'?token=TOKEN' if token else ''}", flush=True)
    for run in runs:
        if not run.path.is_dir():
            print(f"{run.path} does not exist yet; the page waits for it", flush=True)
    app = make_app([RunView(run) for run in runs], token)
    options = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, ws="none"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has shut down
    uvicorn.Server(options).run(sockets=[listener])
    return 0


def read_token(file: Path) -> str:
    """The token in a file; raises UsageError when it is of no use."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file: {file} cannot be read: {error}") from None
    if len(token) < SHORTEST or not token.isascii() or len(token.split()) != 1:
        raise UsageError(f"--token-file: {file}: expected at least {SHORTEST} ASCII characters without a space")
    if (mode := file.stat().st_mode & 0o777) & 0o077:
        raise UsageError(f"--token-file: {file} can be read by others than its owner (mode {mode:o}); chmod 600 it")
    return token


def is_loopback(host: str) -> bool:
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises UsageError, which names the next free port, when the port is in use."""
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port: expected 0 to 65535, found {port}")
    try:
        return _bound(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"--host {host} --port {port}: cannot listen there: {error}") from None
    if free := free_port(host, port + 1):
        raise UsageError(f"--port {port} is in use; the next free one is {free}")
    raise UsageError(f"--port {port} is in use, and so are the next {TRIED}; --port 0 takes any")


def free_port(host: str, first: int) -> int:
    """The first free port from `first` on; 0 when none of TRIED is."""
    for port in range(first, min(first + TRIED, 1 << 16)):
        try:
            _bound(host, port).close()
            return port
        except OSError:
            continue
    return 0


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener
