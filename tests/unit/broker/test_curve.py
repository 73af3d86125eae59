"""A broker with keys: who gets in, whose node an id is, and what one is told who does not get in."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from broker import sockets
from broker.client.connect import Access, connect, connect_node
from broker.contract import LearnerReport
from broker.server.server import BrokerServer
from broker.sockets import connect_dealer
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.process.local_address import needs_ipv6
from common.security.credentials import KeyFolder, load_credential
from common.security.curve import BROKEN_S
from launch.keys import make, revoke
from tests.rigs.brokers import META, node_report, serving, tasks
from tests.rigs.proxy import Proxy
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = KeyFolder(tmp_path_factory.mktemp("keys") / "k")
    make(folder, ["a", "b"])
    return folder.path


def secured(keys: Path | None, address: str = "tcp://127.0.0.1:0", **more: Any) -> AbstractContextManager[BrokerServer]:
    return serving(address, credentials=str(keys) if keys else None, **more)


def access(server: BrokerServer, role: Any, keys: Path | None, name: str = "") -> Access:
    limits = {"deadline_s": LIMIT_S, "retry_s": 0.5}
    return Access(address=server.address, role=role, credentials=str(keys) if keys else None, name=name, **limits)


def offer(server: BrokerServer, keys: Path, count: int = 4) -> None:
    with connect(access(server, "learner", keys)) as learner:
        learner.attach(LearnerReport(1, 1, "starting", 0))
        learner.offer(tasks(count))


def as_node(server: BrokerServer, keys: Path, name: str, work: Callable[[Any], Any]) -> Any:
    async def scenario() -> Any:
        async with connect_node(access(server, "node", keys, name)) as node:
            return await work(node)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("role", "facts"), [("learner", ["'learner'", "slipstream keys"]), ("observer", ["'observer'"]), ("node", ["'a'"])]
)
@pytest.mark.slow
def test_a_key_that_is_not_in_the_list_or_of_another_folder_is_told_so_long_before_the_deadline(
    keys: Path, tmp_path: Path, role: str, facts: list[str]
) -> None:
    other = KeyFolder(tmp_path / "other")
    make(other, ["a"])
    if role == "learner":  # it knows this broker's key
        strange, ours = load_credential(other.path, "learner"), load_credential(keys, "learner").server_public
        other.learner.write_text(other.learner.read_text().replace(strange.server_public, ours))
    with secured(keys) as server:
        started = time.monotonic()
        with refused(UsageError, *facts) as caught:
            if role == "node":
                as_node(server, other.path, "a", lambda node: node.register(node_report()))
            else:
                with connect(access(server, role, other.path)) as client:
                    client.status()
        assert caught.value.exit_code == 2
        assert time.monotonic() - started < LIMIT_S / 2


def test_a_side_without_a_key_is_not_talked_to_and_the_other_says_what_to_set(keys: Path) -> None:
    for here, there in ((keys, None), (None, keys)):
        told = refused(UsageError, "broker.credentials")
        with secured(here) as server, connect(access(server, "observer", there)) as observer, told as caught:
            observer.status()
        assert ("--credentials" in str(caught.value)) == (there is None)


@pytest.mark.parametrize(("mine", "fact"), [(False, "--credentials"), (True, "'observer'")])
@pytest.mark.slow
def test_a_side_that_resets_before_its_greeting_arrives_may_be_one_with_other_keys(
    keys: Path, mine: bool, fact: str
) -> None:
    """ZeroMQ tells a client nothing then; a broker that takes silence for death would take a living one's place."""
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as at_end:
        pool.submit(_reset_every_connection, listener)
        at_end.callback(listener.shutdown, socket.SHUT_RDWR)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        reached = Access(address=address, role="observer", deadline_s=8.0, credentials=str(keys) if mine else None)
        with connect(reached) as observer, refused(UsageError, fact):
            observer.status()


