"""Where a broker may listen, and the address that others connect to."""

import socket
from collections.abc import Sequence

from common.config.network_checks import is_loopback, is_wildcard, split_address
from common.errors import UsageError

ELSEWHERE = ("192.0.2.1", 9)  # documentation's own network: asking the routing table about it sends nothing


def check_address(address: str, authenticated: bool) -> None:
    """Raise UsageError unless `address` is an ipc path or a tcp address that may be listened on.

    Beyond loopback only where clients are authenticated.
    """
    try:
        host, _ = split_address(address)
    except ValueError as error:
        raise UsageError(f"broker.address: {error}, found {address!r}") from None
    if host and not authenticated and not is_loopback(host):
        raise UsageError(
            f"broker.address: {address} reaches beyond this machine, and connections are not authenticated. "
            "Make keys with `slipstream keys DIR` and set broker.credentials to DIR, or use a loopback address "
            "such as tcp://127.0.0.1:0"
        )


def candidates(addresses: Sequence[str], former: str) -> list[str]:
    """Addresses to listen on, in order; for port 0 first the port of the last time, which clients know."""
    port = former.rpartition(":")[2]
    found: list[str] = []
    for address in addresses:
        if address.endswith(":0") and port.isdigit():
            found.append(address.removesuffix("0") + port)
        found.append(address)
    return found


def bindable(address: str) -> str:
    """The same address with an IP in place of a host name, which ZeroMQ does not look up when it binds.

    Raises:
        UsageError: nothing is known under the name.
    """
    host, port = split_address(address)
    if not host or is_wildcard(host):
        return address
    try:
        family, _, _, _, where = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"broker.address: {address}: no address is known for {host!r}: {error}") from None
    ip = str(where[0])
    return f"tcp://[{ip}]:{port}" if family == socket.AF_INET6 else f"tcp://{ip}:{port}"


def reachable(endpoint: str) -> str:
    """The address that others connect to. For one bound to every interface, it has this machine's outgoing IP.

    Other machines may not know this one's name, so an IP is used. With several networks it may belong to the wrong one:
    then broker.address should name the right interface instead.
    """
    host, port = split_address(endpoint)
    if not is_wildcard(host):
        return endpoint
    ip = _outward_ip(socket.AF_INET, ELSEWHERE) or _own_name_ip() or "127.0.0.1"
    return f"tcp://{ip}:{port}"


def _outward_ip(family: socket.AddressFamily, to: tuple[str, int]) -> str | None:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(to)
        except OSError:
            return None
        ip = str(probe.getsockname()[0])
    return None if is_loopback(ip) else ip


def _own_name_ip() -> str | None:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    return next((str(where[0]) for *_, where in found if not is_loopback(str(where[0]))), None)
