"""The network interface of this machine that others reach it by: the one that routes to the broker, unless told."""

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from common.config.network_checks import is_loopback, split_address
from common.config.schema import Config
from common.errors import UsageError
from common.process.local_address import local_address

LOOPBACK = "127.0.0.1"
STORE_S = 30.0
NCCL = "NCCL_SOCKET_IFNAME"


class Interface(NamedTuple):
    name: str
    address: str

    def use(self, named: bool = False) -> None:
        """Keep the collectives of this process, and of those that it starts, on it.

        A value of NCCL_SOCKET_IFNAME that is set stays, unless learner.interface `named` this one.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = self.name
        self.use_for_nccl(named)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without a name

    def use_for_nccl(self, named: bool = False) -> None:
        """As `use`, for NCCL alone."""
        if named or not os.environ.get(NCCL):
            os.environ[NCCL] = f"={self.name}"  # without the sign it is a prefix: eth1 would be eth10, too

    def listen(self) -> Any:
        """A torch TCPStore where ranks of several machines meet, on a free port; raises OSError."""
        from learner.rendezvous import listen  # late: torch takes seconds, and a base installation has none

        return listen(self.address, STORE_S)


def interface_for(broker: str, names: str | None = None) -> Interface:
    """The first of `names` (with commas between them) that this machine has; None: the one that routes to `broker`.

    Raises UsageError when there is no such interface or no route.
    """
    host, port = split_address(broker.split(",")[0])
    if names is not None:
        found = named(names)
        if is_loopback(found.address) and not is_loopback(host):
            own = f"{found.name} of {socket.gethostname()} is its loopback interface"
            hint = "name one that the other machines reach"
            raise UsageError(f"learner.interface: {own}, and the broker at {broker} is not; {hint}")
        return found
    if not host:
        raise UsageError(f"broker.address: {broker} is on this machine only; several machines need tcp://HOST:PORT")
    return routed(host, port or 1)


def routed(host: str, port: int = 1) -> Interface:
    """The interface whose address packets to `host` carry; nothing is sent. Raises UsageError without a route."""
    try:
        address = local_address(host, port)
    except OSError as error:
        raise UsageError(f"broker.address: no route from {socket.gethostname()} to {host}: {error.strerror}") from None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return Interface(name, address)
    raise UsageError(f"learner.interface: no interface has {address}, the address that routes to {host}; name one")


def use_for_weights(config: Config, host: str) -> None:
    """Let weights over NCCL travel on the interface with the address `host`, or that routes there.

    With a trusted network a loopback `host` says nothing: the broker may be at the end of a tunnel.
    Left to itself NCCL takes any interface that is up, those named ib* first, and its sockets use all of them
    (ncclFindInterfaces in misc/socket.cc). Others may not reach those, and the trusted network may be another one.
    It reads the variable once, before the first group of the process.
    """
    says = host and not (is_loopback(host) and config.weights.network == "trusted")
    if config.weights.transport == "nccl" and says:
        with suppress(UsageError):  # without a route NCCL chooses
            routed(host).use_for_nccl()


def keep_gloo_here(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's gloo listen on the loopback interface, unless told otherwise; the weight plane names its own."""
    with suppress(UsageError):  # else gloo listens at the address that the host's name leads to
        environment.setdefault("GLOO_SOCKET_IFNAME", routed(LOOPBACK).name)


def named(names: str) -> Interface:
    """The first of these interfaces that has an address. Raises UsageError, which lists those of this machine."""
    there = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    for name in map(str.strip, names.split(",")):
        if found := [entry.address for kind in families for entry in there.get(name, []) if entry.family == kind]:
            return Interface(name, found[0].partition("%")[0])
    has = f"{socket.gethostname()} has {', '.join(there)}"
    raise UsageError(f"learner.interface: expected the name of an interface with an address, found {names!r}; {has}")