def _reset_every_connection(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the listener was shut down
        while accepted := listener.accept()[0]:
            accepted.recv(1)  # it has connected: a reset before that is a failed connection, which says nothing of keys
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()


@pytest.mark.slow
def test_a_connection_that_was_good_once_is_not_given_up_when_a_forwarder_has_nobody_to_forward_to(keys: Path) -> None:
    with ExitStack() as at_end, ThreadPoolExecutor(1) as pool:
        with secured(keys) as server:
            forwarder = Proxy(server.address)
            at_end.callback(forwarder.close)
            reached = msgspec.structs.replace(access(server, "observer", keys), address=forwarder.address)
            observer = at_end.enter_context(connect(reached))
            assert observer.status().groups_pending == 0
        waiting = pool.submit(lambda: observer.status().groups_pending)
        time.sleep(BROKEN_S + 1)  # every attempt is accepted, and ends during the handshake
        assert not waiting.done()
        with secured(keys) as server:
            forwarder.lead_to(int(server.address.rpartition(":")[2]))
            assert waiting.result(LIMIT_S) == 0


def test_no_broker_at_all_is_still_unreachable_and_not_a_wrong_key(keys: Path) -> None:
    nowhere = Access(address="tcp://127.0.0.1:9", role="observer", deadline_s=0.5, credentials=str(keys))
    with connect(nowhere) as observer, refused(BrokerUnreachable, nowhere.address):
        observer.status()


def test_every_role_works_with_its_key_and_a_node_id_belongs_to_the_credential_of_its_name(keys: Path) -> None:
    async def honest(node: Any) -> Any:
        await node.register(node_report("a"))
        return await node.lease("a", 0, 1, 5)

    with secured(keys) as server:
        offer(server, keys)
        [lease] = as_node(server, keys, "a", honest)
        with connect(access(server, "observer", keys)) as observer:
            assert observer.status().denied_requests == 0
        for attack in (
            lambda node: node.register(node_report("a", pid=2)),
            lambda node: node.lease("a", 0, 4, 0),
            lambda node: node.heartbeat(node_report("a"), [lease.token]),
            lambda node: node.complete("a", lease.token, META, b"forged"),
            lambda node: node.fail("a", lease.token, "forged"),
            lambda node: node.release("a", [lease.token]),
            lambda node: node.leave("a"),
        ):
            with refused(BrokerError, "'b'", "'a'"):
                as_node(server, keys, "b", attack)
        with connect(access(server, "observer", keys)) as observer:
            assert (observer.status().groups_leased, observer.status().denied_requests) == (1, 7)
        done = as_node(server, keys, "a", lambda node: node.complete("a", lease.token, META, b"group"))
        assert done is True
        with connect(access(server, "observer", keys)) as observer:
            assert [e.state for e in observer.ledger()] == ["ready", "pending", "pending", "pending"]


def test_a_credential_made_while_the_broker_runs_gets_in_and_a_revoked_one_is_out_at_once(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "k")
    make(folder, ["a"])
    with secured(folder.path) as server:
        make(folder, ["late"])
        as_node(server, folder.path, "late", lambda node: node.register(node_report("late")))

        async def until_revoked(node: Any) -> None:
            await node.register(node_report("late"))
            revoke(folder, "late")
            while True:
                await node.heartbeat(node_report("late"), [])
                await asyncio.sleep(0.1)

        with refused(BrokerError):
            as_node(server, folder.path, "late", until_revoked)
        folder.allowed.write_text("{half a fi")  # the last good list stays in force
        with connect(access(server, "observer", folder.path)) as observer:
            status = observer.status()
            assert (status.groups_pending, status.denied_requests) == (0, 1)


def test_a_broker_that_cannot_listen_as_it_was_told_to_says_what_to_do(keys: Path, tmp_path: Path) -> None:
    for credentials, address, *facts in (
        (tmp_path, "tcp://127.0.0.1:0", "broker.credentials", "server.json"),
        (keys, "tcp://no-such-host.invalid:0", "broker.address", "'no-such-host.invalid'"),
        (None, "tcp://0.0.0.0:0", "broker.address", "slipstream keys DIR"),
    ):
        with refused(UsageError, *facts), secured(credentials, address):
            pass


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://[::1]:0", "tcp://localhost:0"])
def test_with_keys_a_broker_listens_beyond_loopback_and_tells_an_address_that_can_be_connected_to(
    keys: Path, address: str
) -> None:
    if "[" in address and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with secured(keys, address) as server:
        assert not any(part in server.address for part in ("0.0.0.0", "[::]")) and server.address[-2:] != ":0"
        with connect(access(server, "observer", keys)) as observer:
            assert observer.status().address == server.address


def names(known: dict[tuple[str, int], str]) -> Callable[..., Any]:
    """A resolver that knows the addresses of these names and families, and no other."""

    def look(host: str, port: object, family: int = 0, *_: object, **__: object) -> list[Any]:
        found = [(f, 0, 0, "", (ip, 0)) for (name, f), ip in known.items() if name == host and family in (0, f)]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return found

    return look


NAMES = {
    ("six", socket.AF_INET6): "fd00::5",
    ("both", socket.AF_INET6): "fd00::5",
    ("both", socket.AF_INET): "10.0.0.5",
}


@pytest.mark.parametrize(
    ("host", "version"), [("six", 1), ("both", 0), ("unknown", 0), ("10.0.0.5", 0), ("[fd00::5]", 1)]
)
def test_a_client_asks_for_ipv6_where_the_brokers_name_has_nothing_else(
    monkeypatch: pytest.MonkeyPatch, host: str, version: int
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names(NAMES))
    with zmq.Context() as context:
        dealer, handshakes = connect_dealer(context, f"tcp://{host}:7", b"i", 1 << 20)
        assert dealer.getsockopt(zmq.IPV6) == version
        handshakes.close()
        dealer.close()


@pytest.mark.parametrize(
    ("bound", "known", "routed", "told"),
    [
        ("tcp://[::]:7", {}, {socket.AF_INET6: "fd00::5"}, "tcp://[fd00::5]:7"),
        ("tcp://[::]:7", {}, {socket.AF_INET: "10.0.0.5", socket.AF_INET6: "fd00::5"}, "tcp://10.0.0.5:7"),
        ("tcp://[::]:7", {socket.AF_INET: "127.0.1.1", socket.AF_INET6: "fd00::6"}, {}, "tcp://[fd00::6]:7"),
        ("tcp://[::]:7", {socket.AF_INET6: "fe80::1%eth0"}, {}, "tcp://127.0.0.1:7"),
        ("tcp://0.0.0.0:7", {socket.AF_INET6: "fd00::6"}, {socket.AF_INET6: "fd00::5"}, "tcp://127.0.0.1:7"),
    ],
)
def test_a_broker_on_every_interface_tells_its_ipv6_address_where_it_has_no_other(
    monkeypatch: pytest.MonkeyPatch, bound: str, known: dict[int, str], routed: dict[int, str], told: str
) -> None:
    def local(host: str, port: int) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if family not in routed:
            raise OSError("Network is unreachable")
        return routed[family]

    monkeypatch.setattr(sockets, "local_address", local)
    monkeypatch.setattr(socket, "getaddrinfo", names({("me", family): ip for family, ip in known.items()}))
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    assert sockets.reachable(bound) == told


@pytest.mark.parametrize("host", ["a..b", ".x", "x" * 64])
def test_a_name_that_cannot_be_one_needs_no_ipv6(host: str) -> None:
    assert not needs_ipv6(f"tcp://{host}:7")


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
