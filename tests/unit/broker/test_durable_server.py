"""The server over a store: when its word goes out, what it says while it cannot, and that it comes back."""

import asyncio
import json
import logging
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from broker import main
from broker.connect import Access, connect_node
from broker.contract import LearnerReport, NodeReport
from broker.journal.file_store.segment_file import SegmentFile
from broker.journal.store import StoreCorrupt, StoreFailed
from broker.messaging.async_client import AsyncBrokerClient
from broker.messaging.sync_client import BrokerClient
from broker.server import bind
from broker.server.server import BrokerServer
from common.config.schema import Config
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.rollouts import GroupMeta, Task
from common.security.credentials import KeyFolder
from launch.keys import make
from tests import broker_rig

META = GroupMeta(0, 0, 0.5, 10)
job = partial(broker_rig.job, groups_per_step=1)
REPORT = LearnerReport(5, 1, "training", 0)
NODE = NodeReport("n0", 1, "h", "generating", 0)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[BrokerServer]:
    made: list[BrokerServer] = []

    class Remembered(BrokerServer):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(bind, "BrokerServer", Remembered)
    return made


@contextmanager
def running(config: Config, servers: list[BrokerServer]) -> Iterator[str]:
    """One life of a broker; gives its address."""
    run_dir = Path(config.run.dir)
    with ThreadPoolExecutor(1) as pool:
        life = pool.submit(main.run_broker, config, b"{}")
        end = time.monotonic() + 20
        while not (run_dir / "broker.json").exists():
            assert time.monotonic() < end
            if life.done():
                life.result()
            time.sleep(0.01)
        server = servers[-1]
        try:
            yield json.loads((run_dir / "broker.json").read_text())["address"]
        finally:
            server.stop()
            assert life.result(30) == 0


def stuck(observer: BrokerClient) -> str:
    store = observer.status().store
    assert store is not None
    return store.stuck


async def hand_in(address: str, groups: int, payload: bytes) -> list[bool]:
    async with AsyncBrokerClient(address, deadline_s=20) as node:
        await node.register(NODE)
        leases = await node.lease("n0", 1 << 20, groups, 5)
        return [await node.complete("n0", lease.token, META, payload) for lease in leases]


def test_a_stopped_run_goes_on_with_the_same_store_at_the_same_address(
    tmp_path: Path, servers: list[BrokerServer]
) -> None:
    config = job(tmp_path)
    with running(config, servers) as first, BrokerClient(first, deadline_s=10) as learner:
        store_id = learner.attach(REPORT).store_id
        learner.offer([Task(n, b"{}", n, 2) for n in range(3)])
        assert asyncio.run(hand_in(first, 2, b"group")) == [True, True]
        assert learner.take(0, 1, 5) is not None
        learner.commit(0)
        events = learner.events(-1)
    with running(config, servers) as second, BrokerClient(second, deadline_s=10) as learner:
        assert second == first
        attached = learner.attach(LearnerReport(5, 2, "training", 1, step=1))
        assert (attached.next_serial, attached.store_id, attached.committed_step) == (3, store_id, 0)
        taken = learner.take(1, 1, 5)
        assert taken is not None and [(g.serial, g.payload) for g in taken] == [(1, b"group")]
        assert [e.state for e in learner.ledger()] == ["committed", "taken", "pending"]
        newer = learner.events(-1)
        assert newer[: len(events)] == events, "clients that follow the events miss none and see none twice"
        assert [e.index for e in newer] == list(range(len(newer)))
        store = learner.status().store
        assert store is not None and store.bytes > 0 and store.stuck == ""
    assert not (tmp_path / "ledger-1.json").exists()


def test_a_port_that_somebody_else_took_meanwhile_is_replaced(tmp_path: Path, servers: list[BrokerServer]) -> None:
    with running(job(tmp_path / "a"), servers) as first:
        pass
    with (
        running(job(tmp_path / "b", address=first), servers),
        running(job(tmp_path / "a"), servers) as second,
    ):
        assert second != first


