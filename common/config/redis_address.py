"""Addresses of a Redis server: redis://HOST:PORT/DB, rediss:// (TLS), unix:///PATH.

They are parsed without redis-py, so that configs are checked where it is not installed. None has a password.
"""

from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

SCHEMES = ("redis://", "rediss://", "unix://")
FORMS = "redis://HOST:PORT[/DB], rediss://HOST:PORT[/DB] (TLS) or unix:///PATH[?db=DB]"
DEFAULT_PORT = 6379


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed address: `host` and `port` of a server over TCP, or `path` of a socket file."""

    scheme: Literal["redis", "rediss", "unix"]
    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0


def is_redis(address: str) -> bool:
    """Whether the address has one of the Redis schemes."""
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
