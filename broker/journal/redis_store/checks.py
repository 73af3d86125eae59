"""Whether a Redis server keeps what the broker needs kept; checked before the broker leads."""

import logging
import re
from collections.abc import Callable
from typing import Any

from broker.journal.redis_store.connection import asking, redis_module
from common.errors import UsageError

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
        found, best = settings.get(setting), expected[0]
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
