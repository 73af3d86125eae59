"""The Redis of a fault test: one server, or a primary with a replica behind addresses that can be moved."""

import time
from pathlib import Path
from typing import Any

from tests.faults.proxy import Proxy
from tests.redis_server import RedisServer
from tests.waiting import until


class RedisUnderTest:
    """A private server, all of whose data is in its append-only file; the broker connects to `address`.

    With `replica` a second server follows the first; the broker connects through `proxy`, which leads to the primary.
    """

    def __init__(self, folder: Path, fsync: str, replica: bool) -> None:
        self.durability = "fsync" if fsync == "always" else fsync
        settings = {"appendonly": "yes", "appendfsync": fsync}
        self.server = RedisServer(_made(folder), settings)
        self._former: list[RedisServer] = []
        self._replica: RedisServer | None = None
        self.proxy: Proxy | None = None
        self.address = self.server.address
        if replica:
            self._replica = RedisServer(_made(folder / "replica"), settings)
            self._replication = Proxy(self.server.address)
            self.proxy = Proxy(self.address)
            self.address = self.proxy.address
            port = self._replication.address.rpartition(":")[2].removesuffix("/0")
            assert self._replica.ask("REPLICAOF", "127.0.0.1", port)

    def replica_in_step(self) -> None:
        """Wait until the replica has all that the primary had when this was called."""
        assert self._replica is not None
        replica, wanted = self._replica, _offset(self.server)
        until(lambda: _linked(replica) and _offset(replica) >= wanted, "the replica to follow")

    def replica_falls_behind(self) -> None:
        """Changes at the primary from now on never reaches the replica."""
        self._replication.hold()

    def fail_over(self) -> float:
        """kill -9 of the primary; the replica takes over, the address moves to it. Returns when, monotonic seconds."""
        assert self._replica is not None and self.proxy is not None
        self.server.kill()
        self._replication.cut()  # records on their way are lost with the primary
        assert self._replica.ask("REPLICAOF", "NO", "ONE")
        self._former.append(self.server)
        self.server, self._replica = self._replica, None
        self.proxy.lead_to(self.server.port)
        return time.monotonic()

    def close(self) -> None:
        """End everything."""
        if self.proxy is not None:
            self.proxy.close()
            self._replication.close()
        for server in (self.server, self._replica, *self._former):
            if server is not None:
                server.kill()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _replication(server: RedisServer) -> dict[Any, Any]:
    found = server.ask("INFO", "replication")
    assert isinstance(found, dict)
    return found


def _offset(server: RedisServer) -> int:
    found = _replication(server)
    return int(found.get("slave_repl_offset", found["master_repl_offset"]))


def _linked(server: RedisServer) -> bool:
    return _replication(server).get("master_link_status") == "up"
