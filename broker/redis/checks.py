"""Whether a Redis server keeps what the job needs kept: asked by the keeper before it makes the run."""

import logging
import re
from collections.abc import Callable
from typing import Any

from broker.redis.link import Link
from broker.redis.moves import Command
from broker.redis.reading import pairs
from common.errors import BrokerError, UsageError

logger = logging.getLogger(__name__)

OLDEST = (6, 2)
# broker.durability -> (appendonly, settings of appendfsync that lose no more)
NEEDED = {"fsync": ("yes", ("always",)), "everysec": ("yes", ("always", "everysec")), "memory": (None, ())}
SETTINGS = ("maxmemory-policy", "appendonly", "appendfsync")


Doubt = Callable[[str], None]


def check_server(link: Link, durability: str, end: float, doubt: Doubt = logger.warning) -> None:
    """Compare the server's settings with broker.durability.

    Args:
        link: connection of the keeper.
        durability: fsync, everysec or memory.
        end: of the wait for an answer, monotonic seconds.
        doubt: hears what could not be seen, and so not checked.

    Raises:
        UsageError: naming the setting, what was found and how to set it.
    """
    server = link.endpoint.name
    info = _info(link, end)
    version = tuple(int(x) for x in re.findall(r"\d+", info.get("redis_version", ""))[:2])
    if version < OLDEST:
        found = info.get("redis_version", "unknown")
        raise UsageError(
            f"broker.address: the Redis server at {server} has version {found}, expected {OLDEST[0]}.{OLDEST[1]} or "
            "later; upgrade it, or use broker.backend: zeromq"
        )
    if info.get("role") not in (None, "master"):
        raise UsageError(f"broker.address: {server} is a replica, expected the primary; name that one")
    settings = _settings(link, info, end, doubt)
    evicted = "groups that were acknowledged would be evicted"
    _expect(server, settings, "maxmemory-policy", ("noeviction",), evicted, doubt)
    append, fsync = NEEDED[durability]
    why = f"broker.durability is {durability}"
    if append is not None:
        _expect(server, settings, "appendonly", (append,), why, doubt)
        _expect(server, settings, "appendfsync", fsync, why, doubt)


def _expect(
    server: str, settings: dict[str, str], name: str, expected: tuple[str, ...], why: str, doubt: Doubt
) -> None:
    found = settings.get(name)
    if found is None:
        doubt(f"{name} of the Redis server at {server} cannot be seen; it must be {expected[0]}: {why}")
    elif found not in expected:
        alternatives = " or ".join(expected)
        raise UsageError(
            f"the Redis server at {server} has {name} {found}, expected {alternatives}, because {why}; set "
            f"`{name} {expected[0]}` in redis.conf, or `redis-cli CONFIG SET {name} {expected[0]}` and CONFIG REWRITE"
        )


def _settings(link: Link, info: dict[str, str], end: float, doubt: Doubt) -> dict[str, str]:
    """Of SETTINGS those that the server shows."""
    try:
        commands: list[Command] = [("CONFIG", "GET", name) for name in SETTINGS]
        replies = link.run(lambda repeated, whole: commands, end)
    except BrokerError as error:
        doubt(f"CONFIG is not permitted to the broker's user ({error}); judging by INFO, which says less")
        shown = {"maxmemory-policy": info.get("maxmemory_policy")}
        if "aof_enabled" in info:
            shown["appendonly"] = "yes" if info["aof_enabled"] == "1" else "no"
        return {name: value for name, value in shown.items() if value is not None}
    found: dict[str, str] = {}
    for reply in replies:
        found |= {name.decode(): value.decode() for name, value in pairs(reply).items()}
    return found


def _info(link: Link, end: float) -> dict[str, str]:
    def ask(section: str) -> Any:
        return link.run(lambda repeated, whole: [("INFO", section)], end)[0]

    lines = b"".join(ask(section) for section in ("server", "memory", "persistence", "replication")).decode()
    return dict(line.split(":", 1) for line in lines.splitlines() if ":" in line)
