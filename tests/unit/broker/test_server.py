"""The ZeroMQ server: strange messages, lost replies, gone clients, addresses."""

import asyncio
import os
import socket as posix_socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from broker import sockets, wire
from broker.client.connection import AsyncBrokerClient, BrokerClient
from broker.contract import LearnerReport, Lease
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.server.handlers import LongPolls
from broker.server.server import BrokerServer
from broker.sockets import PING_S, SILENT_S
from common.errors import BrokerError, BrokerUnreachable, UsageError
from tests.rigs.brokers import MAX_MESSAGE_BYTES, META, ask, dealer, new_state, node_report, run_info, serving, tasks
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until, until_async


def offer(address: str, count: int) -> None:
    with BrokerClient(address, deadline_s=LIMIT_S) as learner:
        learner.offer(tasks(count))


def test_malformed_messages_are_refused_counted_and_answered_and_the_broker_continues() -> None:
    bad = [
        [b""],
        [b"not msgpack"],
        [b"\xc1" * 50, b"payload"],
        [b"\x91" * 50_000],
        [wire.encode(wire.AskStatus(id=1)), b"unexpected payload"],
        [wire.encode(wire.Complete(id=2, node_id="n", token="t", meta=META))],
        [msgspec.msgpack.encode({"type": "status", "id": 3, "schema": 99})],
        [b"a"] * 200,
    ]
    with serving() as server, dealer(server.address) as socket, zmq.Context() as context:
        for frames in bad:
            socket.send_multipart(frames)
            reply = wire.decode_reply(socket.recv())
            assert isinstance(reply, wire.Refused), frames[0][:20]
            assert reply.reason
        assert ask(socket, wire.AskStatus(id=7)).refused_messages == len(bad)
        with context.socket(zmq.REQ) as other:
            other.setsockopt(zmq.LINGER, 0)
            other.connect(server.address)
            other.send(b"a REQ socket puts an empty frame where the header stands")
            until(lambda: ask(socket, wire.AskStatus(id=8)).refused_messages == len(bad) + 1)


async def test_the_client_refuses_an_oversized_group_before_sending_it() -> None:
    async with AsyncBrokerClient("tcp://127.0.0.1:9", max_message_bytes=100) as node:
        with refused(BrokerError, "101 bytes", "broker.max_message_bytes (100)"):
            await node.complete("n0", "t", META, bytes(101))


def test_a_repeated_offer_or_lease_request_is_answered_as_the_first_time() -> None:
    with serving() as server, dealer(server.address) as socket:
        offering = wire.Offer(id=2, tasks=tasks(4))
        assert ask(socket, offering) == ask(socket, offering) == 4
        ask(socket, wire.Register(id=0, report=node_report()))
        request = wire.AskLease(id=1, node_id="n0", version=0, max_groups=2, wait_s=0)
        first, second = ask(socket, request), ask(socket, request)
        assert [le.task.serial for le in first] == [0, 1]
        assert second == first


def test_leases_for_a_client_that_is_gone_go_back_without_an_attempt() -> None:
    with serving() as server:
        with dealer(server.address) as socket:
            ask(socket, wire.Register(id=0, report=node_report()))
            socket.send(wire.encode(wire.AskLease(id=1, node_id="n0", version=0, max_groups=2, wait_s=30)))
            assert socket.poll(200) == 0
        time.sleep(0.3)
        offer(server.address, 2)
        with BrokerClient(server.address, deadline_s=LIMIT_S) as observer:
            until(lambda: observer.status().groups_pending == 2)
            assert [e.attempts for e in observer.ledger()] == [0, 0]


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[AsyncBrokerClient, str]]:
    """A registered node and the address of its broker."""
    with serving() as server:
        async with AsyncBrokerClient(server.address, deadline_s=LIMIT_S) as node:
            await node.register(node_report())
            yield node, server.address


