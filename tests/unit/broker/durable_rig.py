"""A durable state in a folder, for tests that write a store, break it and read it again."""

import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from broker.contract import LearnerReport, Lease, NodeReport, RunInfo
from broker.delivery.event_log import EventLog
from broker.delivery.state import DeliveryState
from broker.journal.file_store.store import open_file_store
from broker.journal.journal import SEGMENT_BYTES, Journal
from broker.journal.recovery import recover
from common.rollouts import GroupMeta, Task
from tests.waiting import until

RUN = RunInfo("rig", "/nowhere", 2, 3, 3, 10.0, 1 << 30)


def meta(version: int = 0) -> GroupMeta:
    return GroupMeta(version, version, 0.5, 10)


class Rig:
    """One life of a broker without its sockets: `state` records, `settle` waits until that is acknowledged."""

    def __init__(
        self,
        path: Path,
        sync: Literal["fsync", "everysec"] = "fsync",
        segment_bytes: int = SEGMENT_BYTES,
        retain_steps: int = 2,
    ) -> None:
        store = open_file_store(path, "rig")
        self.folder, self.info, self.store_id = store.folder, store.info, store.store_id
        self.events = EventLog()
        self.journal = Journal(store, sync, segment_bytes)
        self.state = DeliveryState(
            RUN, events=self.events, recorder=self.journal, retain_steps=retain_steps, store_id=self.store_id
        )
        try:
            self.found = recover(self.journal, self.state)
        except BaseException:
            store.close()
            raise

    def begin(self) -> None:
        """A learner and a node."""
        self.state.attach(LearnerReport(1, 1, "training", 0))
        self.state.register(NodeReport("n0", 1, "h", "generating", 0))

    def offer(self, count: int) -> None:
        first = self.state.tasks.next_serial
        self.state.offer([Task(s, b"{}", s, 2) for s in range(first, first + count)])

    def lease(self, count: int = 2) -> Sequence[Lease]:
        return self.state.lease("n0", 1 << 20, count)

    def complete(self, lease: Lease, size: int = 100) -> bytes:
        payload = b"%d." % lease.task.serial * size
        assert self.state.complete("n0", lease.token, meta(), payload, len(payload))
        return payload

    def step(self, number: int, size: int = 100) -> list[bytes]:
        """Two tasks from the offer to the take; their payloads."""
        self.offer(2)
        payloads = [self.complete(lease, size) for lease in self.lease()]
        assert self.state.take(number, 2) is not None
        return payloads

    def settle(self) -> None:
        last = self.journal.end_turn()
        until(lambda: self.journal.acknowledged >= last, "acknowledged records", every_s=0.001)

    def wait_until_writable(self) -> None:
        """The store's thread says so right after what it wrote is acknowledged."""
        until(lambda: not self.journal.stuck, "a store that can be written", every_s=0.001)

    def close(self) -> None:
        assert self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.settle()
            self.close()


@contextmanager
def files_may_not_grow_beyond(size: int) -> Iterator[None]:
    """As on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
