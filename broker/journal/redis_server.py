"""Where Redis is and who the broker is to it: from broker.redis and broker.credentials to a client of redis-py.

The only module that imports redis-py, and only once a client is made: the base install does without it.

The credentials folder has broker.password and, where the ACL user is not called `broker`, broker.user. For TLS it has
ca.crt, and client.crt with client.key where the server asks for them.
"""

import importlib
import logging
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.journal.store import StoreUnavailable
from common.config.network_checks import is_loopback, parse_redis
from common.errors import BrokerError, UsageError

TIMEOUT_S = 5.0  # for one connection attempt, one write and one read
RETRIES = 3
RETRY_CAP_S = 0.5
RETRY_BASE_S = 0.02
PASSING = ("MISCONF", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "READONLY", "OOM")


def redis_module(name: str) -> Any:
    """redis-py's module `name`; raises UsageError when it, or a package that it needs, is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or "redis"
        found = "which is" if missing.partition(".")[0] == "redis" else f"and that {missing}, which is"
        raise UsageError(
            f"broker.store: redis needs redis-py, {found} not installed here; pip install 'slipstream-rl[redis]'"
        ) from error


def open_client(address: str, credentials: str | None) -> Any:
    """A redis.Redis, not connected yet; any thread may use it.

    Raises UsageError for bad addresses and credentials, and beyond this machine without both a password and TLS.
    """
    try:
        at = parse_redis(address)
    except ValueError as error:
        raise UsageError(f"broker.redis: {error}, found {address!r}") from None
    path = Path(credentials) if credentials is not None else None  # a folder of keys, or a file in one
    folder = path.parent if path is not None and path.is_file() else path
    password = _secret(folder, "broker.password")
    if at.scheme != "unix" and not is_loopback(at.host):
        if at.scheme != "rediss":
            raise UsageError(f"broker.redis: {address} reaches beyond this machine without TLS; use rediss://")
        if password is None:
            where = f"{folder}/broker.password" if folder else "broker.password in the folder of broker.credentials"
            raise UsageError(f"broker.redis: {address} reaches beyond this machine without a password; write {where}")
    redis = redis_module("redis")
    options: dict[str, Any] = {
        "db": at.db,
        "protocol": 2,
        "driver_info": None,  # without CLIENT SETINFO the ACL grants one command less
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "retry": redis_module("redis.retry").Retry(
            redis_module("redis.backoff").ExponentialBackoff(RETRY_CAP_S, RETRY_BASE_S), RETRIES
        ),
    }
    if password is not None:
        options |= {"username": _secret(folder, "broker.user") or "broker", "password": password}
    if at.scheme == "unix":
        return redis.Redis(unix_socket_path=at.path, **options)
    if at.scheme == "rediss":
        options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True, **_tls(folder)}
    return redis.Redis(host=at.host, port=at.port, socket_keepalive=True, **options)


@contextmanager
def asking(name: str) -> Generator[None]:
    """While active, a failure of redis-py becomes one of the broker; `name` is the server's, for people.

    Raises StoreUnavailable where it may pass, and BrokerError for a wrong password, no permission or a bad command.
    """
    try:
        yield
    except Exception as error:
        kinds = redis_module("redis.exceptions")
        refused = isinstance(error, kinds.AuthenticationError | kinds.NoPermissionError)
        passing = isinstance(error, kinds.ConnectionError | kinds.TimeoutError | kinds.ReadOnlyError | OSError)
        if not refused and (passing or str(error).startswith(PASSING) or isinstance(error, kinds.OutOfMemoryError)):
            raise StoreUnavailable(f"Redis at {name} does not take records: {error}") from error
        hint = ""
        if isinstance(error, kinds.NoPermissionError):
            hint = "; its user needs the commands and keys (`slipstream:{run.name}:*`) of the ACL line in docs/redis.md"
        elif refused:
            hint = "; its password is expected in broker.password in the folder of broker.credentials"
        raise BrokerError(f"Redis at {name} refuses the broker: {error}{hint}") from error


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
        raise UsageError(f"broker.credentials: {folder} must contain client.crt and client.key both, or neither")
    return found


logger = logging.getLogger(__name__)

OLDEST = (6, 2)
EVICTION = {"maxmemory-policy": ("noeviction",)}
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {  # by broker.durability: what loses no more, the usual one first
    "fsync": {"appendonly": ("yes",), "appendfsync": ("always",)},
    "everysec": {"appendonly": ("yes",), "appendfsync": ("always", "everysec")},
    "memory": {},
}
Doubt = Callable[[str], None]


def check_server(client: Any, name: str, durability: str, doubt: Doubt = logger.warning) -> None:
    """Compare the settings of the server `name` with broker.durability; `doubt` hears what could not be seen.

    Raises UsageError, which says how to set a setting, and StoreUnavailable or BrokerError as `asking`.
    """
    with asking(name):
        sections = [client.info(section) for section in ("server", "memory", "persistence", "replication")]
        info = {key: str(value) for section in sections for key, value in section.items()}
        settings = _settings(client, info, doubt)
    version = tuple(int(x) for x in re.findall(r"\d+", info.get("redis_version", ""))[:2])
    if version < OLDEST:
        differs = f"version {info.get('redis_version', 'unknown')}, expected {OLDEST[0]}.{OLDEST[1]} or later"
        hint = "upgrade it, or use broker.store: file"
        raise UsageError(f"broker.redis: the Redis server at {name} has {differs}; {hint}")
    if info.get("role") not in (None, "master"):
        raise UsageError(f"broker.redis: {name} is a replica, expected the primary; name that one")
    for setting, expected in {**EVICTION, **NEEDED[durability]}.items():
        found = settings.get(setting)
        best = expected[0]
        lost = setting in EVICTION
        why = "groups that were acknowledged would be evicted" if lost else f"broker.durability is {durability}"
        if found is None:
            doubt(f"{setting} of the Redis server at {name} cannot be seen; it must be {best}: {why}")
        elif found not in expected:
            hint = f"set `{setting} {best}` in redis.conf, or `redis-cli CONFIG SET {setting} {best}`"
            differs = f"{setting} {found}, expected {' or '.join(expected)}, because {why}"
            raise UsageError(f"the Redis server at {name} has {differs}; {hint} and CONFIG REWRITE")


def _settings(client: Any, info: dict[str, str], doubt: Doubt) -> dict[str, str]:
    kinds = redis_module("redis.exceptions")
    found: dict[str, str] = {}
    try:
        for setting in ("maxmemory-policy", "appendonly", "appendfsync"):
            found |= {_text(name): _text(value) for name, value in client.config_get(setting).items()}
    except kinds.NoPermissionError as error:
        doubt(f"CONFIG is not permitted to the broker's user ({error}); judging by INFO, which says less")
        if "maxmemory_policy" in info:
            found["maxmemory-policy"] = info["maxmemory_policy"]
        if "aof_enabled" in info:
            found["appendonly"] = "yes" if info["aof_enabled"] == "1" else "no"
    return found


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
