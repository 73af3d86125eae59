"""Where Redis is and who one is to it: from an address and a credentials folder to connections of redis-py.

The only module that imports redis-py, and only once a connection is made: the base install does without it.

The folder (broker.credentials, also the one of `slipstream keys`) holds per role ROLE.user (the ACL user; absent: named
like the role) and ROLE.password; for TLS ca.crt, and where the server asks for them client.crt and client.key. Roles:
learner, node, observer, and broker for the keeper. An observer makes do with any of them.
"""

import importlib
from pathlib import Path
from typing import Any

import msgspec

from common.config.checks import is_loopback
from common.errors import UsageError
from common.redis_address import RedisAddress, parse_redis

CONNECT_TIMEOUT_S = 5.0


class Endpoint(msgspec.Struct, frozen=True):
    """A server, and the means to be let in. `connect_timeout_s` also bounds the greeting."""

    address: RedisAddress
    user: str | None = None
    password: str | None = None
    tls: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Endpoint({self.name})"  # without the password: it may end in a log

    @property
    def name(self) -> str:
        """The address as people write it."""
        at = self.address
        return f"unix://{at.path}" if at.scheme == "unix" else f"{at.scheme}://{at.host}:{at.port}/{at.db}"

    def connection(self, timeout_s: float) -> Any:
        """A redis.connection.Connection, not connected yet, whose reads and writes give up after `timeout_s`."""
        return self._make(redis_module("redis.connection"), timeout_s)

    def async_connection(self) -> Any:
        """A redis.asyncio.connection.Connection; its calls have no time limit of their own."""
        return self._make(redis_module("redis.asyncio.connection"), None)

    def _make(self, module: Any, timeout_s: float | None) -> Any:
        at = self.address
        options: dict[str, Any] = {
            "db": at.db,
            "username": self.user,
            "password": self.password,
            "protocol": 2,
            "driver_info": None,  # no CLIENT SETINFO: one permission less to grant
            "socket_timeout": timeout_s,
            "socket_connect_timeout": CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s),
        }
        if at.scheme == "unix":
            return module.UnixDomainSocketConnection(path=at.path, **options)
        options |= {"host": at.host, "port": at.port, "socket_keepalive": True}
        if at.scheme == "redis":
            return module.Connection(**options)
        return module.SSLConnection(**options, **self.tls, ssl_cert_reqs="required", ssl_check_hostname=True)


def redis_module(name: str) -> Any:
    """redis-py's module `name`; raises UsageError when it, or a package that it needs, is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or "redis"
        found = "which is" if missing.partition(".")[0] == "redis" else f"and that {missing}, which is"
        raise UsageError(
            f"broker.backend: redis needs redis-py, {found} not installed here; pip install 'slipstream-rl[redis]'"
        ) from error


def endpoint(address: str, role: str, credentials: str | None) -> Endpoint:
    """What a process in `role` connects to.

    Raises:
        UsageError: the address is none, credentials are missing or unreadable, or the address reaches beyond this
            machine without both a password and TLS.
    """
    try:
        at = parse_redis(address)
    except ValueError as error:
        raise UsageError(f"broker address: {error}, found {address!r}") from None
    folder = _folder(credentials)
    roles = (role, "learner", "node") if role == "observer" else (role,)
    role = next((r for r in roles if folder is not None and (folder / f"{r}.password").exists()), role)
    password = _secret(folder, f"{role}.password")
    user = (_secret(folder, f"{role}.user") or role) if password is not None else None
    if at.scheme != "unix" and not is_loopback(at.host):
        if at.scheme != "rediss":
            raise UsageError(f"broker.address: {address} reaches beyond this machine without TLS; use rediss://")
        if password is None:
            where = (
                f"{folder}/{role}.password" if folder else f"a folder named by broker.credentials with {role}.password"
            )
            raise UsageError(f"broker.address: {address} reaches beyond this machine without a password; write {where}")
    return Endpoint(at, user, password, _tls(folder) if at.scheme == "rediss" else {})


def _folder(credentials: str | None) -> Path | None:
    """The key folder, or the one in which a credential's file lies."""
    if credentials is None:
        return None
    path = Path(credentials)
    return path.parent if path.is_file() else path


def _secret(folder: Path | None, name: str) -> str | None:
    if folder is None:
        return None
    path = folder / name
    try:
        return path.read_text().strip() if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"broker.credentials: {path} cannot be read: {error}") from None


def _tls(folder: Path | None) -> dict[str, str]:
    names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "client.key"}
    if folder is None:
        return {}
    found = {option: str(folder / name) for option, name in names.items() if (folder / name).exists()}
    if ("ssl_certfile" in found) != ("ssl_keyfile" in found):
        raise UsageError(f"broker.credentials: {folder} must hold client.crt and client.key both, or neither")
    return found
