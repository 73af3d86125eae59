"""Large messages on slow links: they cross once, and no deadline passes while they do. A proxy is the link."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
import zmq

from broker import sockets, wire
from broker.client import connection
from broker.client.connection import AsyncBrokerClient, BrokerClient, LoopSocket
from common.errors import BrokerUnreachable
from tests.rigs.brokers import META, node_report, serving, tasks
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LIMIT_S, until, until_async

GROUP_BYTES = 1 << 20
RATE = 1 << 20  # bytes a second
SECONDS = 8  # that a step of as many groups needs
DEADLINE_S, SILENT_S, RETRY_S = 4.0, 4.0, 0.1
HEADERS = 64 << 10  # more than everything beside the groups


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the product's; a step needs twice as long."""
    monkeypatch.setattr(connection, "SILENT_S", SILENT_S)
    monkeypatch.setattr(connection, "LOOK_S", SILENT_S / 16)


@contextmanager
def linked(buffer_bytes: int | None = 64 << 10) -> Iterator[tuple[str, Proxy]]:
    """A broker, and a link to it."""
    with serving(max_message_bytes=64 << 20) as server:
        proxy = Proxy(server.address, buffer_bytes)
        try:
            yield server.address, proxy
        finally:
            proxy.close()


async def fill(address: str, count: int) -> None:
    """Groups 0, 1, ... are ready."""
    with BrokerClient(address, deadline_s=LIMIT_S) as learner:
        await asyncio.to_thread(learner.offer, tasks(count))
    async with AsyncBrokerClient(address, deadline_s=LIMIT_S) as node:
        for first in range(0, count, 2):
            await node.register(node_report(version=first))
            for lease in await node.lease("n0", first, 2, LIMIT_S):
                assert await node.complete("n0", lease.token, META, bytes(GROUP_BYTES))


def test_a_step_of_many_times_the_rate_crosses_the_link_once_and_what_was_asked_meanwhile_is_answered() -> None:
    with linked() as (address, proxy), ThreadPoolExecutor(1) as pool:
        asyncio.run(fill(address, SECONDS))
        proxy.bytes_per_s = RATE
        with BrokerClient(proxy.address, deadline_s=DEADLINE_S, retry_s=RETRY_S) as learner:
            taking = pool.submit(learner.take, 0, SECONDS, 0.0)
            until(lambda: proxy.to_client > GROUP_BYTES)
            assert learner.status().steps_taken == 1, "its deadline waits for the answers before it"
            groups = taking.result(LIMIT_S)
            assert groups is not None
            assert [len(group.payload) for group in groups] == [GROUP_BYTES] * SECONDS
        assert SECONDS * GROUP_BYTES <= proxy.to_client < SECONDS * GROUP_BYTES + HEADERS
        assert proxy.accepted == 1