def test_without_durability_nothing_is_kept_and_an_older_store_is_set_aside(
    tmp_path: Path, servers: list[BrokerServer]
) -> None:
    with (
        running(job(tmp_path), servers) as address,
        BrokerClient(address, deadline_s=10) as learner,
    ):
        learner.attach(REPORT)
        learner.offer([Task(0, b"{}", 0, 2)])
    with (
        running(job(tmp_path, durability="memory"), servers) as address,
        BrokerClient(address, deadline_s=10) as again,
    ):
        assert again.attach(REPORT).next_serial == 0
        assert again.status().store is None
    assert (tmp_path / "store-1" / "store.json").exists() and not (tmp_path / "store").exists()
    assert (tmp_path / "ledger-1.json").exists()


def gated_syncs(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[float]]:
    """An open gate that every sync of a store waits at, and when syncs ended, in monotonic seconds."""
    gate = threading.Event()
    gate.set()
    synced: list[float] = []
    sync = SegmentFile.sync

    def slow(self: SegmentFile) -> None:
        assert gate.wait(20)
        sync(self)
        synced.append(time.monotonic())

    monkeypatch.setattr(SegmentFile, "sync", slow)
    return gate, synced


def test_no_promise_is_answered_before_it_is_synced(
    tmp_path: Path, servers: list[BrokerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, synced = gated_syncs(monkeypatch)
    with (
        running(job(tmp_path), servers) as address,
        ThreadPoolExecutor(1) as pool,
        BrokerClient(address, deadline_s=20) as learner,
        BrokerClient(address, deadline_s=20) as observer,
    ):
        learner.attach(REPORT)
        gate.clear()
        offer = pool.submit(learner.offer, [Task(0, b"{}", 0, 2)])
        end = time.monotonic() + 10
        while observer.status().groups_pending == 0:
            assert time.monotonic() < end
        assert not offer.done(), "the move is done, its answer waits; others are served meanwhile"
        before = len(synced)
        gate.set()
        assert offer.result(20) == 1
        assert len(synced) > before


def test_the_learners_last_word_is_acknowledged_when_it_is_synced_and_its_progress_at_once(
    tmp_path: Path, servers: list[BrokerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, _ = gated_syncs(monkeypatch)
    with (
        running(job(tmp_path), servers) as address,
        ThreadPoolExecutor(1) as pool,
        BrokerClient(address, deadline_s=20) as learner,
        BrokerClient(address, deadline_s=20) as observer,
    ):
        learner.attach(REPORT)
        gate.clear()
        learner.report(LearnerReport(5, 1, "training", 1, weights_address="tcp://127.0.0.1:1"))
        done = pool.submit(learner.report, LearnerReport(5, 1, "done", 1))
        end = time.monotonic() + 10
        while (told := observer.status().learner) is None or told.state != "done":
            assert time.monotonic() < end
        time.sleep(0.1)
        assert not done.done(), "nodes leave because of it: it must outlive this broker"
        gate.set()
        done.result(20)


def test_a_living_node_keeps_its_name_from_other_credentials_across_restarts_of_the_broker(
    tmp_path: Path, servers: list[BrokerServer]
) -> None:
    make(KeyFolder(tmp_path / "keys"), ["a", "b"])
    config = job(tmp_path / "run", credentials=str(tmp_path / "keys"))

    async def register(address: str, name: str) -> None:
        access = Access(address=address, role="node", deadline_s=20, credentials=str(tmp_path / "keys"), name=name)
        async with connect_node(access) as node:
            await node.register(NODE)

    with running(config, servers) as address:
        asyncio.run(register(address, "a"))
    for _ in range(2):  # from the moves, and from a snapshot
        with running(config, servers) as address, pytest.raises(BrokerError, match="belongs to another credential"):
            asyncio.run(register(address, "b"))
    with running(config, servers) as address:
        asyncio.run(register(address, "a"))


def test_on_a_full_disk_everybody_waits_and_is_told_why(
    tmp_path: Path, servers: list[BrokerServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        running(job(tmp_path), servers) as address,
        ThreadPoolExecutor(2) as pool,
        BrokerClient(address, deadline_s=3) as learner,
        BrokerClient(address, deadline_s=10) as observer,
    ):
        learner.attach(REPORT)
        learner.offer([Task(n, b"{}", n, 2) for n in range(2)])
        size = max(p.stat().st_size for p in (tmp_path / "store").glob("0*.log"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, before[1]))
        try:
            node = pool.submit(lambda: asyncio.run(hand_in(address, 1, b"x" * 100_000)))
            end = time.monotonic() + 20
            while not stuck(observer):
                assert time.monotonic() < end
                time.sleep(0.05)
            offer = pool.submit(learner.offer, [Task(2, b"{}", 2, 2)])
            time.sleep(4.0)  # longer than the learner's deadline
            assert not offer.done() and not node.done(), "they wait, since the broker says that it is there"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert node.result(20) == [True]
        assert offer.result(20) == 1
        kinds = [e.kind for e in observer.events(-1)]
        assert kinds.count("store_full") == kinds.count("store_writable") == 1
    assert any("cannot answer yet" in r.getMessage() and str(tmp_path) in r.getMessage() for r in caplog.records)


def test_a_broker_that_is_stopped_on_a_full_disk_promises_nothing_at_its_end(
    tmp_path: Path, servers: list[BrokerServer]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ThreadPoolExecutor(1) as pool, running(job(tmp_path), servers) as address:
        with BrokerClient(address, deadline_s=10) as learner:
            learner.attach(REPORT)
            learner.offer([Task(0, b"{}", 0, 2)])
        size = max(p.stat().st_size for p in (tmp_path / "store").glob("0*.log"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            with BrokerClient(address, deadline_s=3) as learner, BrokerClient(address, deadline_s=10) as observer:
                offer = pool.submit(learner.offer, [Task(1, b"{}", 1, 2)])
                end = time.monotonic() + 20
                while not stuck(observer):
                    assert time.monotonic() < end
                    time.sleep(0.05)
                servers[-1].stop()
                with pytest.raises(BrokerUnreachable):
                    offer.result(30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with (
        running(job(tmp_path), servers) as address,
        BrokerClient(address, deadline_s=10) as learner,
    ):
        assert learner.attach(LearnerReport(5, 2, "training", 0)).next_serial == 1


def test_a_damaged_store_ends_the_command_with_its_place(tmp_path: Path, servers: list[BrokerServer]) -> None:
    with (
        running(job(tmp_path), servers) as address,
        BrokerClient(address, deadline_s=10) as learner,
    ):
        learner.attach(REPORT)
    path = max((tmp_path / "store").glob("0*.log"))
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match=rf"{path.name}: byte 0: .*damaged") as error:
        main.run_broker(job(tmp_path), b"")
    assert error.value.exit_code == 2
    with pytest.raises(UsageError):
        main.run_broker(job(tmp_path), b"")  # still: and no lock was left behind


def test_a_group_that_cannot_be_read_back_is_refused_to_the_learner(
    tmp_path: Path, servers: list[BrokerServer]
) -> None:
    with (
        running(job(tmp_path), servers) as address,
        BrokerClient(address, deadline_s=10) as learner,
    ):
        learner.attach(REPORT)
        learner.offer([Task(0, b"{}", 0, 2)])
        assert asyncio.run(hand_in(address, 1, b"\x01\x02" * 3000)) == [True]
    path = next(p for p in (tmp_path / "store").glob("0*.log") if b"\x01\x02" * 3000 in p.read_bytes())
    path.write_bytes(path.read_bytes().replace(b"\x01\x02" * 3000, b"\x01\x02" * 2999 + b"\x01\x03"))
    damaged = pytest.raises(BrokerError, match=rf"{path.name}: byte \d+: the stored group of 6000 bytes is damaged")
    with (
        running(job(tmp_path), servers) as address,
        BrokerClient(address, deadline_s=10) as learner,
        damaged,
    ):
        learner.take(0, 1, 5)


def test_a_disk_that_fails_ends_the_broker_before_it_promises_anything(
    tmp_path: Path, servers: list[BrokerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SegmentFile) -> None:
        raise OSError(5, "Input/output error")

    failed = pytest.raises(StoreFailed, match=r"store cannot be written: .*Input/output error")
    with (
        failed as error,
        running(job(tmp_path), servers) as address,
        BrokerClient(address, deadline_s=2) as learner,
    ):
        learner.attach(REPORT)
        monkeypatch.setattr(SegmentFile, "sync", broken)
        with pytest.raises(BrokerUnreachable):
            learner.offer([Task(0, b"{}", 0, 2)])
    assert error.value.exit_code == 1
