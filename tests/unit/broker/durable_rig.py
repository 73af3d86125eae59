"""A durable state, for tests that write a store, break it and read it again."""

import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from broker.contract import LearnerReport, Lease, RunInfo
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.logs import EventLog
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.journal.file_store import open_file_store
from broker.journal.journal import SEGMENT_BYTES, Journal
from broker.journal.recovery import recover
from broker.journal.store import Store
from common.rollouts import GroupMeta
from tests.broker_rig import node_report, tasks
from tests.waiting import until

RUN = RunInfo("rig", "/nowhere", 2, 3, 3, 10.0, 1 << 30)


def meta(version: int = 0) -> GroupMeta:
    return GroupMeta(version, version, 0.5, 10)


def newest(store: Path) -> Path:
    """The segment that a broker wrote last."""
    return max(store.glob("0*.log"))


@contextmanager
def full_disk(store: Path, room: int = 0) -> Iterator[None]:
    """No file grows beyond the newest segment of the store and `room` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = max((segment.stat().st_size for segment in store.glob("0*.log")), default=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class Rig:
    """One life of a broker without its sockets: `state` records, `settle` waits until that is acknowledged."""

    def __init__(
        self,
        store: Path | Store,
        sync: Literal["fsync", "everysec"] = "fsync",
        segment_bytes: int = SEGMENT_BYTES,
        retain_steps: int = 2,
    ) -> None:
        self.store: Any = open_file_store(store, "rig") if isinstance(store, Path) else store
        self.events = EventLog()
        self.journal = Journal(self.store, sync, segment_bytes)
        store_id = self.store.store_id
        self.state = DeliveryState(
            RUN, events=self.events, recorder=self.journal, retain_steps=retain_steps, store_id=store_id
        )
        try:
            self.found = recover(self.journal, self.state)
        except BaseException:
            self.store.close()
            raise

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> "Rig":
        """With a learner and a node."""
        LearnerRules(self.state).attach(LearnerReport(1, 1, "training", 0))
        NodeRules(self.state).register(node_report())
        return self

    def offer(self, count: int) -> None:
        LearnerRules(self.state).offer(tasks(count, self.state.tasks.next_serial))

    def lease(self, count: int = 2) -> Sequence[Lease]:
        return NodeRules(self.state).lease("n0", 1 << 20, count)

    def complete(self, lease: Lease, size: int = 100) -> bytes:
        payload = b"%d." % lease.task.serial * size
        assert NodeRules(self.state).complete("n0", lease.token, meta(), payload, len(payload))
        return payload

    def ready(self, count: int = 1, size: int = 100) -> list[bytes]:
        """Groups that are offered, leased and handed in; their payloads."""
        self.offer(count)
        return [self.complete(lease, size) for lease in self.lease(count)]

    def step(self, number: int, size: int = 100) -> list[bytes]:
        """Two tasks from the offer to the take; their payloads."""
        payloads = self.ready(2, size)
        assert LearnerRules(self.state).take(number, 2) is not None
        return payloads

    def settle(self) -> None:
        last = self.journal.end_turn()
        until(
            lambda: self.journal.acknowledged >= last or self.journal.end_turn() < 0,
            "acknowledged records",
            told=lambda: self.journal.stuck,
            every_s=0.001,
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.after(-1)]

    def close(self) -> None:
        assert self.journal.close()
