"""Random and mutated bytes at every socket: nothing crashes, hangs or grows, and those who behave do not notice.

Each target is a process of its own, so that its memory and its death can be seen from outside. The seeds are fixed.
"""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from broker.client.connection import AsyncBrokerClient, BrokerClient
from broker.contract import BrokerStatus, LearnerReport, LedgerEntry, NodeReport
from common.rollouts import GroupMeta, Task
from common.security.credentials import Credential, KeyFolder, load_credential
from common.weights.wire import messages
from launch.keys import make
from tests.faults.fuzz import attacks
from tests.rigs.brokers import dealer
from tests.rigs.processes import OURS
from tests.rigs.waiting import LIMIT_S, until

MESSAGES = 3000
CONNECTS = 1500
HALF_OPEN = 150
GROWTH_BYTES = 32 << 20  # growth of resident memory, over everything that a test sends; measured: 1 to 4 MiB
FLOOD_BYTES = 64 << 20  # the same after a flood; the targets' guard allows 48 MiB of it
TASKS = 6


class Target:
    """A process with a socket, and its resident memory."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
        self.process, self.address, self.log = process, address, log
        self.port = urlsplit(address).port or 0
        self.before_bytes = self.resident_bytes()

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) << 10

    def assert_sound(self, bound_bytes: int = GROWTH_BYTES) -> None:
        """It lives, says nothing of an internal error, and has not grown."""
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        assert "Traceback" not in self.log.read_text(), self.log.read_text()[-4000:]
        grown = self.resident_bytes() - self.before_bytes
        assert grown < bound_bytes, f"grew by {grown >> 20} MiB"


@contextmanager
def running(role: str, run_dir: Path, keys: Path | None) -> Iterator[Target]:
    run_dir.mkdir(exist_ok=True)
    log = run_dir / f"{role}.log"
    environment = {**os.environ, **OURS}
    with log.open("wb") as out:
        command = [sys.executable, "-m", "tests.faults.fuzz.targets", role, str(run_dir), str(keys or "-")]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        written = run_dir / ("broker.json" if role == "broker" else "weights.address")
        until(lambda: written.exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        text = written.read_text()
        yield Target(process, json.loads(text)["address"] if role == "broker" else text, log)
    finally:
        process.kill()
        process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = KeyFolder(tmp_path_factory.mktemp("keys") / "k")
    make(folder, ["a", "b"])
    return folder.path


def raw_attack(target: Target, seed: int) -> None:
    """Everything that needs no key: noise on the port, many connections, connections that stay half open."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        for connection in attacks.half_open(target.port, HALF_OPEN, rng):
            stack.callback(connection.close)
        for data in itertools.islice(attacks.raw_streams(rng), 300):
            attacks.throw(target.port, data)
        for _ in range(CONNECTS):
            attacks.throw(target.port, b"")


