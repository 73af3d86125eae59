"""A machine as it introduces itself in a preflight: what must agree, how fast it writes, and its links to the others.

Latency, clocks and bandwidth are measured over TCP on one interface. Every wait ends after STALL_S.
"""

import os
import select
import socket
import statistics
import struct
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import msgspec
import psutil
from msgspec import Struct

from common.config.checks import Reader, problems
from common.config.network_checks import is_loopback
from common.config.schema import Config
from common.process.run_dir import RunDir
from common.process.versions import versions
from launch.checks.findings import Finding, problem
from launch.checks.job import check_disk
from launch.checks.machine import check_bridge, check_open_files, check_shm, look
from launch.cluster.interface import Interface, interface_for

SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_")
# May always differ.
OWN = ("NCCL_HOSTID", "NCCL_DEBUG", "NCCL_TOPO_FILE", "broker.credentials", "learner.threads", "rollout.threads")
READERS: dict[str, Reader] = {"learner": "learner", "rollout": "node", "broker": "broker"}
DISK_BYTES = 32 << 20
PIECE = bytes(4 << 20)
DISK_S = 4.0
STALL_S = 2.0
PINGS = 100
PING = bytes(64)
BLOCK = bytes(1 << 20)
HEAD = struct.Struct("<32sd")  # token, and seconds of bulk data
FIGURE = struct.Struct("<d")


class Facts(Struct, frozen=True):
    role: str
    interface: Interface
    port: int  # where its LinkListener listens
    token: str
    gpus: int
    agree: dict[str, dict[str, str]]  # by kind and name: must be the same on all machines
    folder: str  # where checkpoints go, or the nearest one above that exists
    writes: dict[str, float]  # bytes per second, by folder
    findings: list[Finding]  # the doctor's


def facts_of(config: Config, role: str, address: str) -> Facts:
    """Looks at this machine for seconds, and listens for tests. Raises UsageError when no way leads to `address`."""
    learner = role == "learner"
    machine = look()
    run = RunDir.of(config)
    interface = interface_for(address, config.learner.interface if learner else None)
    target = LinkListener(interface.address)
    found = [check_shm(machine, config), check_open_files(machine, config), *check_disk(run.path, config, None)]
    found += check_bridge(machine) if learner else ()
    for wrong in problems(config, READERS[role]):
        fix = wrong.hint or f"set {wrong.key}"
        found.append(problem("config", wrong.key, str(wrong), why="a launch refuses it there", fix=fix))
    sections = {part: keys for part, keys in msgspec.to_builtins(config).items() if isinstance(keys, dict)}
    keys = {f"{part}.{key}": v for part, keys in sections.items() for key, v in keys.items()}
    mtu = str(psutil.net_if_stats()[interface.name].mtu)
    agree = {
        "config": {key: str(value) for key, value in keys.items() if key not in OWN},
        "versions": versions(),
        "settings": {k: v for k, v in os.environ.items() if k.startswith(SETTINGS) and not k.startswith(OWN)},
        "interface": {"loopback": str(is_loopback(interface.address)), "MTU": mtu},
    }
    if learner and config.learner.interface is None:
        agree["settings"]["network interface"] = interface.name
    folders = [next(at for at in (path, *path.parents) if at.is_dir()) for path in (run.path, run.checkpoints)]
    writes = {str(folder): write_speed(folder) for folder in folders}
    bad = [finding for finding in found if finding.level != "fine"]
    return Facts(
        role=role,
        interface=interface,
        port=target.port,
        token=target.token,
        gpus=len(machine.gpus),
        agree=agree,
        folder=str(folders[-1]),
        writes=writes,
        findings=bad,
    )


def write_speed(folder: Path) -> float:
    """Bytes per second that are written and synced, over DISK_BYTES or DISK_S; 0 when nothing can be written."""
    count = 0
    begun = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # has no name: nothing can stay behind
            while count < DISK_BYTES and time.perf_counter() - begun < DISK_S:
                count += file.write(PIECE)
                os.fsync(file.fileno())
    except OSError:
        return 0.0
    return count / (time.perf_counter() - begun)


# ---------------------------------------------------------------- links


class Link(Struct, frozen=True):
    """The way from one machine to another, as the source has measured it."""

    source: str
    target: str
    latency_s: float = 0.0  # median round trip of a small packet; 0: they did not all come back
    bytes_per_s: float = 0.0
    ahead_s: float = 0.0  # the target's clock against the source's, from the fastest round trip
    error: str = ""


class LinkListener:
    """Answers the tests of those who know its token, on a free port of `address`, until the process ends."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self.token = token_hex(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader, suppress(OSError, struct.error):  # the source reports it
            connection.settimeout(STALL_S)
            token, seconds = HEAD.unpack(reader.read(HEAD.size))
            if token == self.token.encode():
                for _ in range(PINGS):
                    reader.read(len(PING))
                    connection.sendall(FIGURE.pack(time.time()))
                _receive(connection, seconds / 4)  # TCP finds its rate
                connection.sendall(FIGURE.pack(_receive(connection, seconds)))
                _receive(connection, STALL_S)  # a close now would take the figure back


def _receive(connection: socket.socket, seconds: float) -> float:
    """Bytes per second that arrive."""
    begun = time.perf_counter()
    count = 0
    buffer = bytearray(len(BLOCK))
    while (taken := time.perf_counter() - begun) < seconds and (size := connection.recv_into(buffer)):
        count += size
    return count / taken


def measure(source: str, own: str, target: str, at: tuple[str, int], token: str, seconds: float) -> Link:
    """The link with its figures, or with the error that ended the test; bulk data flows for `seconds`."""
    trips: list[tuple[float, float]] = []
    latency_s = rate = 0.0
    error = ""
    try:
        with socket.create_connection(at, STALL_S, (own, 0)) as connection, connection.makefile("rb") as reader:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # drop the surplus
            connection.sendall(HEAD.pack(token.encode(), seconds))
            for _ in range(PINGS):
                sent = time.time()
                connection.sendall(PING)
                there = FIGURE.unpack(reader.read(FIGURE.size))[0]
                trips.append((time.time() - sent, there - (time.time() + sent) / 2))
            latency_s = statistics.median(taken for taken, _ in trips)
            while not select.select([connection], [], [], 0)[0]:
                connection.send(BLOCK)
            rate = FIGURE.unpack(reader.read(FIGURE.size))[0]
    except (OSError, struct.error) as problem:
        error = str(problem) if isinstance(problem, OSError) else "the other side closed the connection"
    return Link(
        source=source,
        target=target,
        latency_s=latency_s,
        bytes_per_s=rate,
        ahead_s=min(trips)[1] if trips else 0.0,
        error=error,
    )
