"""Two hosts on one machine: network namespaces with one cable between them, which can be cut."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "eth0"


class Hosts:
    """Host 0 and host 1. Only their cable connects them; files and unix sockets are the machine's."""

    def __init__(self) -> None:
        self.names = [f"slipstream{os.getpid()}h{number}" for number in range(2)]

    def up(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        _ip("-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")

    def down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def cut(self) -> None:
        """Nothing arrives any more, and neither side is told."""
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def connect(self) -> None:
        _ip("-n", self.names[1], "link", "set", INTERFACE, "up")

    def command(self, host: int, words: list[str]) -> list[str]:
        """The command line that runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]


@contextmanager
def connected_hosts() -> Iterator[Hosts]:
    """Two hosts; skips the test, with the reason, where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip` (package iproute2)")
    hosts = Hosts()
    try:
        try:
            hosts.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield hosts
    finally:
        hosts.down()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
