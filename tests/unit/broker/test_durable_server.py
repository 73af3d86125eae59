"""The server over a store: when its word goes out, what it says while it cannot, and that it comes back."""

import asyncio
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from broker import main
from broker.client.connection import AsyncBrokerClient, BrokerClient
from broker.journal.segments import SegmentFile
from broker.journal.store import StoreCorrupt, StoreFailed
from common.errors import BrokerError, BrokerUnreachable, UsageError
from tests.rigs import brokers
from tests.rigs.brokers import META, full_disk, learner_report, newest, node_report, tasks
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until
from tests.unit.broker.conftest import Running

job = partial(brokers.job, groups_per_step=1)
REPORT = learner_report()


def stuck(observer: BrokerClient) -> str:
    store = observer.status().store
    assert store is not None
    return store.stuck


async def hand_in(address: str, groups: int, payload: bytes) -> list[bool]:
    async with AsyncBrokerClient(address, deadline_s=LIMIT_S) as node:
        await node.register(node_report())
        leases = await node.lease("n0", 1 << 20, groups, LIMIT_S)
        return [await node.complete("n0", lease.token, META, payload) for lease in leases]


def test_a_stopped_run_goes_on_with_the_same_store_at_the_same_address(tmp_path: Path, running: Running) -> None:
    config = job(tmp_path)
    with running(config) as first, first.client() as learner:
        store_id = learner.attach(REPORT).store_id
        learner.offer(tasks(3))
        assert asyncio.run(hand_in(first.address, 2, b"group")) == [True, True]
        assert learner.take(0, 1, LIMIT_S) is not None
        learner.commit(0)
        events = learner.events(-1)
    with running(config) as second, second.client() as learner:
        assert second.address == first.address
        attached = learner.attach(learner_report(incarnation=2, step=1))
        assert (attached.next_serial, attached.store_id, attached.committed_step) == (3, store_id, 0)
        taken = learner.take(1, 1, LIMIT_S)
        assert taken is not None and [(g.serial, g.payload) for g in taken] == [(1, b"group")]
        assert [e.state for e in learner.ledger()] == ["committed", "taken", "pending"]
        newer = learner.events(-1)
        assert newer[: len(events)] == events, "clients that follow the events miss none and see none twice"
        assert [e.index for e in newer] == list(range(len(newer)))
        store = learner.status().store
        assert store is not None and store.bytes > 0 and store.stuck == ""
    assert not (tmp_path / "ledger-1.json").exists()


def test_a_port_that_somebody_else_took_meanwhile_is_replaced(tmp_path: Path, running: Running) -> None:
    with running(job(tmp_path / "a")) as first:
        pass
    with running(job(tmp_path / "b", address=first.address)), running(job(tmp_path / "a")) as second:
        assert second.address != first.address


def test_without_durability_nothing_is_kept_and_an_older_store_is_set_aside(tmp_path: Path, running: Running) -> None:
    with running(job(tmp_path)) as broker, broker.client() as learner:
        learner.attach(REPORT)
        learner.offer(tasks(1))
    with running(job(tmp_path, durability="memory")) as broker, broker.client() as again:
        assert again.attach(REPORT).next_serial == 0
        assert again.status().store is None
    assert (tmp_path / "store-1" / "store.json").exists() and not (tmp_path / "store").exists()
    assert (tmp_path / "ledger-1.json").exists()


