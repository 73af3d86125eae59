"""Doctor: addresses that must be free, and servers that must answer."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from common.config.network_checks import split_address
from common.config.schema import Config
from common.errors import SlipstreamError
from launch.doctor.findings import Finding, fine, judged, problem, warning


def check_network(config: Config, running: bool) -> Iterator[Finding]:
    """`running`: whether the broker of this config's run answers, so that its own port is not free."""
    host = config.weights.address
    if reason := bind_error(host, 0):
        why = "the learner's weight plane listens there, on a port that it picks"
        fix = "an address that `ip address` shows on the learner's machine"
        yield problem("weights.address", f"{host}: {reason}", why, fix)
    if config.broker.store == "redis":
        yield from check_redis(config)
    if not running and len(config.broker.addresses) == 1:
        yield from check_port(config.broker.addresses[0])


def check_port(address: str) -> Iterator[Finding]:
    """The embedded broker's address is free."""
    try:
        host, port = split_address(address)
    except ValueError:
        return  # said by the config's checks
    if port is None:
        folder = Path(address.partition("://")[2]).parent
        if not folder.is_dir():
            why = "the broker makes its socket file there"
            yield problem("port", f"{folder} is no folder", why, f"mkdir -p {folder}")
    elif port == 0:
        yield fine("port", "picked by the broker when it starts")
    else:
        reason = bind_error("" if host == "*" else host, port)
        what = f"{address}: {reason}" if reason else f"{address} is free"
        with suppress(psutil.Error):
            for found in psutil.net_connections("tcp") if reason else ():
                if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                    what += f", by process {found.pid} ({psutil.Process(found.pid).name()})"
        fix = "end that process, or another port in broker.address (0: a free one)"
        yield judged("port", what, (bool(reason), "problem", "the broker listens there", fix))


def bind_error(host: str, port: int) -> str:
    """Why no socket can listen there; '' when one can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_redis(config: Config) -> Iterator[Finding]:
    """Redis answers, in a version and with settings that keep what it acknowledges."""
    from broker.journal.redis_server import check_server, open_client
    from broker.journal.store import StoreUnavailable

    address, doubts, fix = str(config.broker.redis), list[str](), "docs/redis.md"
    try:
        with open_client(address, config.broker.credentials) as client:
            check_server(client, address, config.broker.durability, doubts.append)
    except (SlipstreamError, StoreUnavailable) as error:
        yield problem("redis", str(error), "the broker's store lies there", fix)
    else:
        for line in doubts:
            yield warning("redis", line, "settings that cannot be read are not checked", fix)
        yield fine("redis", f"{address} answers, and keeps what it acknowledges")