async def test_a_node_is_refused_whatever_it_asks_by_another_runs_broker_at_the_address_of_its_own() -> None:
    """Otherwise it samples that run's tasks with weights of its own run. Both runs have a node of this name."""
    report = node_report(version=57, run_id="a")
    other = new_state(run_info(name="other", run_dir="/runs/other", run_id="b"))
    NodeRules(other).register(node_report(pid=2, run_id="b"))
    LearnerRules(other).offer(tasks(2))
    with serving(state=new_state(run_info(run_id="a"))) as server:
        address = server.address
        node = AsyncBrokerClient(address, deadline_s=LIMIT_S, retry_s=0.1)
        assert (await node.register(node_report(version=57))).run_id == "a"
        waiting = asyncio.create_task(node.lease("n0", 57, 2, LIMIT_S))  # the other broker gets this one again
        until(lambda: "n0" in server._state.fleet.nodes)
        await asyncio.sleep(0.1)
    with serving(address, state=other):
        async with node, AsyncBrokerClient(address, deadline_s=LIMIT_S) as heartbeats:
            for asked in (
                waiting,
                node.lease("n0", 57, 2, 0.0),
                node.complete("n0", "t", META, b"group"),
                node.fail("n0", "t", "it failed", tokens=5),
                node.release("n0", ["t"]),
                node.register(report),
                heartbeats.heartbeat(report, ["t"]),
                node.leave("n0"),
            ):
                with refused(BrokerError, "'other' of /runs/other, id b", "id a"):
                    await asked
            assert [entry.state for entry in other.tasks.page(0, False)] == ["pending", "pending"]
            assert (other.stale_results, other.fleet.waste(), other.fleet.nodes["n0"].report.pid) == (0, {}, 2)
            async with AsyncBrokerClient(address, deadline_s=LIMIT_S) as newcomer:
                assert (await newcomer.register(node_report("n1"))).name == "other"


def serials(leases: Sequence[Lease]) -> list[int]:
    return [lease.task.serial for lease in leases]


async def test_a_lease_cancelled_while_it_waits_or_while_its_answer_is_under_way_leaks_nothing() -> None:
    async with joined() as (node, address):
        waiting = asyncio.create_task(node.lease("n0", 0, 4, 30))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(offer, address, 2)
        for _ in range(20):  # the answer comes before, during or after the cancellation
            waiting = asyncio.create_task(node.lease("n0", 0, 4, 30))
            await asyncio.sleep(0)
            time.sleep(0.005)
            waiting.cancel()
            [got] = await asyncio.gather(waiting, return_exceptions=True)
            if not isinstance(got, asyncio.CancelledError):  # it was quicker than the cancellation
                await node.release("n0", [le.token for le in got])
            again = await node.lease("n0", 0, 4, 5)
            assert serials(again) == [0, 1]
            await node.release("n0", [le.token for le in again])


async def test_a_cancelled_lease_that_no_broker_hears_of_is_forgotten() -> None:
    async with AsyncBrokerClient("tcp://127.0.0.1:9", deadline_s=0.1) as node:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(node.lease("n0", 0, 4, 30), 0.01)
        await until_async(lambda: not node._background)
        assert not node._unwanted


async def test_many_requests_are_in_flight_at_once() -> None:
    async with joined() as (node, _):
        waiting = asyncio.create_task(node.lease("n0", 0, 4, 3))
        beats = await asyncio.gather(*(node.heartbeat(node_report(), []) for _ in range(200)))
        assert len(beats) == 200
        assert not waiting.done()
        await node.leave("n0")
        assert await waiting == []


