"""The thread that writes to the store, with a store that a test controls."""

import threading
from collections.abc import Collection
from typing import Any

import pytest

from broker.delivery.moves import Closed
from broker.journal import journal
from broker.journal.journal import Journal, Writer
from broker.journal.store import Compaction, Location, Record, StoreBehind, StoreUnavailable
from tests.rigs.brokers import new_state
from tests.rigs.waiting import LIMIT_S, until


class Rewrite(Compaction):
    """A snapshot that replaces everything before it."""

    rewritten = ()

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def finished(self) -> None:
        return None

    def snapshot(self, history: int) -> bytes:
        return b"all of it"

    def wanted(self) -> Collection[Location]:
        return ()


class Failover:
    """A store that lacks records at its first `behind` writes; after them the server that has every record is back."""

    idle_s = None

    def __init__(self, behind: int) -> None:
        self.written: list[int] = []
        self._behind = behind

    def append(self, batch: list[Record], **_: Any) -> None:
        if self._behind:
            self._behind -= 1
            raise StoreBehind("the replica lacks records")
        self.written += [record.seq for record in batch]

    def compact(self, compaction: Compaction, history: int) -> int:
        self.written.append(compaction.seq)
        return history


def started(store: Failover) -> Writer:
    writer = Writer(store, "fsync", lambda: None)  # type: ignore[arg-type]
    writer.start(0, 0)
    return writer


def test_a_store_that_has_every_record_again_needs_no_rewrite() -> None:
    store = Failover(behind=1)
    writer = started(store)
    writer.put(Record(1, b"a move"))
    writer.kick()
    until(lambda: writer.acknowledged == 1, "the record to be acknowledged")
    assert store.written == [1]
    assert not writer.behind
    assert writer.close(LIMIT_S)


def test_a_rewrite_replaces_the_batch_that_the_store_refuses_and_all_that_was_queued_before() -> None:
    store = Failover(behind=1 << 30)
    writer = started(store)
    writer.put(Record(1, b"a move"))
    writer.kick()
    until(lambda: writer.behind, "a store that lacks records")
    writer.put(Record(2, b"a move"))
    writer.rewrite(Rewrite(3))
    assert not writer.behind
    until(lambda: writer.acknowledged == 3, "the rewrite")
    assert writer.close(LIMIT_S)
    assert (store.written, writer.stuck) == ([3], "")


class Full(Failover):
    """A store whose disk is full from the first snapshot on until `free`."""

    name = "a store"
    full = True

    def missing(self, locations: Collection[Location]) -> set[Location]:
        return set()

    def append(self, batch: list[Record], **_: Any) -> None:
        if self.full:
            raise StoreUnavailable("No space left")
        super().append(batch)

    def close(self) -> None:
        pass


def test_while_the_store_cannot_be_written_only_moves_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics change every second, and a snapshot may be large; a full disk may stay full for days."""
    monkeypatch.setattr(journal, "STATISTICS_S", 0.0)
    monkeypatch.setattr(journal, "RETRY_S", 0.01)
    store, state = Full(behind=0), new_state()
    kept = Journal(store, "fsync", segment_bytes=0)  # type: ignore[arg-type]
    kept.begin(state, 0, 0)

    def happens() -> None:
        state.stale_results += 1  # one of the statistics
        kept.end_turn()

    until(lambda: kept.acknowledged == 1, "the first snapshot")
    until(lambda: happens() or kept.stuck, "a full disk")
    happens()
    queued = len(kept._writer._queue)
    for _ in range(50):
        happens()
    assert len(kept._writer._queue) == queued
    kept.record(Closed())
    happens()
    assert len(kept._writer._queue) == queued + 1, "a snapshot has time"
    store.full = False
    until(lambda: not kept.stuck, "the disk to be free")
    before = kept.seq
    happens()
    assert kept.seq == before + 2, "statistics and a snapshot"
    assert kept.close()


class PausingPayload(bytes):
    """Its size is asked for while the thread takes the record from the queue, which then waits."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        self.asked.set()
        assert self.go_on.wait(LIMIT_S), "the rewrite was queued"
        return 0


def test_a_rewrite_is_written_although_it_comes_while_the_thread_takes_from_the_queue() -> None:
    """The server that has every record came back just before, so the thread continues with the queue."""
    store, payload = Failover(behind=0), PausingPayload()
    writer = started(store)
    writer.put(Record(1, b"a move", payload))
    writer.kick()
    assert payload.asked.wait(LIMIT_S), "the thread takes the record"
    writer.rewrite(Rewrite(2))
    payload.go_on.set()
    assert writer.close(LIMIT_S)
    assert store.written[-1] == 2
    assert writer.acknowledged == 2


def test_a_batch_ends_with_the_record_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "BATCH_BYTES", 10)
    batches: list[list[int]] = []

    class Batches(Failover):
        def append(self, batch: list[Record], **_: Any) -> None:
            batches.append([record.seq for record in batch])

    writer = Writer(Batches(behind=0), "fsync", lambda: None)  # type: ignore[arg-type]
    for seq, size in enumerate([6, 4, 0, 30, 1], start=1):
        writer.put(Record(seq, b"a move", b"x" * size))
    writer.start(0, 0)
    assert writer.close(LIMIT_S)
    assert batches == [[1, 2], [3, 4], [5]]
