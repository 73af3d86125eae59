"""Checks of the addresses where broker and weights are reached, and of the broker's other keys."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from common.config.schema import BaseConfig, BrokerAddress, Config
from common.errors import Problem
from common.security.credentials import check_credentials, curve_credentials

LEASE_HEARTBEATS = 3
SCHEMES = ("redis://", "rediss://", "unix://")
FORMS = "redis://HOST:PORT[/DB], rediss://HOST:PORT[/DB] (TLS) or unix:///PATH[?db=DB]"
DEFAULT_PORT = 6379
COLLECTIVES_ARE_OPEN = (
    "gloo and nccl have no authentication: set weights.transport: relay, "
    "or weights.network: trusted on a private network"
)


def split_address(address: str) -> tuple[str, int | None]:
    """(host, port) of 'tcp://HOST:PORT', ('', None) of 'ipc://PATH'; raises ValueError saying what was expected."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and parts.netloc + parts.path:
        return "", None
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path or parts.query:
        raise ValueError("expected tcp://HOST:PORT or ipc://PATH")
    return parts.hostname, port


def is_wildcard(host: str) -> bool:
    """Whether a host to listen on means every interface, so that clients cannot connect to it by that name."""
    return host in ("0.0.0.0", "::", "*")


def fixed_address(config: BaseConfig) -> str | None:
    """broker.address when it says where to connect to, with commas in a list; None when only RUN/broker.json does.

    The broker writes that file: a port that it picked, or this machine's address when it listens everywhere.
    """
    for address in config.broker.addresses:
        host, port = split_address(address)
        if port == 0 or is_wildcard(host):
            return None
    return ",".join(config.broker.addresses)


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis server's address: `host` and `port` over TCP, or `path` of a socket file. None has a password."""

    scheme: Literal["redis", "rediss", "unix"]
    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0


def is_redis(address: str) -> bool:
    return address.startswith(SCHEMES)


def parse_redis(address: str) -> RedisAddress:
    """Raises ValueError, saying what was expected, when `address` is none."""
    parts = urlsplit(address)
    try:
        port = parts.port
        query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError:
        raise ValueError(f"expected {FORMS}") from None
    if parts.username is not None or parts.password is not None or "password" in query:
        raise ValueError(f"expected {FORMS} without user or password: those are read from broker.credentials")
    if parts.scheme == "unix":
        db = query.pop("db", ["0"])[-1]
        if not query and not parts.netloc and len(parts.path) > 1 and db.isdigit() and not parts.fragment:
            return RedisAddress(scheme="unix", path=unquote(parts.path), db=int(db))
        raise ValueError(f"expected {FORMS}")
    db = parts.path.strip("/") or "0"
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or not db.isdigit() or query or parts.fragment:
        raise ValueError(f"expected {FORMS}")
    scheme = "redis" if parts.scheme == "redis" else "rediss"
    return RedisAddress(scheme=scheme, host=parts.hostname, port=port or DEFAULT_PORT, db=int(db))


def broker_problems(config: Config) -> Iterator[Problem]:
    broker = config.broker
    yield from address_problems(broker)
    yield from _broker_store(config)
    if broker.lease_s < LEASE_HEARTBEATS * broker.heartbeat_s:
        expected = f"at least {LEASE_HEARTBEATS} x broker.heartbeat_s ({broker.heartbeat_s})"
        yield Problem("broker.lease_s", expected, hint="a living node must not lose its leases")
    longest = broker.lease_s + config.rollout.sample_timeout_s
    if broker.max_lease_s < longest:
        expected = f"at least broker.lease_s + rollout.sample_timeout_s ({longest:g})"
        yield Problem("broker.max_lease_s", expected, hint="an episode that may continue keeps its lease")
    if broker.max_bytes is not None and broker.max_message_bytes > broker.max_bytes:
        yield Problem("broker.max_message_bytes", f"at most broker.max_bytes ({broker.max_bytes})")


def buffers_problems(config: Config) -> Iterator[Problem]:
    """Whether the learner can send what it keeps in device memory; nodes may have another transport."""
    weights = config.weights
    if weights.buffers == "device" and (weights.transport != "nccl" or weights.encoding != "full"):
        hint = "deltas and merged weights are made by the processor, and only nccl sends from device memory"
        yield Problem("weights.buffers", "host, or transport: nccl with encoding: full", hint=hint)


