"""Whether a Redis server keeps what the broker needs kept; checked before the broker leads."""

import logging
import re
from collections.abc import Callable
from typing import Any

from broker.journal.redis_store.connection import asking, redis_module
from common.errors import UsageError

logger = logging.getLogger(__name__)

OLDEST = (6, 2)
# broker.durability -> (appendonly, settings of appendfsync that lose no more)
NEEDED = {"fsync": ("yes", ("always",)), "everysec": ("yes", ("always", "everysec")), "memory": (None, ())}
SETTINGS = ("maxmemory-policy", "appendonly", "appendfsync")


Doubt = Callable[[str], None]


def check_server(client: Any, name: str, durability: str, doubt: Doubt = logger.warning) -> None:
    """Compare the server's settings with broker.durability.

    Args:
        client: redis-py's client.
        name: the server's name, for people.
        durability: fsync, everysec or memory.
        doubt: hears what could not be seen, and so not checked.

    Raises:
        StoreUnavailable, BrokerError: see `asking`.
        UsageError: naming the setting, what was found and how to set it.
    """
    with asking(name):
        sections = [client.info(section) for section in ("server", "memory", "persistence", "replication")]
        info = {key: str(value) for section in sections for key, value in section.items()}
        settings = _settings(client, info, doubt)
    version = tuple(int(x) for x in re.findall(r"\d+", info.get("redis_version", ""))[:2])
    if version < OLDEST:
        found = info.get("redis_version", "unknown")
        raise UsageError(
            f"broker.redis: the Redis server at {name} has version {found}, expected {OLDEST[0]}.{OLDEST[1]} or "
            "later; upgrade it, or use broker.store: file"
        )
    if info.get("role") not in (None, "master"):
        raise UsageError(f"broker.redis: {name} is a replica, expected the primary; name that one")
    evicted = "groups that were acknowledged would be evicted"
    _expect(name, settings, "maxmemory-policy", ("noeviction",), evicted, doubt)
    append, fsync = NEEDED[durability]
    why = f"broker.durability is {durability}"
    if append is not None:
        _expect(name, settings, "appendonly", (append,), why, doubt)
        _expect(name, settings, "appendfsync", fsync, why, doubt)


def _expect(
    server: str, settings: dict[str, str], setting: str, expected: tuple[str, ...], why: str, doubt: Doubt
) -> None:
    found = settings.get(setting)
    if found is None:
        doubt(f"{setting} of the Redis server at {server} cannot be seen; it must be {expected[0]}: {why}")
    elif found not in expected:
        alternatives = " or ".join(expected)
        raise UsageError(
            f"the Redis server at {server} has {setting} {found}, expected {alternatives}, because {why}; set "
            f"`{setting} {expected[0]}` in redis.conf, or `redis-cli CONFIG SET {setting} {expected[0]}` and "
            "CONFIG REWRITE"
        )


def _settings(client: Any, info: dict[str, str], doubt: Doubt) -> dict[str, str]:
    """Those of SETTINGS that the server shows."""
    kinds = redis_module("redis.exceptions")
    found: dict[str, str] = {}
    try:
        for setting in SETTINGS:
            found |= {_text(name): _text(value) for name, value in client.config_get(setting).items()}
    except kinds.NoPermissionError as error:
        doubt(f"CONFIG is not permitted to the broker's user ({error}); judging by INFO, which says less")
        shown = {"maxmemory-policy": info.get("maxmemory_policy")}
        if "aof_enabled" in info:
            shown["appendonly"] = "yes" if info["aof_enabled"] == "1" else "no"
        return {name: value for name, value in shown.items() if value is not None}
    return found


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
