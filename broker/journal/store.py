"""The seam between the journal and the place where its records lie: a folder (file_store) or Redis (redis_store).

A store keeps a log of records and the payloads of groups. The log begins with a snapshot; compacting replaces the log
by a new snapshot. The history of finished tasks only grows.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from broker.delivery.task_table import Location, StoredPayload
from common.errors import BrokerError, UsageError

RESTORE = "Restore the file from a copy, or start another run from the last checkpoint"


@dataclass(slots=True)
class Record:
    """A record to write; `stored` gets its location when the payload is written."""

    seq: int
    body: bytes
    payload: bytes | memoryview | None = None
    stored: StoredPayload | None = None


class Compaction(ABC):
    """The replacement of the log. The store's thread makes it from values that the broker's loop has captured."""

    seq: int  # the snapshot's sequence number
    # groups to write again, because the store may lack records and history; None when it lacks nothing. `finished` then
    # has all finished tasks.
    rewritten: Sequence[Record] | None

    @abstractmethod
    def finished(self) -> bytes | None:
        """The tasks that ended since the last compaction, as a record of the history; None when none did."""

    @abstractmethod
    def snapshot(self, history: int) -> bytes:
        """The snapshot's body, given the size of the history with `finished`. All records before it are written."""

    @abstractmethod
    def wanted(self) -> Collection[Location]:
        """Payloads that may still be read; all others are deleted."""


class StoredRecord(NamedTuple):
    """A record as it was read; `where` tells a person where it lies."""

    seq: int
    body: bytes
    payload: Location | None
    where: str


class Loaded(NamedTuple):
    """The log, snapshot first; empty for a new store. `torn` says why unacknowledged records were dropped."""

    records: list[StoredRecord]
    torn: str = ""


class Store(ABC):
    """One thread writes; any thread may read payloads."""

    name: str  # where the store is, for people
    store_id: str  # made once. It tells a learner whether the broker still knows what it knew.
    address: str = ""  # where the broker listened last; '' for a new store
    idle_s: float | None = None  # how often `idle` has to be called; None: never

    def listens_at(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def load(self) -> Loaded:
        """The log. Raises StoreCorrupt when something that had been synced is damaged."""

    @abstractmethod
    def history(self, size: int) -> Iterator[bytes]:
        """Records of the first `size` units of the history. Raises StoreCorrupt."""

    @abstractmethod
    def read(self, location: Location) -> bytes:
        """A payload. Raises PayloadUnreadable; PayloadLost when the store no longer has it."""

    def missing(self, locations: Collection[Location]) -> set[Location]:
        """Those whose payload is lost, where that can be known without reading them. Raises StoreUnavailable."""
        return set()

    @abstractmethod
    def append(self, batch: Sequence[Record], *, synced: int, sync: bool) -> None:
        """Write records that follow the last ones.

        Everything up to `synced` was synced before; with `sync` the records must be durable on return. Raises
        StoreUnavailable when nothing was written and it may be tried again, StoreBehind, StoreFenced.
        """

    def idle(self) -> None:
        """Called while there is nothing to write. Raises as `append`."""
        return

    def sync(self) -> None:
        """Make durable what was appended, where `append` has not done it. Raises StoreUnavailable."""
        return

    @abstractmethod
    def compact(self, compaction: Compaction, history: int) -> int:
        """Replace the log, durably. `history` is the size of the history; returns its new size. Raises as `append`."""

    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that the store takes."""

    def close(self) -> None:
        """Let another broker open the store."""
        return


class StoreCorrupt(UsageError):
    """Something that was durable cannot be read any more; the message says where it lay."""

    def __init__(self, where: str, reason: str) -> None:
        self.where = where
        super().__init__(f"{where}: {reason}; what the broker had acknowledged is damaged there. {RESTORE}")


class PayloadUnreadable(BrokerError):
    """A group in the store cannot be read back; the request that wants it is refused."""


class PayloadLost(PayloadUnreadable):
    """The store no longer has the group; it has to be generated again."""


class StoreFailed(BrokerError):
    """The store refused a write for good; nothing after it was acknowledged."""


class StoreUnavailable(Exception):
    """The store cannot be written at the moment; the message says why."""


class StoreBehind(Exception):
    """The store lacks records that it had acknowledged; the message says what it has."""


class StoreFenced(StoreFailed):
    """Another broker leads; this one may write nothing any more."""
