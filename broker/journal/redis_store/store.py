"""The store in Redis: records in a list, payloads in keys of their own, every write fenced by the leader's term."""

import itertools
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from broker.journal.redis_store.keys import About
from broker.journal.redis_store.term import RENEW_S, Command, Term
from broker.journal.store import (
    Compaction,
    Loaded,
    Location,
    PayloadLost,
    PayloadUnreadable,
    Record,
    Store,
    StoreCorrupt,
    StoredPayload,
    StoredRecord,
    StoreUnavailable,
)
from common.errors import BrokerError

CHUNK = 1000  # keys or batches in one command

T = TypeVar("T")


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One element of the log: records of one term, each (sequence number, body, bytes of its payload or None)."""

    term: int
    records: list[tuple[int, bytes, int | None]]


_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(Batch)


class RedisStore(Store):
    """See Store. Only the broker whose `term` leads writes; any term serves to read. Raises as `Term.about`.

    `is_new`: Redis does not know this store yet. `last_seq`: sequence number of the last record that Redis has.
    """

    idle_s = RENEW_S

    def __init__(self, term: Term) -> None:
        self.term, self.name = term, f"Redis at {term.name}"
        self._sizes: dict[str, int] = {}  # sizes of existing payload keys; 0 where one is not known
        self._stale: list[str] = []  # keys of former stores of the run
        self._bytes = 0
        about, self.last_seq = term.about()
        self.is_new = about is None
        self._open(about or About(secrets.token_hex(8), term.run_dir))

    def _open(self, about: About) -> None:
        self.store_id, self._about = about.store, msgspec.json.encode(about)
        self._prefix = f"{self.term.prefix}{about.store}:"

    def begin_anew(self) -> None:
        """Leave the store that Redis has, which lacks acknowledged records, and begin an empty one."""
        self._open(About(secrets.token_hex(8), self.term.run_dir))
        self.is_new, self.last_seq = True, 0

    def load(self) -> Loaded:
        records: list[StoredRecord] = []
        log = f"{self._prefix}log"
        for number, data in enumerate(self._elements(log)):
            self._bytes += len(data)
            try:
                batch = _batch.decode(data)
            except msgspec.DecodeError as error:
                raise StoreCorrupt(f"{self.name}: batch {number} of {log}", f"does not decode: {error}") from error
            for seq, body, length in batch.records:
                where = f"{self.name}: record {seq} of {log}"
                if records and seq != records[-1].seq + 1:
                    raise StoreCorrupt(where, f"stands behind record {records[-1].seq}")
                location = None if length is None else Location(batch.term, seq, length, 0)
                records.append(StoredRecord(seq, body, location, where))
        self.last_seq = records[-1].seq if records else 0
        self._find_keys()
        return Loaded(records)

    def history(self, size: int) -> Iterator[bytes]:
        """See Store; the size is in records."""
        key, found = f"{self._prefix}history", 0
        for body in itertools.islice(self._elements(key), size):
            found += 1
            yield body
        if found != size:
            raise StoreCorrupt(f"{self.name}: {key}", f"expected {size} records, found {found}")

    def read(self, location: Location) -> bytes:
        name = self._name(location)
        try:
            data = self.term.run([("GET", name)])[0]
        except (StoreUnavailable, BrokerError) as error:
            raise PayloadUnreadable(f"{self.name}: the group {name} cannot be read: {error}") from error
        if data is None:
            raise PayloadLost(f"{self.name}: the group {name} is lost")
        return data

    def missing(self, locations: Collection[Location]) -> set[Location]:
        lost: set[Location] = set()
        for part in _chunks(locations):
            there = self.term.run([("EXISTS", self._name(location)) for location in part])
            lost |= {location for location, found in zip(part, there, strict=True) if not found}
        return lost

    def append(self, batch: Sequence[Record], *, synced: int, sync: bool) -> None:
        """See Store. Redis itself syncs, as appendfsync says."""
        sets, locations = self._payloads(batch)
        rows = [(r.seq, r.body, None if r.payload is None else len(r.payload)) for r in batch]
        data = _encode(Batch(self.term.number, rows))
        self.term.write(self._prefix, sets, "append", self.last_seq, batch[-1].seq, data)
        self.last_seq = batch[-1].seq
        self._bytes += len(data)
        self._wrote(locations)

    def idle(self) -> None:
        """See Store: renews the term."""
        self.term.write(self._prefix, [], "append", self.last_seq, self.last_seq, "")

    def compact(self, compaction: Compaction, history: int) -> int:
        """See Store. Payloads that are no longer needed are deleted afterwards."""
        expected: int | str = "" if self.is_new else self.last_seq
        if compaction.rewritten is not None:
            expected, history = "", 0
            for record in compaction.rewritten:
                self.term.renew()  # many payloads take longer than a term
                sets, locations = self._payloads([record])
                self.term.run(sets)
                self._wrote(locations)
        finished = compaction.finished()
        grown = history + (finished is not None)
        data = _encode(Batch(self.term.number, [(compaction.seq, compaction.snapshot(grown), None)]))
        arguments = (expected, compaction.seq, data, history, finished or b"", self._about)
        self.term.write(self._prefix, [], "compact", *arguments)
        self.is_new, self.last_seq, self._bytes = False, compaction.seq, len(data)
        wanted = {self._name(location): location.length for location in compaction.wanted()}
        for names in _chunks([*(self._sizes.keys() - wanted.keys()), *self._stale]):
            self.term.run([("UNLINK", *names)])
        self._sizes, self._stale = wanted, []
        return grown

    def size_bytes(self) -> int:
        """See Store: the log and the payloads."""
        return self._bytes + sum(self._sizes.copy().values())

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

    def _elements(self, key: str) -> Iterator[bytes]:
        for first in itertools.count(0, CHUNK):
            part = self.term.run([("LRANGE", key, first, first + CHUNK - 1)])[0]
            yield from part
            if len(part) < CHUNK:
                return

    def _find_keys(self) -> None:
        """Payload keys that an earlier broker may have left behind, and keys of former stores of the run."""
        payloads, known = f"{self._prefix}p:", (f"{self.term.prefix}head", f"{self.term.prefix}leader")
        cursor = -1
        while cursor:
            cursor, keys = self.term.run([("SCAN", max(0, cursor), "MATCH", f"{self.term.prefix}*", "COUNT", CHUNK)])[0]
            for name in (key.decode() for key in keys):
                if name.startswith(payloads):
                    self._sizes[name] = 0
                elif name not in known and not name.startswith(self._prefix):
                    self._stale.append(name)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    found = iter(items)
    return iter(lambda: list(itertools.islice(found, CHUNK)), [])
