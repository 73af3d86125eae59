"""The synchronous client's thread: shared by the caller's threads, and what becomes of calls when it is gone."""

import errno
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from broker.client import connection
from broker.client.connection import BrokerClient, LoopSocket
from common.errors import BrokerUnreachable, UsageError
from common.security.credentials import Credential
from tests.rigs.brokers import serving, tasks
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until


@pytest.mark.slow
def test_threads_share_one_connection_while_one_of_them_waits_for_groups() -> None:
    with serving() as server, BrokerClient(server.address, deadline_s=LIMIT_S) as client, ThreadPoolExecutor(9) as pool:
        taking = pool.submit(client.take, 0, 1, 3.0)
        offers = [pool.submit(client.offer, tasks(4)) for _ in range(8)]
        assert sorted(offer.result(LIMIT_S) for offer in offers) == [0] * 7 + [4]
        assert not taking.done()
        assert taking.result(LIMIT_S) is None


def test_calls_under_way_and_later_ones_are_told_that_the_connection_was_closed() -> None:
    with serving() as server, ThreadPoolExecutor(1) as pool:
        client = BrokerClient(server.address, deadline_s=LIMIT_S)
        taking = pool.submit(client.take, 0, 1, LIMIT_S)
        assert client.status().groups_ready == 0
        until(lambda: taking.running(), "the take to begin")
        client.close()
        with refused(BrokerUnreachable, server.address, "closed"):
            taking.result(LIMIT_S)
        with refused(BrokerUnreachable, server.address, "closed"):
            client.status()
        client.close()


def test_a_call_that_a_signal_interrupts_leaves_the_client_usable() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with serving() as server, BrokerClient(server.address, deadline_s=LIMIT_S) as client:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                client.take(0, 1, LIMIT_S)
            assert client.offer(tasks(2)) == 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_process_hears_that_the_connection_is_not_its_own_and_an_unforeseen_error_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> bool:
        raise zmq.ZMQError(errno.ENOTSUP)

    with serving() as server, BrokerClient(server.address, deadline_s=LIMIT_S) as client:
        assert client.status().groups_ready == 0
        child = os.fork()
        if child == 0:
            try:
                client.status()
            except BrokerUnreachable:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with monkeypatch.context() as patched:
            patched.setattr(LoopSocket, "send", broken)
            with pytest.raises(zmq.ZMQError):
                client.status()
        assert client.status().groups_ready == 0


def test_a_damaged_key_is_an_error_of_every_call_and_close_does_not_wait_for_a_socket() -> None:
    damaged = "~" * 40  # no Z85 text
    credential = Credential("learner", "learner", damaged, damaged, damaged, damaged)
    with BrokerClient("tcp://127.0.0.1:1", deadline_s=LIMIT_S, credential=credential) as client:
        for _ in range(2):
            with refused(UsageError, "'learner'"):
                client.status()


@pytest.mark.slow
def test_calls_shorter_than_the_silence_of_a_dead_broker_reach_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of learner ranks gives every report up long before SILENT_S."""
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with serving() as server, context, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        addresses = f"tcp://127.0.0.1:{port},{server.address}"
        with BrokerClient(addresses, deadline_s=0.3, retry_s=0.1) as client:

            def answered() -> bool:
                try:
                    return client.status().groups_ready == 0
                except BrokerUnreachable:
                    return False

            until(answered, "an answer of the second broker")
        silent.close(linger=0)