def weights_address_problems(config: Config) -> Iterator[Problem]:
    """Whether weights leave this machine only authenticated, or on a network that the config trusts."""
    weights = config.weights
    loopback = is_loopback(config.weights.address)
    several = config.learner.machines > 1
    if loopback and not several:
        return
    trusted = weights.network == "trusted"
    keys = curve_credentials(config.broker.credentials) is not None
    if keys and (trusted or weights.transport == "relay"):
        if is_wildcard(weights.address):
            hint = "nodes are told this address"
            yield Problem("weights.address", "an address of this machine that the nodes reach", hint=hint)
        return
    hint = "a learner of several machines sends its weights over the network; " if several else ""
    if trusted:
        why = "the control socket needs keys on a trusted network, too: only the data of gloo and nccl is in the clear"
        yield Problem("broker.credentials", "a folder of `slipstream keys DIR`", hint=hint + why, kind="missing")
        return
    hint += f"{COLLECTIVES_ARE_OPEN}; the keys of `slipstream keys DIR` are needed for both as broker.credentials"
    if loopback:
        yield Problem("weights.transport", "relay, with a key folder as broker.credentials", hint=hint)
    else:
        yield Problem("weights.address", "a loopback address such as 127.0.0.1", hint=hint)


def address_problems(broker: BrokerAddress) -> Iterator[Problem]:
    """Every entry of broker.address, and whether connections to it are authenticated; the credentials."""
    addresses = broker.addresses
    if not addresses:
        yield Problem("broker.address", "at least one address tcp://HOST:PORT", "an empty list")
    for address in addresses:
        try:
            host, port = split_address(address)
        except ValueError as error:
            hint = "port 0 picks a free one"
            if is_redis(address):
                hint = "clients always connect to the broker: set broker.store: redis and put this into broker.redis"
            yield Problem("broker.address", str(error).removeprefix("expected "), repr(address), hint)
            continue
        if len(addresses) > 1 and (port in (None, 0) or is_wildcard(host) or addresses.count(address) > 1):
            expected = "different entries tcp://HOST:PORT that name a host and a port"
            hint = "clients look for the leading broker at each of them"
            yield Problem("broker.address", expected, repr(address), hint)
        if broker.credentials is None and host and not is_loopback(host):
            expected = "a loopback address such as tcp://127.0.0.1:5555 while broker.credentials is not set"
            hint = "other interfaces need authentication: `slipstream keys DIR` makes keys for broker.credentials"
            yield Problem("broker.address", expected, repr(address), hint)
    if len(addresses) > 1 and not broker.reaches_standbys:
        hint = "a standby broker needs a store that it can reach"
        yield Problem("broker.address", "one address with broker.store: file", repr(list(addresses)), hint)
    if broker.credentials is not None and (wrong := check_credentials(broker.credentials)) is not None:
        expected = "the folder of `slipstream keys DIR`, or a file of it"
        kind = "value" if Path(broker.credentials).exists() else "missing"
        yield Problem("broker.credentials", expected, wrong, kind=kind)


def _broker_store(config: Config) -> Iterator[Problem]:
    """broker.redis fits broker.store, and the connection is safe."""
    broker = config.broker
    if broker.store == "file":
        if broker.redis is not None:
            yield Problem("broker.redis", "no address while broker.store is file", hint="set broker.store: redis")
        return
    if broker.durability == "memory":
        yield Problem("broker.durability", "fsync or everysec with broker.store: redis")
    try:
        at = parse_redis(broker.redis or "")
    except ValueError as error:
        hint = "broker.store: redis needs the server's address; docs/redis.md"
        yield Problem("broker.redis", str(error).removeprefix("expected "), hint=hint)
        return
    if at.host and not is_loopback(at.host):
        if at.scheme != "rediss":
            hint = "the password and rollouts would cross the network in plain text"
            yield Problem("broker.redis", "rediss://HOST:PORT/DB (TLS) beyond this machine", hint=hint)
        if broker.credentials is None:
            hint = "docs/redis.md says which password and certificates broker.credentials contains"
            yield Problem("broker.redis", "a loopback address while broker.credentials is not set", hint=hint)