def message_attack(
    address: str, corpus: Any, seed: int, credential: Credential | None = None, server_public: str = ""
) -> None:
    """Mutated messages over a few connections, one after another."""
    rng = random.Random(seed)
    for _ in range(5):
        with dealer(address, credential, server_public) as socket:
            many = (attacks.mutated(rng, corpus) for _ in range(MESSAGES // 5))
            assert attacks.send_all(socket, many) == MESSAGES // 5


def offer(client: BrokerClient) -> None:
    client.attach(LearnerReport(1, 1, "training", 0))
    client.offer([Task(i, b"{}", i, 4) for i in range(TASKS)])


def facts(client: BrokerClient) -> tuple[list[LedgerEntry], dict[str, object]]:
    """The ledger, and what of the status must not change by messages that are refused."""
    status: BrokerStatus = client.status()
    names = [n for n in status.__struct_fields__ if n.startswith(("groups_", "bytes_", "steps_", "stale", "lease_"))]
    nodes = [n.report for n in status.nodes]
    return client.ledger(), {**{n: getattr(status, n) for n in names}, "learner": told(status), "nodes": nodes}


def told(status: BrokerStatus) -> tuple[int, str] | None:
    """Incarnation and state of the learner's report; on a slow machine it counts as lost after a while."""
    learner = status.learner
    return (learner.incarnation, learner.state.replace("lost", "training")) if learner is not None else None


def roll_out_one(address: str, credential: Credential | None, node_id: str) -> bool:
    """Everything that a node that behaves does, once."""

    async def scenario() -> bool:
        async with AsyncBrokerClient(address, deadline_s=LIMIT_S, credential=credential) as node:
            await node.register(NodeReport(node_id, 7, "host", "generating", 0))
            [lease] = await node.lease(node_id, 0, 1, LIMIT_S)
            return await node.complete(node_id, lease.token, GroupMeta(0, 0, 0.5, 10), b"group")

    return asyncio.run(scenario())


def test_a_broker_with_keys_is_untouched_by_strangers_and_by_an_observer_and_a_node_that_send_garbage(
    keys: Path, tmp_path: Path
) -> None:
    learner_key, observer_key = load_credential(keys, "learner"), load_credential(keys, "observer")
    bad_key = load_credential(keys, "node", "b")
    with (
        running("broker", tmp_path / "run", keys) as target,
        BrokerClient(target.address, deadline_s=LIMIT_S, credential=learner_key) as learner,
    ):
        offer(learner)
        before = facts(learner)
        raw_attack(target, seed=1)
        message_attack(target.address, attacks.REQUEST_FRAMES, 2, observer_key, observer_key.server_public)
        assert facts(learner) == before
        status = learner.status()
        assert status.refused_messages > 0.6 * MESSAGES  # some are valid after all, and a cut connection loses some
        assert 0 < status.denied_requests < status.refused_messages
        assert 0 < status.quarantined_messages == len(list((tmp_path / "run" / "quarantine").glob("*.bin"))) <= 32
        assert roll_out_one(target.address, load_credential(keys, "node", "a"), "a:good")
        message_attack(target.address, attacks.REQUEST_FRAMES, 3, bad_key, bad_key.server_public)
        after = learner.ledger()
        assert [e.serial for e in after] == list(range(TASKS))
        assert (after[0].state, after[0].nodes) == ("ready", ["a:good"])
        assert {e.state for e in after[1:]} <= {"pending", "leased"}
        status = learner.status()
        assert told(status) == (1, "training")
        target.assert_sound()


def test_a_broker_without_keys_survives_everything_that_anybody_on_the_machine_may_send(tmp_path: Path) -> None:
    with running("broker", tmp_path / "run", None) as target:
        with BrokerClient(target.address, deadline_s=LIMIT_S) as learner:
            offer(learner)
        raw_attack(target, seed=4)
        message_attack(target.address, attacks.REQUEST_FRAMES, 5)
        with BrokerClient(target.address, deadline_s=LIMIT_S) as observer:
            assert observer.status().refused_messages > MESSAGES / 2
            serials = [e.serial for e in observer.ledger()]
            assert serials == list(range(len(serials))) and len(serials) >= TASKS
            assert observer.events(-1)
        target.assert_sound()


@pytest.mark.parametrize("secured", [True, False])
def test_the_weight_planes_control_socket_survives_garbage_and_still_lets_a_node_in(
    keys: Path, tmp_path: Path, secured: bool
) -> None:
    credential = load_credential(keys, "node", "a") if secured else None
    public = credential.learner_public if credential is not None else ""
    with running("weights", tmp_path / "run", keys if secured else None) as target:
        raw_attack(target, seed=6)
        message_attack(target.address, attacks.CONTROL_FRAMES, 7, credential, public)
        with dealer(target.address, credential, public) as node:
            node.send(messages.encode(messages.Join("a", 1)))
            assert node.poll(int(LIMIT_S * 1000)), "no ping came"
            assert isinstance(messages.decode_from_learner(node.recv()), messages.Ping)
        target.assert_sound()


def test_a_message_that_never_ends_costs_its_sender_the_connection_and_nobody_else(tmp_path: Path) -> None:
    most = 2 << 30
    with (
        running("broker", tmp_path / "run", None) as target,
        BrokerClient(target.address, deadline_s=LIMIT_S) as learner,
    ):
        offer(learner)
        stopping = threading.Event()

        def behave() -> None:
            with BrokerClient(target.address, deadline_s=LIMIT_S) as observer:
                while not stopping.wait(0.2):
                    observer.status()

        with ThreadPoolExecutor(1) as pool:
            behaving = pool.submit(behave)
            sent = attacks.endless_message(target.port, most)
            assert sent > 32 << 20
            stopping.set()
            behaving.result(LIMIT_S)
        assert sent < most
        until(lambda: target.resident_bytes() - target.before_bytes < FLOOD_BYTES)
        assert target.log.read_text().count("cut a connection") == 1
        assert roll_out_one(target.address, None, "good")
        target.assert_sound(FLOOD_BYTES)
