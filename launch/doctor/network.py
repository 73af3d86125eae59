"""Doctor: addresses that must be free, and servers that must answer."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.config.checks import is_wildcard, split_address
from common.config.schema import Config
from common.errors import SlipstreamError
from common.redis_address import parse_redis, with_run
from launch.doctor.findings import Finding, fine, problem, warning

CONNECT_S = 5.0
CLOCKS_APART_S = 5.0


def check_network(config: Config, running: bool) -> Iterator[Finding]:
    """`running`: whether the broker of this config's run answers, so that its own port is not free."""
    yield from check_interface(config.weights.address)
    if config.broker.backend == "redis":
        yield from check_redis(config)
    elif not running:
        yield from check_port(config.broker.address)


def check_interface(host: str) -> Iterator[Finding]:
    """The weight plane can listen there."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        why = "the learner's weight plane listens there, on a port that it picks"
        mend = "an address that `ip address` shows on the learner's machine"
        yield problem("weights.address", f"{host}: {error.strerror or error}", why, mend)


def check_port(address: str) -> Iterator[Finding]:
    """The embedded broker's address is free."""
    try:
        host, port = split_address(address)
    except ValueError:
        return  # said by the config's checks
    if port is None:
        yield from _socket_file(Path(address.partition("://")[2]))
        return
    if port == 0:
        yield fine("port", "picked by the broker when it starts")
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("" if is_wildcard(host) else host, port))
    except OSError as error:
        holder = holder_of(port)
        what = f"{address}: {error.strerror or error}" + (f", by process {holder}" if holder else "")
        why = "the broker listens there"
        yield problem("port", what, why, "end that process, or another port in broker.address (0: a free one)")
    else:
        yield fine("port", f"{address} is free")


def _socket_file(path: Path) -> Iterator[Finding]:
    if not path.parent.is_dir():
        why = "the broker makes its socket file there"
        yield problem("port", f"{path.parent} is no folder", why, f"mkdir -p {path.parent}")


def holder_of(port: int) -> str:
    """'1234 (python)' for the process that listens on a port; '' when that is not visible."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                pid = connection.pid
                return f"{pid} ({psutil.Process(pid).name()})" if pid else ""
    except psutil.Error:
        return ""
    return ""


def check_redis(config: Config) -> Iterator[Finding]:
    """Redis answers, in a version and with settings that keep what it acknowledges, and its clock is like ours."""
    mend = "docs/redis.md"
    try:
        name = with_run(config.broker.address, config.run.name)
        parse_redis(name)
    except ValueError:
        return  # said by the config's checks
    doubts: list[str] = []
    try:
        apart_s = _ask_redis(name, config, doubts)
    except SlipstreamError as error:
        yield problem("redis", str(error), "the delivery's state lies there", mend)
    else:
        for line in doubts:
            yield warning("redis", line, "settings that cannot be read are not checked", mend)
        if abs(apart_s) > CLOCKS_APART_S:
            why = "leases follow the server's clock and hold; the ages in `status` are off"
            yield warning("redis", f"its clock is {apart_s:+.0f} s from this machine's", why, "chrony on both")
        yield fine("redis", f"{config.broker.address} answers, and keeps what it acknowledges")


def _ask_redis(name: str, config: Config, doubts: list[str]) -> float:
    """Check the server, adding what cannot be seen to `doubts`; returns how far its clock is ahead of ours, in s."""
    from broker.redis.checks import check_server
    from broker.redis.endpoint import endpoint
    from broker.redis.link import Link

    link = Link(endpoint(name, "broker", config.broker.credentials), "broker", CONNECT_S)
    try:
        end = time.monotonic() + CONNECT_S
        check_server(link, config.broker.durability, end, doubts.append)
        seconds, micros = link.run(lambda repeated, whole: [("TIME",)], end)[0]
        return int(seconds) + int(micros) / 1e6 - time.time()
    finally:
        link.close()
