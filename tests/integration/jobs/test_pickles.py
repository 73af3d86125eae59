"""A pickle that leaves a mark when it is unpickled, sent to every port that a running job opens, in many forms."""

import base64
import contextlib
import datetime
import pickle
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil

from common.config.network_checks import split_address
from common.weights.transports.groups import dist
from tests.rigs.jobs import metrics, slipstream, status, write_config
from tests.rigs.processes import Command, descendants, until
from tests.rigs.redis_servers import free_port
from tests.rigs.waiting import LIMIT_S
from tests.rigs.warm_engines import Node

WIDE = "rollout.engine.tensor_parallel=2"  # so that workers of vLLM talk to each other
VALIDATE, PING = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=BI", 13, 7)  # words of torch's TCPStore
ZMTP = (b"\xff".ljust(9, b"\0") + b"\x7f\x03\0NULL").ljust(64, b"\0")  # greeting of a ZeroMQ socket without a key
STORE_S = 20.0  # for the answer of a store; other servers do not give it
SEND_S = 1.0  # time for an answer, which is not needed
PAUSE_S = 1.0  # a step takes about this long at least
MORE_STEPS = 6  # torchrun's c10d rendezvous read its value every 5 s


class Mark:
    """Its pickle, once loaded, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def listeners(pid: int) -> dict[int, tuple[str, str]]:
    """Port: (address, command line) of the listening sockets of a process and everything that it has started."""
    found: dict[int, tuple[str, str]] = {}
    for process in [psutil.Process(pid), *descendants(pid)]:
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found[one.laddr.port] = (one.laddr.ip, line)
    return found


def send(address: tuple[str, int], data: bytes, greeting: bytes = b"") -> None:
    """`data`, after the server has answered a greeting with one as long."""
    with contextlib.suppress(OSError), socket.create_connection(address, SEND_S) as connection:
        if greeting:
            connection.sendall(greeting)
            connection.recv(len(greeting), socket.MSG_WAITALL)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def zmtp(kind: bytes, *frames: bytes) -> bytes:
    """One message of a ZeroMQ socket of this kind, with what it sends before; ZMTP goes before both."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    message = [struct.pack(">BQ", 2 | (at < len(frames) - 1), len(frame)) + frame for at, frame in enumerate(frames)]
    return struct.pack("BB", 4, len(ready)) + ready + b"".join(message)


def is_store(address: tuple[str, int]) -> bool:
    """Whether torch's store answers there; its own client ends the process where another server does."""
    with contextlib.suppress(OSError), socket.create_connection(address, STORE_S) as connection:
        connection.settimeout(STORE_S)
        connection.sendall(VALIDATE + PING)
        return connection.recv(len(PING) - 1, socket.MSG_WAITALL) == PING[1:]
    return False


def overwrite(address: tuple[str, int], mark: bytes) -> int:
    """Every value of torch's store there; returns how many there were, 0 where no store is.

    torchrun's c10d rendezvous has its value in base64.
    """
    if not is_store(address):
        return 0
    store = dist.TCPStore(*address, is_master=False, timeout=datetime.timedelta(seconds=LIMIT_S))
    keys = store.list_keys()
    for key in keys:
        store.set(key, base64.b64encode(mark) if "rendezvous" in key else mark)
    return len(keys)


def attack(address: tuple[str, int], mark: bytes) -> int:
    """Returns the number of values that were overwritten."""
    for length in ("", ">I", "<I", ">Q", "<Q"):
        send(address, (struct.pack(length, len(mark)) if length else b"") + mark)
    for path in ("/", "/v1/completions", "/api/runs"):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        send(address, f"{head}Content-Length: {len(mark)}\r\nConnection: close\r\n\r\n".encode() + mark)
    for kind in (b"DEALER", b"REQ", b"PUSH", b"PUB", b"PAIR"):
        for frames in ([mark], [b"", mark], [b"", b"", mark, mark]):
            send(address, zmtp(kind, *frames), ZMTP)
    return overwrite(address, mark)


def test_no_port_of_a_running_job_unpickles_what_it_gets(assets: Path, tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", tmp_path / "unpickled"
    sections: dict[str, dict[str, Any]] = {
        "tasks": {"environment": "tests.rigs.environments:agent", "options": {"pause_s": PAUSE_S}},
        "learner": {"world_size": 2, "parallel": {"pipeline": 2}},
        "weights": {"transport": "relay"},
        "rollout": {"max_turns": 2},
    }
    config = str(write_config(tmp_path / "job.yaml", assets, run_dir, 2000, **sections))
    health = {role: free_port() for role in ("broker", "rollout", "learner")}
    with ExitStack() as running:
        roles: list[Command] = []
        for role, port in health.items():
            words = (config, WIDE, f"telemetry.health_port={port}")
            command = Node(tmp_path, role, *words) if role == "rollout" else Command(tmp_path, role, role, *words)
            roles.append(running.enter_context(command))
            # The broker and the learner write RUN/config.yaml, which the ranks read.
            until("the broker", (run_dir / "broker.json").exists, *roles)
        until("steps", lambda: len(metrics(run_dir)) >= 2, *roles)
        page = running.enter_context(Command(tmp_path, "web", "web", str(run_dir), "--port", "0"))
        until("the page", lambda: "the page is at" in page.output(), page)
        ports = {role.name: listeners(role.process.pid) for role in (*roles, page)}
        found = {port: ip for each in ports.values() for port, (ip, _) in each.items()}
        log = next((run_dir / "logs").glob("rollout-*.log")).read_text()
        (agents,) = re.findall(r"agents find the policy at http://127.0.0.1:(\d+)", log)
        broker = split_address(status(run_dir)["broker"]["address"])[1]
        assert {int(agents), broker, *health.values()} <= found.keys(), ports
        ranks, engine = ports["learner"], ports["rollout"]
        assert {ip for ip, line in ranks.values() if "learner.torchrun" in line} == {"127.0.0.1"}
        assert any("VLLM" in line for _, line in engine.values()), engine
        pickled = pickle.dumps(Mark(mark))
        with ThreadPoolExecutor(len(found)) as pool:
            overwritten = dict(
                zip(found, pool.map(attack, [("127.0.0.1", port) for port in found], repeat(pickled)), strict=True)
            )
        assert any(overwritten[port] for port in ranks), "the store where the ranks meet"
        reached = len(metrics(run_dir))
        until("more steps", lambda: mark.exists() or len(metrics(run_dir)) >= reached + MORE_STEPS, *roles, page)
        assert not mark.exists()
        page.drain()
        slipstream("stop", str(run_dir))
        assert [role.wait() for role in roles] == [0, 0, 0], [role.output() for role in roles]
    assert not mark.exists()
    pickle.loads(pickled)  # noqa: S301 - the mark works
    assert mark.exists()
