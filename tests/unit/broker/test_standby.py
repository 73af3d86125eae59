"""Brokers of one run with broker.store: redis: one leads, the others stand by and take over."""

import asyncio
import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import pytest

from broker import wire
from broker.client.connect import Access, connect, connect_node
from broker.contract import LearnerReport, NodeReport
from broker.journal.redis_store import TERM_S, Leader
from broker.main import run_broker
from broker.server.standby import Standby
from common.config.schema import Config
from common.errors import UsageError
from common.process.logs import setup_logging
from tests.rigs.brokers import META, ask, dealer, job, tasks
from tests.rigs.redis_servers import RedisServer, durable_redis, free_port
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, read_jsonl, until

TAKEOVER_S = 15.0  # after a kill, as docs/redis.md promises


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    found = durable_redis(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


def serve(config: Config, log: Path) -> None:
    setup_logging("broker", str(os.getpid()), log, "info")
    raise SystemExit(run_broker(config, msgspec.json.encode(config)))


class Brokers:
    """Broker processes of one run, by the entry of broker.address that is theirs."""

    def __init__(self, run: Path, server: RedisServer) -> None:
        self.run = run
        run.mkdir()
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.config = job(run, name=run.parent.name, store="redis", redis=server.address, address=addresses)
        self.processes: list[BaseProcess] = []

    def start(self) -> BaseProcess:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(self.config, self.run))
        process.start()
        self.processes.append(process)
        return process

    def access(self, role: str) -> Access:
        address = ",".join(self.config.broker.addresses)
        return Access(address=address, role="learner" if role == "learner" else "observer", deadline_s=LIMIT_S)

    def leader(self) -> int:
        """Process id of the broker that leads, once one does."""
        with connect(self.access("observer")) as observer:
            return observer.status().pid

    def log(self, pid: int) -> str:
        return (self.run / f"broker-{pid}.log").read_text()


@pytest.fixture
def brokers(tmp_path: Path, server: RedisServer) -> Iterator[Brokers]:
    found = Brokers(tmp_path / "run", server)
    yield found
    for process in found.processes:
        process.kill()
        process.join(LIMIT_S)


class Load(threading.Thread):
    """A learner and a node that train one step after the other; `taken` is what every step was given."""

    def __init__(self, brokers: Brokers) -> None:
        super().__init__(daemon=True)
        self.access = brokers.access("learner")
        self.taken: list[list[int]] = []
        self.times: list[float] = []
        self.ending = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._node())
        except BaseException as error:
            self.failure = error

    def check(self) -> None:
        assert self.failure is None, self.failure

    def _train(self) -> None:
        with connect(self.access) as learner:
            learner.attach(LearnerReport(os.getpid(), 1, "training", 0))
            step = 0
            while not self.ending.is_set():
                learner.offer(tasks(2, first=2 * step))
                while (groups := learner.take(step, 2, 5)) is None:
                    pass
                assert [g.payload for g in groups] == [b"group %d" % g.serial for g in groups]
                learner.commit(step)
                self.taken.append([g.serial for g in groups])
                self.times.append(time.monotonic())
                step += 1

    async def _node(self) -> None:
        training = asyncio.create_task(asyncio.to_thread(self._train))
        report = NodeReport("n0", os.getpid(), "host", "generating", 0)
        async with connect_node(msgspec.structs.replace(self.access, role="node")) as node:
            await node.register(report)
            while not training.done():
                report = msgspec.structs.replace(report, policy_version=len(self.taken))
                await node.heartbeat(report, [])
                for lease in await node.lease("n0", report.policy_version, 2, 0.05):
                    await node.complete("n0", lease.token, META, b"group %d" % lease.task.serial)
        await training


@contextmanager
def load(brokers: Brokers) -> Iterator[Load]:
    thread = Load(brokers)
    thread.start()
    yield thread
    thread.ending.set()
    thread.join(LIMIT_S)
    thread.check()
    assert not thread.is_alive(), "learner and node came to their end"
    serials = [serial for step in thread.taken for serial in step]
    assert serials == list(range(len(serials))), "every task was trained exactly once, in order"


@pytest.mark.slow
def test_a_leader_that_wakes_up_late_says_so_stands_by_and_serves_soon_after_the_next_one_was_killed(
    brokers: Brokers,
) -> None:
    processes = [brokers.start() for _ in range(2)]
    with load(brokers) as under_load:
        until(lambda: len(under_load.taken) > 20, "20 steps", check=under_load.check)
        first = brokers.leader()
        os.kill(first, signal.SIGSTOP)
        stopped_at = time.monotonic()
        until(lambda: under_load.times[-1] > stopped_at + TERM_S, "a step with the standby", check=under_load.check)
        os.kill(first, signal.SIGCONT)
        until(lambda: "standing by at" in brokers.log(first), "the former leader to stand by", check=under_load.check)
        assert "term 2" in brokers.log(first)
        steps = len(under_load.taken)
        until(lambda: len(under_load.taken) > steps + 5, "more steps", check=under_load.check)
        second = brokers.leader()
        assert second != first and second in [p.pid for p in processes]
        assert json.loads((brokers.run / "broker.json").read_text())["pid"] == second
        killed_at = time.monotonic()
        os.kill(second, signal.SIGKILL)
        until(lambda: under_load.times[-1] > killed_at + 1, "a step with the former leader", check=under_load.check)
        assert next(at for at in under_load.times if at > killed_at + 0.5) - killed_at < TAKEOVER_S
        assert brokers.leader() == json.loads((brokers.run / "broker.json").read_text())["pid"] == first
    events = [event["kind"] for event in read_jsonl(brokers.run / "events.jsonl")]
    assert "broker_recovered" in events and "store_lost" not in events


def test_a_leader_that_stops_in_good_order_hands_over_at_once(brokers: Brokers) -> None:
    processes = {p.pid: p for p in [brokers.start() for _ in range(2)]}
    first = brokers.leader()
    os.kill(first, signal.SIGTERM)
    processes[first].join(LIMIT_S)
    assert processes[first].exitcode == 0
    assert brokers.leader() != first


def test_an_entry_whose_host_is_unresolvable_is_passed_over_by_brokers_and_clients(brokers: Brokers) -> None:
    ours = brokers.config.broker.addresses[0]
    broker = msgspec.structs.replace(brokers.config.broker, address=["tcp://no-such-host.invalid:5555", ours])
    brokers.config = msgspec.structs.replace(brokers.config, broker=broker)
    assert brokers.start().pid == brokers.leader()
    assert json.loads((brokers.run / "broker.json").read_text())["address"] == ours


def test_clients_of_a_standby_make_it_ask_redis_no_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.server.standby.POLL_S", LIMIT_S)
    standby = Standby(job(tmp_path).broker, tmp_path, ["tcp://127.0.0.1:0"])
    once = iter([Leader("a", "there", "", "", 1, "")])
    with ThreadPoolExecutor(1) as pool, dealer(standby.address) as socket:
        ended = pool.submit(standby.run, once.__next__)
        for number in range(9):
            assert ask(socket, wire.AskStatus(id=number)) == wire.NotLeading(id=number, leader="there")
        standby.stop()
        socket.send(b"so that it looks")
        assert not ended.result(LIMIT_S)
    standby.release()


def test_a_run_folder_without_locks_is_an_error_and_not_a_standby_that_hangs(tmp_path: Path) -> None:
    config = job(tmp_path).broker
    with refused(UsageError, tmp_path / "absent", os.strerror(errno.ENOENT)):
        Standby(config, tmp_path / "absent", ["tcp://127.0.0.1:0"])
