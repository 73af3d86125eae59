"""slipstream web RUN [RUN ...]: a page that shows runs while they are trained. It only reads."""

import argparse
import errno
import logging
import signal
import socket
from pathlib import Path

import uvicorn

from common.errors import UsageError
from launch.resolve_target import find_run
from launch.web.app import LOOPBACK, make_app
from launch.web.run_view import RunView

SHORTEST = 16  # characters of a token
PORT = 8642


def command(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="slipstream web: %(message)s")
    token = read_token(Path(args.token_file)) if args.token_file else None
    if token is None and args.host not in LOOPBACK:
        raise UsageError(f"--host {args.host}: beyond this machine the page needs --token-file FILE; docs/web.md")
    for word in args.runs:
        if "://" in word:
            raise UsageError(f"{word}: the page reads the files of a run; give the run's folder, not an address")
    app = make_app([RunView(find_run(word)) for word in args.runs], token)
    listener = listen(args.host, args.port)
    shown = f"[{args.host}]" if ":" in args.host else args.host
    print(f"the page is at http://{shown}:{listener.getsockname()[1]}/{'?token=TOKEN' if token else ''}", flush=True)
    options = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, ws="none"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has shut down
    uvicorn.Server(options).run(sockets=[listener])
    return 0


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket; None stands for PORT, or any port if that is taken. Raises UsageError."""
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"--port: expected 0 to 65535, found {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, PORT if port is None else port), family=family)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return listen(host, 0)
        where = f"--host {host} --port {PORT if port is None else port}"
        raise UsageError(f"{where}: cannot listen there: {error}; --port 0 takes any free port") from None


def read_token(file: Path) -> str:
    """The token in a file; raises UsageError when it is of no use."""
    try:
        token, mode = file.read_text().strip(), file.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file: {file} cannot be read: {error}") from None
    if len(token) < SHORTEST or not token.isascii() or len(token.split()) != 1:
        raise UsageError(f"--token-file: {file}: expected at least {SHORTEST} ASCII characters without a space")
    if mode & 0o077:
        raise UsageError(f"--token-file: {file} can be read by others than its owner (mode {mode:o}); chmod 600 it")
    return token
