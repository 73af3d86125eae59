"""Addresses of hosts, the one of this machine that reaches another, and this machine itself."""

import os
import socket
from contextlib import suppress

from common.process.lifecycle import boot_id


def local_address(host: str, port: int) -> str:
    """The address of this machine that reaches `host`, the one to listen on. Sends nothing; raises OSError."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(target)
        return str(connection.getsockname()[0])


def needs_ipv6(address: str) -> bool:
    """Whether 'tcp://HOST:PORT' is an IPv6 address or the name of a host that has no other. It looks the name up.

    ZeroMQ looks for an address of one family only, and for none of IPv4 once its option IPV6 is set.
    """
    if "[" in address or not address.startswith("tcp://"):
        return "[" in address
    host, _ = host_and_port(address)
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError):  # a label may be empty, or too long
            socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
            return family == socket.AF_INET6
    return False


def host_and_port(address: str) -> tuple[str, int]:
    """(host, port) of 'HOST:PORT', also behind 'tcp://'; an IPv6 host loses its brackets. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def bracketed(host: str) -> str:
    """`host` as it stands before ':PORT': an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def this_machine() -> str:
    """An id of this host and its network namespace: processes with the same one reach each other without a link."""
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()
