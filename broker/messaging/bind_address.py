"""Where a broker may listen, and the address that others connect to."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

from common.config.network_checks import is_loopback, is_wildcard, split_address
from common.errors import UsageError
from common.process.local_address import bracketed, local_address

ELSEWHERE = ("192.0.2.1", 9)  # documentation's own network: asking the routing table about it sends nothing


def bindable(address: str, authenticated: bool) -> str:
    """The same address with an IP in place of a host name, which ZeroMQ does not look up when it binds.

    Raises UsageError when it is no address or no known name; also beyond loopback unless clients are `authenticated`.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise UsageError(f"broker.address: {error}, found {address!r}") from None
    if host and not authenticated and not is_loopback(host):
        why = f"{address} reaches beyond this machine, and connections are not authenticated"
        keys = "Make keys with `slipstream keys DIR` and set broker.credentials to DIR"
        raise UsageError(f"broker.address: {why}. {keys}, or use a loopback address such as tcp://127.0.0.1:0")
    if not host or is_wildcard(host):
        return address
    try:
        *_, where = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"broker.address: {address}: no address is known for {host!r}: {error}") from None
    return f"tcp://{bracketed(str(where[0]))}:{port}"


def candidates(addresses: Sequence[str], former: str) -> list[str]:
    """Addresses to listen on, in order; for port 0 first the port of the last time, which clients know."""
    port = former.rpartition(":")[2]
    found: list[str] = []
    for address in addresses:
        if address.endswith(":0") and port.isdigit():
            found.append(address.removesuffix("0") + port)
        found.append(address)
    return found


def reachable(endpoint: str) -> str:
    """The address that others connect to. For one bound to every interface, it has this machine's outgoing IP.

    With several networks that may belong to the wrong one: then broker.address should name the right interface.
    """
    host, port = split_address(endpoint)
    if not is_wildcard(host):
        return endpoint
    return f"tcp://{next((ip for ip in _own_ips() if not is_loopback(ip)), '127.0.0.1')}:{port}"


def _own_ips() -> Iterator[str]:
    """The IP of the interface that leads elsewhere, then those known under this machine's name."""
    with contextlib.suppress(OSError):
        yield local_address(*ELSEWHERE)
    with contextlib.suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            yield str(where[0])