@pytest.mark.parametrize("buffers", ["small", "megabytes"])
async def test_a_group_of_many_times_the_rate_crosses_the_link_once_and_is_acknowledged(
    buffers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if buffers == "small":
        monkeypatch.setattr(connection, "BUFFER_BYTES", 2 << 20)
    else:  # they acknowledge a group long before the proxy has passed it on
        monkeypatch.setattr(connection, "BUFFER_BYTES_PER_S", RATE / 8)
    size = (SECONDS if buffers == "small" else 6) * RATE
    with linked(64 << 10 if buffers == "small" else None) as (address, proxy):
        with BrokerClient(address, deadline_s=LIMIT_S) as learner:
            await asyncio.to_thread(learner.offer, tasks(2))
        async with AsyncBrokerClient(
            proxy.address, deadline_s=DEADLINE_S, retry_s=RETRY_S, max_message_bytes=size
        ) as node:
            await node.register(node_report())
            [lease] = await node.lease("n0", 0, 1, 0.0)
            proxy.bytes_per_s = RATE
            assert await node.complete("n0", lease.token, META, bytes(size))
        assert size <= proxy.to_server < size + HEADERS
        assert proxy.accepted == 1


def test_a_link_that_stands_still_is_given_up_and_the_answer_comes_once_more_and_not_twice() -> None:
    with linked() as (address, proxy), ThreadPoolExecutor(1) as pool:
        asyncio.run(fill(address, SECONDS))
        proxy.bytes_per_s = RATE
        with BrokerClient(proxy.address, deadline_s=LIMIT_S, retry_s=RETRY_S) as learner:
            taking = pool.submit(learner.take, 0, SECONDS, 0.0)
            until(lambda: proxy.to_client > 2 * GROUP_BYTES)
            proxy.hold()
            held, accepted = proxy.to_client, proxy.accepted
            until(lambda: proxy.accepted > accepted)  # it connects anew
            proxy.release()
            groups = taking.result(LIMIT_S)
            assert groups is not None
            assert len(groups) == SECONDS
        most = held + SECONDS * GROUP_BYTES + 2 * GROUP_BYTES  # buffers may have been full
        assert proxy.to_client < most


def test_a_request_is_sent_once_while_the_connection_stands_however_long_the_answer_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SILENT_S", LIMIT_S)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as slow, ThreadPoolExecutor(1) as pool:
        slow.setsockopt(zmq.LINGER, 0)
        slow.setsockopt(zmq.RCVTIMEO, int(1000 * LIMIT_S))
        address = f"tcp://127.0.0.1:{slow.bind_to_random_port('tcp://127.0.0.1')}"
        with BrokerClient(address, deadline_s=LIMIT_S, retry_s=0.01) as client:
            asking = pool.submit(client.events, -1)
            who, header = slow.recv_multipart()
            assert slow.poll(500) == 0
            answer = wire.Answer(id=wire.decode_request(header, 0).id, value=[])
            slow.send_multipart([who, wire.encode(answer)])
            assert asking.result(LIMIT_S) == []


def test_an_answer_that_gets_lost_on_a_living_connection_is_asked_for_again_on_another_one() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as forgetful, ThreadPoolExecutor(1) as pool:
        forgetful.setsockopt(zmq.LINGER, 0)
        forgetful.setsockopt(zmq.ROUTER_HANDOVER, 1)
        forgetful.setsockopt(zmq.RCVTIMEO, int(1000 * LIMIT_S))
        address = f"tcp://127.0.0.1:{forgetful.bind_to_random_port('tcp://127.0.0.1')}"
        with BrokerClient(address, deadline_s=LIMIT_S, retry_s=RETRY_S) as client:
            asking, began = pool.submit(client.events, -1), time.monotonic()
            who, header = forgetful.recv_multipart()
            again = forgetful.recv_multipart()
            assert again == [who, header], "the same client and request, so that the broker can recognise it"
            assert time.monotonic() - began > SILENT_S
            answer = wire.Answer(id=wire.decode_request(header, 0).id, value=[])
            forgetful.send_multipart([who, wire.encode(answer)])
            assert asking.result(LIMIT_S) == []


def test_calls_shorter_than_the_silence_leave_a_connection_that_was_forgotten_on_the_way() -> None:
    with (
        linked() as (_, proxy),
        BrokerClient(proxy.address, deadline_s=DEADLINE_S / 4, retry_s=RETRY_S) as client,
    ):

        def answered() -> bool:
            try:
                return client.status().groups_ready == 0
            except BrokerUnreachable:
                return False

        until(answered)
        proxy.lose()
        until(answered)
        assert proxy.accepted >= 2


@pytest.mark.parametrize("cut", [False, True], ids=["a shorter one before", "the connection is cut"])
async def test_a_request_that_the_broker_may_answer_late_keeps_its_connection(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_s, wait_s = 2.0, 6.0
    monkeypatch.setattr(connection, "SILENT_S", silent_s)
    with linked() as (address, proxy):
        async with AsyncBrokerClient(proxy.address, deadline_s=LIMIT_S, retry_s=RETRY_S) as node:
            await node.register(node_report())
            with BrokerClient(address, deadline_s=LIMIT_S) as learner:
                await asyncio.to_thread(learner.offer, tasks(1))
            assert await node.lease("n0", 0, 1, silent_s), "it is answered before it must be"
            await asyncio.sleep(0.75 * silent_s)
            leasing = asyncio.create_task(node.lease("n0", 0, 1, wait_s))
            if cut:
                await asyncio.sleep(0.75 * wait_s)
                proxy.cut()
            assert await leasing == []
        assert proxy.accepted == 1 + cut


def test_zeromqs_own_heartbeat_would_cut_a_link_that_one_frame_keeps_busy_so_clients_have_none() -> None:
    """A proof against the library: the heartbeat's answer waits behind the frame, whose bytes do not count."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as beating:
        for socket in (server, beating):
            socket.setsockopt(zmq.LINGER, 0)
        server.bind("tcp://127.0.0.1:*")
        proxy = Proxy(server.getsockopt_string(zmq.LAST_ENDPOINT), 64 << 10)
        beating.setsockopt(zmq.HEARTBEAT_IVL, 200)
        beating.setsockopt(zmq.HEARTBEAT_TIMEOUT, 400)
        beating.connect(proxy.address)
        beating.send(b"here I am")
        who, _ = server.recv_multipart()
        proxy.bytes_per_s = RATE
        server.send_multipart([who, bytes(SECONDS * RATE)])
        until(lambda: proxy.accepted > 1, "the connection to be cut")
        assert not beating.poll(0)
        dealer, handshakes = sockets.connect_dealer(context, "tcp://127.0.0.1:9", b"c", 1 << 20)
        assert dealer.getsockopt(zmq.HEARTBEAT_IVL) == 0
        handshakes.close()
        dealer.close(0)
        proxy.close()


def test_answers_go_out_while_the_broker_is_still_busy_with_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server, BrokerClient(server.address, deadline_s=LIMIT_S) as client, ThreadPoolExecutor(3) as pool:
        client.status()
        events, sent, answered, asked = server._state.event_log.after, threading.Event(), threading.Event(), list[int]()

        def slow(after: int) -> object:
            asked.append(after)
            if len(asked) == 1:  # so that the other two are read in one turn
                assert sent.wait(LIMIT_S)
                time.sleep(0.05)
            elif len(asked) == 3:
                assert answered.wait(LIMIT_S)
            return events(after)

        monkeypatch.setattr(server._state.event_log, "after", slow)
        calls = [pool.submit(client.events, number) for number in range(3)]
        until(lambda: len(client._connection._calls.by_id) == 3)
        sent.set()
        until(lambda: sum(call.done() for call in calls) >= 1, "an answer before the third request is done")
        answered.set()
        assert [call.result(LIMIT_S) for call in calls] == [[]] * 3


@contextmanager
def lone_client(address: str, context: "zmq.Context[zmq.Socket[bytes]]") -> Iterator[LoopSocket]:
    client = LoopSocket(context, address, b"c", 1 << 24, None, lambda frames: None, lambda: None)
    try:
        yield client
    finally:
        client.close()


async def test_bytes_of_another_connection_that_got_the_number_of_the_broken_one_are_no_sign_of_the_broker() -> None:
    with (
        zmq.Context() as context,
        socket.create_server(("127.0.0.1", 0)) as server,
        context.socket(zmq.ROUTER) as broker,
    ):
        broker.bind("tcp://127.0.0.1:*")
        with lone_client(broker.getsockopt_string(zmq.LAST_ENDPOINT), context) as client, ExitStack() as others:
            await until_async(lambda: client.send([b""]))
            number = client.handshakes.connected_fd
            broker.close()
            await until_async(lambda: not client.handshakes.connection)

            def other_end() -> socket.socket | None:
                near = others.enter_context(socket.create_connection(server.getsockname()))
                far = others.enter_context(server.accept()[0])
                ends = {near.fileno(): far, far.fileno(): near}
                return ends.get(number)  # between ZeroMQ's attempts to connect the number is free

            sender = await until_async(other_end)
            client.moves()
            sender.sendall(bytes(HEADERS))
            await until_async(lambda: sockets.tcp_bytes(number)[0] >= HEADERS)
            assert not client.moves()


async def test_what_zeromq_adds_to_many_small_messages_does_not_hide_that_a_large_one_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.rigs.proxy.LINE_CHUNKS", 1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.RCVHWM, 0)
        server.bind("tcp://127.0.0.1:*")
        proxy = Proxy(server.getsockopt_string(zmq.LAST_ENDPOINT), 64 << 10)
        with closing(proxy), lone_client(proxy.address, context) as client:
            await until_async(lambda: client.send([b""]))
            for _ in range(1 << 10):
                await until_async(lambda: client.send([b""] * 256))
            await until_async(lambda: proxy.to_server > 8 * HEADERS)
            proxy.bytes_per_s = HEADERS
            client.send([bytes(4 * HEADERS)])
            await until_async(client.moves)