def test_a_request_waits_for_a_broker_that_comes_back_at_the_same_address(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/broker"
    with BrokerClient(address, deadline_s=LIMIT_S, retry_s=0.2) as learner, ThreadPoolExecutor(1) as pool:
        with serving(address):
            assert pool.submit(learner.status).result(LIMIT_S).address == address
        attached = pool.submit(learner.attach, LearnerReport(1, 1, "starting", 0))
        time.sleep(0.5)
        assert not attached.done()
        with serving(address):
            assert attached.result(LIMIT_S).next_serial == 0


async def test_a_waiting_lease_is_asked_for_once_and_again_when_the_broker_came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, state = f"ipc://{tmp_path}/broker", new_state()
    asked, reminders = list[int | None](), list[int]()
    lease, attempt = NodeRules.lease, AsyncBrokerClient._attempt
    monkeypatch.setattr(NodeRules, "lease", lambda self, *request: asked.append(request[1]) or lease(self, *request))
    monkeypatch.setattr(AsyncBrokerClient, "_attempt", lambda self, call: reminders.append(1) or attempt(self, call))
    async with AsyncBrokerClient(address, deadline_s=LIMIT_S, retry_s=0.05) as node:
        with serving(address, state) as first:
            await node.register(node_report())
            waiting = asyncio.create_task(node.lease("n0", 0, 4, LIMIT_S))
            await until_async(lambda: len(reminders) >= 8)
            assert asked.count(0) == 1
            monkeypatch.setattr(first._handlers, "parked", LongPolls())  # it ends without an answer, as when killed
        with serving(address), refused(BrokerError, "n0"):
            await waiting


def test_the_kernel_looks_for_peers_that_vanished() -> None:
    with serving() as server, dealer(server.address) as socket:
        ask(socket, wire.AskStatus(id=1))
        floods = server._guard._floods
        assert floods is not None
        until(lambda: floods.connections)
        with posix_socket.socket(fileno=os.dup(next(iter(floods.connections)))) as connection:
            assert connection.getsockopt(posix_socket.SOL_SOCKET, posix_socket.SO_KEEPALIVE)
            options = (posix_socket.TCP_KEEPIDLE, posix_socket.TCP_KEEPINTVL, posix_socket.TCP_KEEPCNT)
            idle_s, between_s, probes = (connection.getsockopt(posix_socket.IPPROTO_TCP, o) for o in options)
            assert (idle_s, between_s * probes) == (PING_S, SILENT_S)


def test_no_broker_is_unreachable_at_its_address_and_told_apart_from_one_that_does_not_answer() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        there = silent.bind_to_random_port("tcp://127.0.0.1")
        for port, said in (
            (9, r"cannot be connected to; is it running\?"),
            (there, "is connected but does not answer"),
        ):
            address = f"tcp://127.0.0.1:{port}"
            told = pytest.raises(BrokerUnreachable, match=f"{address} {said}")
            with BrokerClient(address, deadline_s=0.5) as learner, told:
                learner.status()


def test_a_broker_that_is_told_to_stop_the_job_ends_when_all_have_left_and_says_so_before() -> None:
    state = new_state()
    NodeRules(state).register(node_report())
    server = BrokerServer(state, ["tcp://127.0.0.1:0"], MAX_MESSAGE_BYTES)
    with ThreadPoolExecutor() as pool, BrokerClient(server.address, deadline_s=LIMIT_S) as client:
        running = pool.submit(server.run)
        assert client.stop().present == ["n0"]
        server.stop()  # as SIGTERM from a supervisor, which sees the roles end before anybody else
        NodeRules(state).leave("n0")
        assert client.stop().present == []
        running.result(LIMIT_S)


def test_stopping_answers_what_is_parked() -> None:
    with serving() as server, dealer(server.address) as socket:
        request = wire.Take(id=5, step=0, count=1, wait_s=60)
        socket.send(wire.encode(request))
        assert socket.poll(200) == 0
        server.stop()
        reply = wire.decode_reply(socket.recv())
        assert isinstance(reply, wire.Answer)
        assert (reply.id, request.read(reply.value, ())) == (5, None)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://127.0.0.2:0", "ipc://{}/broker"])
def test_two_brokers_at_one_address_is_a_usage_error_that_says_what_to_do(address: str, tmp_path: Path) -> None:
    with posix_socket.socket(posix_socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/broker")  # the path of a broker that died is taken over
    with serving(address.format(tmp_path)) as server:
        with refused(UsageError, "broker.address", server.address) as error:
            BrokerServer(new_state(), [server.address], MAX_MESSAGE_BYTES)
        assert error.value.exit_code == 2
        with BrokerClient(server.address, deadline_s=LIMIT_S) as observer:
            assert observer.status().address == server.address


def test_a_leader_gets_its_address_though_another_broker_tried_it_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, sleep = threading.Event(), time.sleep
    monkeypatch.setattr(sockets.time, "sleep", lambda seconds: tried.set() or sleep(seconds))
    with zmq.Context() as context, ThreadPoolExecutor(1) as pool:
        other = sockets.bind_router(context, ["tcp://127.0.0.1:0"], 1 << 20)
        address = other.getsockopt_string(zmq.LAST_ENDPOINT)
        leader = pool.submit(BrokerServer, new_state(), [address], MAX_MESSAGE_BYTES, bind_wait_s=LIMIT_S)
        assert tried.wait(LIMIT_S), "the leader asks again"
        other.close()
        server = leader.result(LIMIT_S)
        assert server.address == address
        server.close()


BEYOND = ("tcp://0.0.0.0:0", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://example.org:1")
NONE = ("127.0.0.1:5", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "udp://x:1", "ipc://")


def test_addresses_beyond_loopback_and_those_that_are_none_are_refused() -> None:
    beyond = [(address, "slipstream keys DIR") for address in BEYOND]
    for address, fact in [*beyond, *((address, "tcp://HOST:PORT") for address in NONE)]:
        with refused(UsageError, "broker.address", address, fact):
            BrokerServer(new_state(), [address], MAX_MESSAGE_BYTES)
