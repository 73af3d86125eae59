"""The address of this machine that another one is reached from."""

import socket


def local_address(host: str, port: int) -> str:
    """The address of this machine that reaches `host`, the one to listen on. Sends nothing; raises OSError."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(target)
        return str(connection.getsockname()[0])
