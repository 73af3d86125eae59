"""Where a broker may listen, the address that others connect to, and every socket option of ZeroMQ."""

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import zmq

from common.config.network_checks import is_loopback, is_wildcard, split_address
from common.errors import UsageError
from common.process.local_address import bracketed, local_address, needs_ipv6
from common.security.credentials import KEY, MAKE, Credential
from common.security.curve import HANDSHAKE_MS, CurveGate, Handshakes, secure_client

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

COPY_BYTES = 256 << 10  # up to here copying a frame costs less than telling pyzmq's own thread when it was sent
HEADER_BYTES_FLOOR = 1 << 20  # a header may always be this large
PING_S = 10  # before an idle connection is tested
SILENT_S = 20  # without an answer until it is closed
PROBES = 4  # the kernel sends so many in that time
_ACKED_AT = 120  # tcpi_bytes_acked in Linux's struct tcp_info
_RECEIVED_AT = 128  # tcpi_bytes_received there


def bind_router(
    context: Context,
    addresses: Sequence[str],
    max_frame_bytes: int,
    curve: CurveGate | None = None,
    claim: Callable[[str], None] = lambda address: None,
    wait_s: float = 0.0,
) -> Socket:
    """A ROUTER socket bound to the first of `addresses` that can be had; its real address is in LAST_ENDPOINT.

    Raises UsageError when each is not allowed (beyond loopback without `curve`), in use or cannot be bound; they are
    tried again for `wait_s`. `claim` raises it too, called with an address that was bound, when it is another process's
    all the same.
    """
    end = time.monotonic() + wait_s
    while True:
        refused: list[str] = []
        for address in addresses:
            try:
                router = _bound(context, address, max_frame_bytes, curve, claim)
            except UsageError as error:
                refused.append(str(error))
                continue
            if refused and address.endswith(":0"):
                logger.warning("%s; taking another port, which running nodes and learners do not know", refused[-1])
            return router
        if time.monotonic() >= end:
            raise UsageError("; ".join(refused))
        time.sleep(0.05)


def _bound(
    context: Context, address: str, max_frame_bytes: int, curve: CurveGate | None, claim: Callable[[str], None]
) -> Socket:
    where = bindable(address, curve is not None)
    if address.startswith("ipc://") and _ipc_in_use(address.removeprefix("ipc://")):
        raise _in_use(address)  # ZeroMQ itself would take a living broker's path over
    router = _router(context, max_frame_bytes, curve)
    try:
        router.setsockopt(zmq.IPV6, int("[" in where))
        router.bind(where)
        claim(address)
    except BaseException as error:  # a socket that stays open would keep its context from ending
        router.close()
        if not isinstance(error, zmq.ZMQError):
            raise
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise _in_use(address) from error
        raise UsageError(f"broker.address: cannot listen on {address}: {error}") from error
    return router


def _router(context: Context, max_frame_bytes: int, curve: CurveGate | None) -> Socket:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to a client that is gone raises
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its identity
    router.setsockopt(zmq.RCVHWM, 64)  # per client: what a slow broker does not read waits at the sender
    router.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    _notice_vanished_peers(router)
    if curve is not None:
        curve.secure(router)
    return router


def _notice_vanished_peers(socket: Socket) -> None:
    """The kernel looks for them. ZeroMQ's own heartbeat would cut a link that one large frame keeps busy for long.

    It would also search all of a broker's timers at each sign of life of every connection.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PING_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, SILENT_S // PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * SILENT_S)


def connect_dealer(
    context: Context, address: str, identity: bytes, max_frame_bytes: int, credential: Credential | None = None
) -> tuple[Socket, Handshakes]:
    """A DEALER socket to the broker that queues nothing while there is no connection, and how connecting goes."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, identity)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.copy_threshold = COPY_BYTES
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    dealer.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    dealer.setsockopt(zmq.IPV6, int(needs_ipv6(address)))
    _notice_vanished_peers(dealer)
    if credential is not None:
        try:
            secure_client(dealer, credential, credential.server_public)
        except zmq.ZMQError as error:
            dealer.close()
            damaged = f"the credential {credential.name!r} has a damaged key: expected Z85 text of 32 bytes ({error})"
            raise UsageError(f"{KEY}: {damaged}; {MAKE}") from error
    handshakes = Handshakes(dealer, f"the broker at {address}", credential)
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        handshakes.close()
        dealer.close()
        raise UsageError(f"broker address {address!r} cannot be used: {error}") from error
    return dealer, handshakes


def frame_limit(max_message_bytes: int) -> int:
    """Bytes above which ZeroMQ cuts the connection; up to there, the sender is told what was wrong."""
    return 2 * max(max_message_bytes, HEADER_BYTES_FLOOR)


def tcp_bytes(fd: int) -> tuple[int, int]:
    """(received, acknowledged) bytes of a TCP connection so far; zeros for other file descriptors."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0, 0
    if len(info) < _RECEIVED_AT + 8:
        return 0, 0
    return struct.unpack_from("=Q", info, _RECEIVED_AT)[0], struct.unpack_from("=Q", info, _ACKED_AT)[0]


def _ipc_in_use(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect("\0" + path[1:] if path.startswith("@") else path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            raise UsageError(f"broker.address: cannot listen on ipc://{path}: {error}") from error
    return True


def _in_use(address: str) -> UsageError:
    return UsageError(
        f"broker.address: {address} is in use; stop the process that listens there (another broker, or a preflight?), "
        "or choose another address, for example tcp://127.0.0.1:0 for a free port"
    )


# Documentation's own networks: asking the routing table about them sends nothing.
ELSEWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}


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
    families = (socket.AF_INET, socket.AF_INET6)[: 2 if ":" in host else 1]
    own = (ip for family in families for ip in _own_ips(family) if not is_loopback(ip))
    return f"tcp://{bracketed(next(own, '127.0.0.1'))}:{port}"


def _own_ips(family: socket.AddressFamily) -> Iterator[str]:
    """The IP of the interface that leads elsewhere, then those known under this machine's name."""
    with contextlib.suppress(OSError):
        yield local_address(*ELSEWHERE[family])
    with contextlib.suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM):
            if not str(where[0]).startswith("fe80:"):  # known on its own link only
                yield str(where[0])
