"""The store in Redis: records in a list, payloads in keys of their own, every write fenced by the leader's term."""

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import msgspec

from broker.journal.redis_store.connection import raise_for
from broker.journal.redis_store.keys import About
from broker.journal.redis_store.term import RENEW_S, Command, Term
from broker.journal.store import (
    Compaction,
    Loaded,
    Location,
    PayloadLost,
    PayloadUnreadable,
    Record,
    StoreCorrupt,
    StoredPayload,
    StoredRecord,
    StoreUnavailable,
)
from common.errors import BrokerError, UsageError

logger = logging.getLogger(__name__)

CHUNK = 1000  # keys or batches in one command

T = TypeVar("T")


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One element of the log: records of one term, each (sequence number, body, bytes of its payload or None)."""

    term: int
    records: list[tuple[int, bytes, int | None]]


_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(Batch)


class RedisStore:
    """See Store. Only the leading broker writes.

    Args:
        term: the term of this broker, which leads; to read only, any term serves.
        run_dir: the run's folder, which must be the one that the store was made for.

    Raises:
        UsageError: the server has a run of that name that is another folder's.
        StoreUnavailable, BrokerError: Redis cannot be asked.
    """

    idle_s: float | None = RENEW_S

    def __init__(self, term: Term, run_dir: str) -> None:
        self.term, self.name = term, f"Redis at {term.name}"
        self.address = ""
        self._client = term.client
        self._sizes: dict[str, int] = {}  # sizes of existing payload keys; 0 where one is not known
        self._stale: list[str] = []  # keys of former stores of the run
        self._bytes = 0
        about, self._seq = about_run(term, run_dir)
        self.is_new = about is None
        self._open(About(secrets.token_hex(8), run_dir) if about is None else about)

    def _open(self, about: About) -> None:
        self.store_id, self._about = about.store, msgspec.json.encode(about)
        self._prefix = f"{self.term.prefix}{about.store}:"

    def begin_anew(self) -> None:
        """Leave the store that Redis has, which lacks acknowledged records, and begin an empty one."""
        about = msgspec.json.decode(self._about, type=About)
        self._open(About(secrets.token_hex(8), about.run_dir))
        self.is_new, self._seq = True, 0

    def listens_at(self, address: str) -> None:
        """See Store. RUN/redis.json has the address."""
        self.address = address

    def load(self) -> Loaded:
        """See Store."""
        records: list[StoredRecord] = []
        log, first = f"{self._prefix}log", 0
        while batches := self._ask(lambda first=first: self._client.lrange(log, first, first + CHUNK - 1)):
            for data in batches:
                self._bytes += len(data)
                batch = _decoded(data, f"{self.name}: batch {first} of {log}")
                for seq, body, length in batch.records:
                    where = f"{self.name}: record {seq} of {log}"
                    if records and seq != records[-1].seq + 1:
                        raise StoreCorrupt(where, f"stands behind record {records[-1].seq}")
                    location = None if length is None else Location(batch.term, seq, length, 0)
                    records.append(StoredRecord(seq, body, location, where))
                first += 1
        self._seq = records[-1].seq if records else 0
        self._find_keys()
        return Loaded(records)

    def history(self, size: int) -> Iterator[bytes]:
        """See Store; the size is in records."""
        key, found = f"{self._prefix}history", 0
        while found < size:
            first, last = found, min(size, found + CHUNK) - 1
            part = self._ask(lambda first=first, last=last: self._client.lrange(key, first, last))
            if len(part) != last - first + 1:
                raise StoreCorrupt(f"{self.name}: {key}", f"expected {size} records, found {first + len(part)}")
            yield from part
            found += len(part)

    def read(self, location: Location) -> bytes:
        """See Store."""
        name = self._name(location)
        try:
            data = self._ask(lambda: self._client.get(name))
        except (StoreUnavailable, BrokerError) as error:
            raise PayloadUnreadable(f"{self.name}: the group {name} cannot be read: {error}") from error
        if data is None:
            raise PayloadLost(f"{self.name}: the group {name} is lost")
        return data

    def missing(self, locations: Collection[Location]) -> set[Location]:
        """See Store."""
        lost: set[Location] = set()
        for part in _chunks(list(locations)):
            pipe = self._client.pipeline(transaction=False)
            for location in part:
                pipe.exists(self._name(location))
            lost |= {location for location, there in zip(part, self._ask(pipe.execute), strict=True) if not there}
        return lost

    def append(self, batch: Sequence[Record], *, synced: int, sync: bool) -> None:
        """See Store. Redis itself syncs, as appendfsync says."""
        sets, locations = self._payloads(batch)
        rows = [(r.seq, r.body, None if r.payload is None else len(r.payload)) for r in batch]
        data = _encode(Batch(self.term.number, rows))
        self.term.write(self._prefix, sets, "append", self._seq, batch[-1].seq, data)
        self._seq = batch[-1].seq
        self._bytes += len(data)
        self._wrote(locations)

    def sync(self) -> None:
        """See Store; append has done it."""

    def idle(self) -> None:
        """See Store: renews the term."""
        self.term.write(self._prefix, [], "append", self._seq, self._seq, "")

    def compact(self, compaction: Compaction, history: int) -> int:
        """See Store. Payloads that are no longer needed are deleted afterwards."""
        if compaction.whole:
            history = 0
        self._restore_payloads(compaction.payloads)
        finished = compaction.finished()
        grown = history + (finished is not None)
        body = compaction.snapshot(grown)
        expected = "" if compaction.whole or self.is_new else self._seq
        data = _encode(Batch(self.term.number, [(compaction.seq, body, None)]))
        arguments = (expected, compaction.seq, data, history, finished or b"", self._about)
        self.term.write(self._prefix, [], "compact", *arguments)
        self.is_new, self._bytes = False, len(data)
        self._seq = compaction.seq
        wanted = {self._name(location): location.length for location in compaction.wanted()}
        self._delete([*(name for name in self._sizes if name not in wanted), *self._stale])
        self._sizes, self._stale = wanted, []
        return grown

    def size_bytes(self) -> int:
        """See Store: the log and the payloads."""
        return self._bytes + sum(self._sizes.copy().values())

    @property
    def last_seq(self) -> int:
        """Sequence number of the last record that Redis has."""
        return self._seq

    def close(self) -> None:
        """See Store; the term ends when the broker resigns."""

    # ---------------------------------------------------------------- inside

    def _name(self, location: Location) -> str:
        return f"{self._prefix}p:{location.segment}:{location.offset}"

    def _payloads(self, batch: Sequence[Record]) -> tuple[list[Command], list[tuple[StoredPayload, Location]]]:
        """Commands that write the payloads, and where each will be."""
        sets: list[Command] = []
        locations: list[tuple[StoredPayload, Location]] = []
        for record in batch:
            if record.payload is not None and record.stored is not None:
                location = Location(self.term.number, record.seq, len(record.payload), 0)
                sets.append(("SET", self._name(location), record.payload))
                locations.append((record.stored, location))
        return sets, locations

    def _wrote(self, locations: Sequence[tuple[StoredPayload, Location]]) -> None:
        for stored, location in locations:
            stored.location = location
            self._sizes[self._name(location)] = location.length

    def _restore_payloads(self, records: Sequence[Record]) -> None:
        for record in records:
            self.term.renew()  # many payloads take longer than a term
            sets, locations = self._payloads([record])
            self.term.run(sets)
            self._wrote(locations)

    def _find_keys(self) -> None:
        """Payload keys that an earlier broker may have left behind, and keys of former stores of the run."""
        payloads, known = f"{self._prefix}p:", (f"{self.term.prefix}head", f"{self.term.prefix}leader")
        keys: list[bytes] = self._ask(lambda: list(self._client.scan_iter(f"{self.term.prefix}*", CHUNK)))
        for name in (key.decode() for key in keys):
            if name.startswith(payloads):
                self._sizes[name] = 0
            elif name not in known and not name.startswith(self._prefix):
                self._stale.append(name)

    def _delete(self, names: Sequence[str]) -> None:
        for part in _chunks(names):
            self._ask(lambda part=part: self._client.unlink(*part))

    def _ask(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except (StoreUnavailable, BrokerError):
            raise
        except Exception as error:
            raise_for(error, self.term.name)
            raise


def about_run(term: Term, run_dir: str) -> tuple[About | None, int]:
    """Which store the run has, None on a server that does not know the run; and its last record.

    Raises:
        UsageError: the run of that name belongs to another folder.
        StoreUnavailable, BrokerError: Redis cannot be asked.
    """
    try:
        found, seq = term.client.hmget(f"{term.prefix}head", "about", "seq")
    except Exception as error:
        raise_for(error, term.name)
        raise
    about = None if found is None else msgspec.json.decode(found, type=About)
    if about is not None and about.run_dir != run_dir:
        raise other_folder(term.name, about.run_dir, run_dir)
    return about, int(seq or 0)


def other_folder(server: str, theirs: str, ours: str) -> UsageError:
    """The error for a run whose name another folder's run has."""
    return UsageError(
        f"run.name: the Redis server at {server} has a run of this name in the folder {theirs}, and this one is "
        f"{ours}. Choose another run.name or another database. Keys are never deleted here: docs/redis.md says how "
        "to do it"
    )


def _decoded(data: bytes, where: str) -> Batch:
    try:
        return _batch.decode(data)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(where, f"does not decode: {error}") from error


def _chunks(names: Sequence[T]) -> Iterator[Sequence[T]]:
    return (names[i : i + CHUNK] for i in range(0, len(names), CHUNK))