def test_no_promise_is_answered_before_it_is_synced(
    tmp_path: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, synced, sync = threading.Event(), list[int](), SegmentFile.sync
    gate.set()

    def slow(self: SegmentFile) -> None:
        assert gate.wait(LIMIT_S)
        sync(self)
        synced.append(1)

    monkeypatch.setattr(SegmentFile, "sync", slow)
    with (
        running(job(tmp_path)) as broker,
        ThreadPoolExecutor(1) as pool,
        broker.client() as learner,
        broker.client() as observer,
    ):
        learner.attach(REPORT)
        gate.clear()
        offer = pool.submit(learner.offer, tasks(1))
        until(lambda: observer.status().groups_pending)
        assert not offer.done(), "the move is done, its answer waits; others are served meanwhile"
        before = len(synced)
        gate.set()
        assert offer.result(LIMIT_S) == 1
        assert len(synced) > before
        gate.clear()
        learner.report(learner_report(step=1, weights="tcp://127.0.0.1:1"))
        done = pool.submit(learner.report, learner_report("done", step=1))
        until(lambda: (told := observer.status().learner) and told.state == "done")
        time.sleep(0.1)
        assert not done.done(), "nodes leave because of it: it must outlive this broker; progress needs no sync"
        gate.set()
        done.result(LIMIT_S)


def test_on_a_full_disk_everybody_waits_and_is_told_why(
    tmp_path: Path, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running(job(tmp_path)) as broker,
        ThreadPoolExecutor(2) as pool,
        broker.client(deadline_s=3) as learner,
        broker.client() as observer,
    ):
        learner.attach(REPORT)
        learner.offer(tasks(2))
        with full_disk(tmp_path / "store", 4096):
            node = pool.submit(lambda: asyncio.run(hand_in(broker.address, 1, b"x" * 100_000)))
            until(lambda: stuck(observer))
            offer = pool.submit(learner.offer, tasks(1, first=2))
            time.sleep(4.0)  # longer than the learner's deadline
            assert not offer.done() and not node.done(), "they wait, since the broker says that it is there"
        assert node.result(LIMIT_S) == [True]
        assert offer.result(LIMIT_S) == 1
        kinds = [e.kind for e in observer.events(-1)]
        assert kinds.count("store_full") == kinds.count("store_writable") == 1
    told = [r for r in caplog.records if r.name == "broker.client.connection" and str(tmp_path) in r.getMessage()]
    assert len(told) == 2, "once a connection"


def test_a_broker_that_is_stopped_on_a_full_disk_promises_nothing_at_its_end(tmp_path: Path, running: Running) -> None:
    with ThreadPoolExecutor(1) as pool, running(job(tmp_path)) as broker:
        with broker.client() as learner:
            learner.attach(REPORT)
            learner.offer(tasks(1))
        with full_disk(tmp_path / "store"), broker.client(deadline_s=3) as learner, broker.client() as observer:
            offer = pool.submit(learner.offer, tasks(1, first=1))
            until(lambda: stuck(observer))
            broker.server.stop()
            with pytest.raises(BrokerUnreachable):
                offer.result(LIMIT_S)
    with running(job(tmp_path)) as broker, broker.client() as learner:
        assert learner.attach(learner_report(incarnation=2)).next_serial == 1


def test_a_damaged_store_ends_the_command_with_its_place(tmp_path: Path, running: Running) -> None:
    with running(job(tmp_path)) as broker, broker.client() as learner:
        learner.attach(REPORT)
    path = newest(tmp_path / "store")
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with refused(StoreCorrupt, f"{path}: byte 0:") as error:
        main.run_broker(job(tmp_path), b"")
    assert error.value.exit_code == 2
    with pytest.raises(UsageError):
        main.run_broker(job(tmp_path), b"")  # still: and no lock was left behind


def test_a_damaged_group_is_refused_to_the_learner_with_file_and_offset_and_the_others_are_not(
    tmp_path: Path, running: Running
) -> None:
    payload = b"\x01\x02" * 3000
    with running(job(tmp_path)) as broker, broker.client() as learner:
        learner.attach(REPORT)
        learner.offer(tasks(2))
        assert asyncio.run(hand_in(broker.address, 2, payload)) == [True, True]
    path = next(p for p in (tmp_path / "store").glob("0*.log") if payload in p.read_bytes())
    data = bytearray(path.read_bytes())
    offset = data.rindex(payload)
    data[offset + 777] ^= 0xFF
    path.write_bytes(data)
    with running(job(tmp_path)) as broker, broker.client() as learner:
        assert [group.payload for group in learner.take(0, 1, LIMIT_S) or ()] == [payload]
        with refused(BrokerError, path.name, f"byte {offset}", len(payload)):
            learner.take(1, 1, LIMIT_S)


def test_a_disk_that_fails_ends_the_broker_before_it_promises_anything(
    tmp_path: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SegmentFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failed = refused(StoreFailed, str(tmp_path), os.strerror(errno.EIO))
    with failed as error, running(job(tmp_path)) as broker, broker.client(deadline_s=2) as learner:
        learner.attach(REPORT)
        monkeypatch.setattr(SegmentFile, "sync", broken)
        with pytest.raises(BrokerUnreachable):
            learner.offer(tasks(1))
    assert error.value.exit_code == 1
