"""The weight plane's control socket: who may join, and what it does with what it cannot read."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.config.schema import WeightsConfig
from common.security.credentials import KeyFolder, load_credential
from common.weights.receive import weight_client
from common.weights.receive.weight_client import WeightClient
from common.weights.source.control import PublishControl
from common.weights.transports import nccl
from common.weights.wire import messages, sockets
from common.weights.wire.messages import EjectCode
from common.weights.wire.sockets import ControlSocket
from launch.keys import make, revoke
from tests.rigs.brokers import dealer
from tests.rigs.waiting import LIMIT_S, until, until_async

JOIN = messages.Join("a", 1)


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    found = KeyFolder(tmp_path / "k")
    make(found, ["a"])
    return found


@contextmanager
def listening(credentials: Path | None) -> Iterator[tuple[ControlSocket, list[Any]]]:
    """An endpoint served by a thread, and the messages that it let through."""
    endpoint = ControlSocket("127.0.0.1", str(credentials) if credentials else None)
    heard: list[Any] = []
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            endpoint.wait(50)
            heard.extend(message for _, message in endpoint.received())
        endpoint.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield endpoint, heard
    finally:
        stopping.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_node_with_its_key_joins_until_it_is_revoked_and_nobody_else_does(folder: KeyFolder) -> None:
    node = load_credential(folder.path, "node")
    with listening(folder.path) as (endpoint, heard):
        for other in (None, load_credential(folder.path, "observer")):
            with dealer(endpoint.address, other, node.learner_public) as socket:
                socket.send(messages.encode(JOIN))
                assert socket.poll(300) == 0
        assert (heard, endpoint.malformed) == ([], 0)
        with dealer(endpoint.address, node, node.learner_public) as socket:
            socket.send(messages.encode(JOIN))
            until(lambda: heard == [JOIN])
            revoke(folder, "a")
            until(lambda: endpoint.malformed >= 1 or socket.send(messages.encode(messages.Pong("n0"))))
            ejected = messages.decode_from_learner(socket.recv())
            assert isinstance(ejected, messages.Eject) and ejected.code == EjectCode.REVOKED


def test_only_the_learners_own_ranks_speak_as_sources_and_only_nodes_as_nodes(folder: KeyFolder) -> None:
    offering = messages.PartReady(1, 0, 4, "sum", {-1: 64})
    allowed: dict[str, messages.NodeMessage | messages.SourceMessage] = {"node": JOIN, "learner": offering}
    with listening(folder.path) as (endpoint, heard):
        for role, right in allowed.items():
            key = load_credential(folder.path, role)
            with dealer(endpoint.address, key, key.learner_public) as socket:
                for message in allowed.values():
                    socket.send(messages.encode(message))
                refused = messages.decode_from_learner(socket.recv())
                assert isinstance(refused, messages.Eject) and refused.code == EjectCode.ROLE
                until(lambda right=right: heard[-1:] == [right])
        assert heard == list(allowed.values())


def test_a_node_joins_under_an_id_of_its_own_credential_only(folder: KeyFolder) -> None:
    make(folder, ["b"])
    own, other = messages.Join("b:1", 1), messages.Join("a", 1)
    with listening(folder.path) as (endpoint, heard):
        key = load_credential(folder.nodes / "b.json", "node")
        with dealer(endpoint.address, key, key.learner_public) as socket:
            socket.send(messages.encode(other))
            refused = messages.decode_from_learner(socket.recv())
            assert isinstance(refused, messages.Eject) and refused.code == EjectCode.NODE_ID
            socket.send(messages.encode(own))
            until(lambda: heard == [own])


def test_a_weight_client_says_on_what_it_waits_when_its_key_is_refused(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = KeyFolder(tmp_path / "other")
    make(other, ["a"])
    monkeypatch.setattr(weight_client, "REJOIN_AFTER_S", 0.5)

    async def scenario(address: str) -> str:
        client = WeightClient("n0", None, credential=load_credential(other.path, "node"))  # type: ignore[arg-type]
        client.follow(address, 0)
        async with asyncio.timeout(LIMIT_S):
            while not client.state.refused:
                await client.wait_change(0.1)
        refused = client.state.refused
        await client.close()
        return refused

    with listening(folder.path) as (endpoint, heard):
        assert "node 'a'" in asyncio.run(scenario(endpoint.address))
        assert heard == []


def test_a_weight_client_whose_task_failed_joins_at_the_next_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    join, failures = messages.Join, iter([OSError("once")])

    def failing(**fields: Any) -> messages.Join:
        for error in failures:
            raise error
        return join(**fields)

    async def scenario(address: str) -> None:
        client = WeightClient("n0", None)  # type: ignore[arg-type]
        await until_async(lambda: client.follow(address, 0) or heard, "the node's second attempt to join")
        await client.close()

    monkeypatch.setattr(messages, "Join", failing)
    with listening(None) as (endpoint, heard):
        asyncio.run(scenario(endpoint.address))


def test_a_node_with_another_nccl_or_other_messages_than_the_learner_is_refused_for_good_and_says_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = nccl.shared_versions()
    monkeypatch.setattr(weight_client, "shared_versions", lambda: ours | {"nccl": "2.27.5"})
    monkeypatch.setattr(nccl, "shared_versions", lambda: ours | {"nccl": "2.29.7"})
    control = PublishControl(WeightsConfig(transport="nccl", timeout_s=LIMIT_S), 0)
    thread = threading.Thread(target=control.run)
    thread.start()

    async def excluded(transports: tuple[str, ...]) -> str:
        client = WeightClient("n0", None, transports=transports)  # type: ignore[arg-type]
        client.follow(control.address, 0)
        await until_async(lambda: client.state.excluded or control.figures.now.nodes, "the learner's answer")
        await client.close()
        return client.state.excluded or ""

    try:
        reason = asyncio.run(excluded(("nccl", "gloo", "relay")))
        assert all(version in reason for version in ("2.27.5", "2.29.7"))
        with monkeypatch.context() as later:
            later.setattr(messages, "SCHEMA", 2)
            reason = asyncio.run(excluded(("relay",)))
        assert "schema 1" in reason and "the learner's 2" in reason
        assert control.figures.now.nodes == 0
        assert asyncio.run(excluded(("relay",))) == ""  # its weights come over ZeroMQ
    finally:
        control.stop()
        thread.join(LIMIT_S)


def test_silence_counts_until_everything_that_came_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "BATCH_MESSAGES", 1)
    endpoint = ControlSocket("127.0.0.1")
    try:
        with dealer(endpoint.address) as node:
            for _ in range(3):
                node.send(messages.encode(messages.Pong("a")))
            heard = 0
            while heard < 3:
                endpoint.wait(100)
                before = endpoint.read_until(0.0)
                read = len(list(endpoint.received()))
                assert (endpoint.read_until(0.0) == before) == (read == 1), "more may wait behind a whole batch"
                heard += read
            began = time.perf_counter()
            assert not list(endpoint.received()) and endpoint.read_until(0.0) >= began
            flooded = began + sockets.BEHIND_S + 100
            assert endpoint.read_until(flooded) == flooded - sockets.BEHIND_S, "a flood delays it by no more"
    finally:
        endpoint.close()


MALFORMED = [
    [b""], [b"\xc1"], [b"\x91" * 5000], [messages.encode(JOIN)] * 2, [messages.encode(messages.Join("n" * 1000, 1))],
    [messages.encode(messages.Active("n0", 0, 1, float("nan"), ""))],
    [messages.encode(messages.Staged("n0", 0, 1 << 40, 0.0))],
]  # fmt: skip


@pytest.mark.parametrize("frames", MALFORMED)
def test_what_does_not_decode_or_breaks_a_limit_is_counted_and_its_sender_hears_why(frames: list[bytes]) -> None:
    with listening(None) as (endpoint, heard), dealer(endpoint.address) as socket:
        socket.send_multipart(frames)
        reply = messages.decode_from_learner(socket.recv())
        assert isinstance(reply, messages.Eject) and reply.code == EjectCode.MALFORMED and reply.reason
        assert (heard, endpoint.malformed) == ([], 1)
