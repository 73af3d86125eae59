"""A broker with keys: who gets in, what each role may ask, and what one is told who may not."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from broker.connect import Access, connect, connect_node
from broker.contract import LearnerReport
from broker.guard.authorization import PERMITTED, Roles
from broker.messaging import wire
from broker.server.server import BrokerServer
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.rollouts import Task
from common.security.credentials import Identity, KeyFolder, load_credential
from common.security.curve import BROKEN_S, secure_client
from launch.keys import make, revoke
from tests.broker_rig import META, new_state, node_report, serving

WAIT_S = 120.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = KeyFolder(tmp_path_factory.mktemp("keys") / "k")
    make(folder, ["a", "b"])
    return folder.path


def secured(keys: Path | None, address: str = "tcp://127.0.0.1:0", **more: Any) -> AbstractContextManager[BrokerServer]:
    return serving(address, credentials=str(keys) if keys else None, **more)


def access(server: BrokerServer, role: Any, keys: Path | None, name: str = "") -> Access:
    return Access(
        address=server.address,
        role=role,
        deadline_s=WAIT_S,
        retry_s=0.5,
        credentials=str(keys) if keys else None,
        name=name,
    )


def offer(server: BrokerServer, keys: Path, count: int = 4) -> None:
    with connect(access(server, "learner", keys)) as learner:
        learner.attach(LearnerReport(1, 1, "starting", 0))
        learner.offer([Task(i, b"{}", i, 4) for i in range(count)])


def as_node(server: BrokerServer, keys: Path, name: str, work: Callable[[Any], Any]) -> Any:
    async def scenario() -> Any:
        async with connect_node(access(server, "node", keys, name)) as node:
            return await work(node)

    return asyncio.run(scenario())


def test_learner_node_and_observer_do_their_work_with_their_keys(keys: Path) -> None:
    async def roll_out(node: Any) -> bool:
        await node.register(node_report())
        [lease] = await node.lease("n0", 0, 1, 5)
        return await node.complete("n0", lease.token, META, b"group")

    with secured(keys) as server:
        offer(server, keys)
        assert as_node(server, keys, "a", roll_out) is True
        with connect(access(server, "observer", keys)) as observer:
            assert observer.status().groups_ready == 1
            assert [e.state for e in observer.ledger()] == ["ready", "pending", "pending", "pending"]
            assert observer.status().denied_requests == 0


def test_a_key_that_is_not_in_the_list_is_told_so_long_before_the_deadline(keys: Path, tmp_path: Path) -> None:
    other = KeyFolder(tmp_path / "other")
    make(other, ["a"])
    strange = load_credential(other.path, "learner")
    ours = load_credential(keys, "learner").server_public
    other.learner.write_text(other.learner.read_text().replace(strange.server_public, ours))
    with secured(keys) as server:
        started = time.monotonic()
        said = pytest.raises(UsageError, match=r"refused this key.*'learner' is not in its list")
        with connect(access(server, "learner", other.path)) as learner, said as caught:
            learner.status()
        assert caught.value.exit_code == 2
        assert time.monotonic() - started < WAIT_S / 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_key_of_another_folder_is_told_so_long_before_the_deadline(
    keys: Path, tmp_path: Path, asynchronous: bool
) -> None:
    other = KeyFolder(tmp_path / "other")
    make(other, ["a"])
    with secured(keys) as server:
        started = time.monotonic()
        with pytest.raises(UsageError, match=r"refused this key.*are both from one key folder"):
            if asynchronous:
                as_node(server, other.path, "a", lambda node: node.register(node_report()))
            else:
                with connect(access(server, "observer", other.path)) as observer:
                    observer.status()
        assert time.monotonic() - started < WAIT_S / 2


def test_a_client_without_a_key_is_told_what_to_set(keys: Path) -> None:
    said = pytest.raises(UsageError, match=r"set broker\.credentials")
    with secured(keys) as server, connect(access(server, "observer", None)) as observer, said:
        observer.status()


def test_a_client_with_a_key_does_not_trust_a_broker_without_one(keys: Path) -> None:
    said = pytest.raises(UsageError, match="has no keys")
    with secured(None) as server, connect(access(server, "observer", keys)) as observer, said:
        observer.status()


def test_a_connection_that_was_good_once_is_not_given_up_when_a_forwarder_has_nobody_to_forward_to(keys: Path) -> None:
    with forwarding() as forwarder:
        with secured(keys) as server:
            forwarder.target = server.address
            reached = msgspec.structs.replace(access(server, "observer", keys), address=forwarder.address)
            observer = connect(reached)
            assert observer.status().groups_pending == 0
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(observer_status, observer)
            time.sleep(BROKEN_S + 1)  # every attempt is accepted, and ends during the handshake
            assert not waiting.done()
            with secured(keys) as server:
                forwarder.target = server.address
                assert waiting.result(WAIT_S) == 0
            observer.close()


def test_no_broker_at_all_is_still_unreachable_and_not_a_wrong_key(keys: Path) -> None:
    nowhere = Access(address="tcp://127.0.0.1:9", role="observer", deadline_s=0.5, credentials=str(keys))
    with connect(nowhere) as observer, pytest.raises(BrokerUnreachable, match="is it running"):
        observer.status()


def test_a_node_can_neither_write_the_learners_state_nor_read_the_ledger(keys: Path) -> None:
    with secured(keys) as server:
        offer(server, keys)
        pretending = keys / "nodes" / "a.json"
        with connect(access(server, "observer", pretending)) as node:  # a node's key behind the synchronous client
            assert node.status().groups_pending == 4
            for forbidden in (
                lambda: node.commit(0),
                lambda: node.take(0, 1, 0.0),
                lambda: node.offer([Task(4, b"{}", 4, 4)]),
                lambda: node.attach(LearnerReport(2, 2, "starting", 0)),
                lambda: node.report(LearnerReport(2, 9, "failed", 0)),
                node.ledger,
                lambda: node.events(0),
            ):
                with pytest.raises(BrokerError, match="credential 'a' has the role node, which may not send"):
                    forbidden()
            status = node.status()
        assert (status.denied_requests, status.refused_messages, status.groups_pending) == (7, 7, 4)
        assert status.learner is not None
        assert status.learner.incarnation == 1


def test_an_observer_can_change_nothing_and_a_learner_is_no_node(keys: Path) -> None:
    with secured(keys) as server:
        said = pytest.raises(BrokerError, match="role observer, which may not send Commit")
        with connect(access(server, "observer", keys)) as observer, said:
            observer.commit(0)
        with raw(server, keys / "learner.json") as socket:
            reply = ask(socket, wire.Register(id=3, report=node_report()))
            assert isinstance(reply, wire.Refused)
            assert "role learner, which may not send Register" in reply.reason


def test_a_node_id_belongs_to_the_credential_that_took_it_first(keys: Path) -> None:
    async def honest(node: Any) -> Any:
        await node.register(node_report())
        return await node.lease("n0", 0, 1, 5)

    with secured(keys) as server:
        offer(server, keys)
        [lease] = as_node(server, keys, "a", honest)
        for attack in (
            lambda node: node.register(node_report(pid=2)),
            lambda node: node.lease("n0", 0, 4, 0),
            lambda node: node.heartbeat(node_report(), [lease.token]),
            lambda node: node.complete("n0", lease.token, META, b"forged"),
            lambda node: node.fail("n0", lease.token, "forged"),
            lambda node: node.release("n0", [lease.token]),
            lambda node: node.leave("n0"),
        ):
            with pytest.raises(BrokerError, match="node id 'n0' belongs to another credential"):
                as_node(server, keys, "b", attack)
        with connect(access(server, "observer", keys)) as observer:
            assert (observer.status().groups_leased, observer.status().denied_requests) == (1, 7)
        done = as_node(server, keys, "a", lambda node: node.complete("n0", lease.token, META, b"group"))
        assert done is True


def test_a_token_of_another_node_is_of_no_use_under_ones_own_id(keys: Path) -> None:
    async def honest(node: Any) -> Any:
        await node.register(node_report())
        return await node.lease("n0", 0, 1, 5)

    async def thief(node: Any) -> bool:
        await node.register(node_report("n1"))
        return await node.complete("n1", lease.token, META, b"forged")

    with secured(keys) as server:
        offer(server, keys)
        [lease] = as_node(server, keys, "a", honest)
        assert as_node(server, keys, "b", thief) is False


def test_the_id_of_a_node_that_is_gone_may_be_taken_over_by_another_credential() -> None:
    now = 0.0
    state = new_state(clock=lambda: now)
    roles = Roles(state)
    a, b = Identity("A" * 40, "node", "a"), Identity("B" * 40, "node", "b")
    register = wire.Register(id=0, report=node_report())
    lease = wire.AskLease(id=1, node_id="n0", version=0, max_groups=1, wait_s=0)
    assert roles.refusal(a, register) == ""
    state.register(node_report())
    assert "another credential" in roles.refusal(b, register)
    now = 31.0
    state.expire()
    assert "another credential" in roles.refusal(b, lease)
    assert roles.refusal(b, register) == ""
    assert "another credential" in roles.refusal(a, lease)


def test_every_request_is_permitted_to_some_role_and_none_to_all_but_the_status() -> None:
    requests = set(wire.AnyRequest.__args__)
    assert set().union(*PERMITTED.values()) == requests
    assert set.intersection(*(set(kinds) for kinds in PERMITTED.values())) == {wire.AskStatus}


def test_a_credential_made_while_the_broker_runs_gets_in_and_a_revoked_one_is_out_at_once(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "k")
    make(folder, ["a"])
    with secured(folder.path) as server:
        make(folder, ["late"])
        as_node(server, folder.path, "late", lambda node: node.register(node_report("late")))

        async def until_revoked(node: Any) -> None:
            await node.register(node_report("late"))
            revoke(folder, "late")
            end = time.monotonic() + WAIT_S
            while time.monotonic() < end:
                await node.heartbeat(node_report("late"), [])
                await asyncio.sleep(0.1)

        with pytest.raises(BrokerError, match="this key was revoked"):
            as_node(server, folder.path, "late", until_revoked)


def test_a_list_that_turns_unreadable_keeps_the_last_good_one_in_force(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "k")
    make(folder, ["a"])
    with secured(folder.path) as server:
        folder.allowed.write_text("{half a fi")
        with connect(access(server, "observer", folder.path)) as observer:
            assert observer.status().groups_pending == 0


def test_a_broker_whose_keys_are_missing_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"broker\.credentials: .*server\.json does not exist"), secured(tmp_path):
        pass


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://[::1]:0", "tcp://localhost:0"])
def test_with_keys_a_broker_listens_beyond_loopback_and_tells_an_address_that_can_be_connected_to(
    keys: Path, address: str
) -> None:
    if "[" in address and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with secured(keys, address) as server:
        assert "0.0.0.0" not in server.address
        assert "[::]" not in server.address
        assert not server.address.endswith(":0")
        with connect(access(server, "observer", keys)) as observer:
            assert observer.status().address == server.address


def test_a_host_name_that_nobody_knows_is_a_usage_error(keys: Path) -> None:
    with pytest.raises(UsageError, match="no address is known for"), secured(keys, "tcp://no-such-host.invalid:0"):
        pass


def test_without_keys_the_refusal_of_an_open_address_names_the_command_that_makes_them() -> None:
    with pytest.raises(UsageError, match="slipstream keys DIR"), secured(None, "tcp://0.0.0.0:0"):
        pass


@contextmanager
def raw(server: BrokerServer, credential: Path) -> Iterator["zmq.Socket[bytes]"]:
    found = load_credential(credential, "observer")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        secure_client(socket, found, found.server_public)
        socket.connect(server.address)
        yield socket


def ask(socket: "zmq.Socket[bytes]", request: wire.Request) -> wire.AnyReply:
    socket.send_multipart([wire.encode(request)])
    header, *rest = socket.recv_multipart()
    return wire.decode_reply(header, len(rest))


class Forwarder:
    """Accepts connections and joins them to `target`; without one it ends them at once, as a tunnel would."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        self.target = ""
        self._listener = listener

    def run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", int(self.target.rpartition(":")[2])), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def forwarding() -> Iterator[Forwarder]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        forwarder = Forwarder(listener)
        thread = threading.Thread(target=forwarder.run)
        thread.start()
        yield forwarder
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def observer_status(observer: Any) -> int:
    return observer.status().groups_pending


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
