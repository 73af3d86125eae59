"""The store in Redis: records in a list, payloads in keys of their own, every write fenced by the leader's term.

Every write goes through fence.lua, which refuses brokers of an earlier term. All keys of a run begin with
`slipstream:{RUN}:`, so one ACL pattern covers them and a Redis Cluster keeps them in one slot.

    slipstream:{RUN}:head       hash    term, leader, seq (of the last record), about (About as JSON)
    slipstream:{RUN}:leader     string  Leader as JSON; expires unless the leader renews its term
    PREFIX log                  list    batches of records since the last snapshot, which is the first batch
    PREFIX history              list    records of finished tasks
    PREFIX p:TERM:SEQ           string  payload of a group

PREFIX is slipstream:{RUN}:STORE:
"""

import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from broker.delivery.task_table import Location, StoredPayload
from broker.journal.redis_server import asking
from broker.journal.store import (
    Compaction,
    Loaded,
    PayloadLost,
    PayloadUnreadable,
    Record,
    Store,
    StoreBehind,
    StoreCorrupt,
    StoredRecord,
    StoreFenced,
    StoreUnavailable,
)
from common.errors import BrokerError, UsageError
from common.process.lifecycle import alive, pid_space

logger = logging.getLogger(__name__)


class About(msgspec.Struct, frozen=True):
    """Which store a run has, and whose run it is."""

    store: str
    run_dir: str


class Leader(msgspec.Struct, frozen=True):
    """A broker that leads or would like to. Equal names are one process."""

    name: str
    address: str  # where its clients connect
    run_dir: str  # another folder is another run, even under the same name
    host: str
    pid: int
    machine: str  # as lifecycle.pid_space


def run_prefix(run: str) -> str:
    """The prefix of a run's keys; other characters than letters, digits and `_.-~` are percent-encoded."""
    return f"slipstream:{{{quote(run, safe='')}}}:"


TERM_S = 6.0  # a leader that has not renewed its term for so long may be replaced
RENEW_S = 1.5
SCRIPT = Path(__file__).with_name("fence.lua").read_bytes()

Command = tuple[bytes | memoryview | str | int, ...]


class Term:
    """The term of one broker on the run `run` of the folder `run_dir`, on the server `name`."""

    def __init__(self, client: Any, name: str, run: str, run_dir: str) -> None:
        self.client = client
        self.name = name
        self.run_dir = run_dir
        self.prefix = run_prefix(run)
        self._me = Leader(secrets.token_hex(8), "", run_dir, socket.gethostname(), os.getpid(), pid_space())
        self._keys = [f"{self.prefix}head", f"{self.prefix}leader"]
        self.number = 0  # the term's; 0 while another broker leads
        self.ends = 0.0  # when another broker may take the term; seconds of a clock that runs in stopped processes, too

    def about(self) -> tuple[About | None, int]:
        """Which store the run has, if the server knows it, and the number of its last record. Raises as `take`."""
        found, seq = self.run([("HMGET", self._keys[0], "about", "seq")])[0]
        about = None if found is None else msgspec.json.decode(found, type=About)
        if about is not None:
            self._check_folder(about.run_dir)
        return about, int(seq or 0)

    def take(self, address: str, known: int = 0) -> Leader | None:
        """Begin a term higher than `known`, with clients at `address`, unless another broker leads: returns that one.

        Raises UsageError when the run of that name belongs to another folder; also as `asking`.
        """
        self._me = msgspec.structs.replace(self._me, address=address)
        ended = ""
        while True:
            status, term, leader, _ = self._run([], self._keys, "take", known, ended)
            if status == b"ok":
                self.number = term
                return None
            other = msgspec.json.decode(leader, type=Leader)
            if ended or other.machine != self._me.machine or alive(other.pid):
                self._check_folder(other.run_dir)
                return other
            ended = leader  # it was killed on this machine: its term need not run out

    def leader(self) -> Leader | None:
        """The broker that leads. Raises as `take`."""
        found = self.run([("GET", self._keys[1])])[0]
        return None if found is None else msgspec.json.decode(found, type=Leader)

    def write(self, store_prefix: str, before: Sequence[Command], operation: str, *rest: bytes | str | int) -> None:
        """Run plain commands, then a fenced operation. Raises StoreFenced, StoreBehind; also as `asking`."""
        keys = [f"{store_prefix}log", f"{store_prefix}history"]
        status, term, leader, seq = self._run(before, keys, operation, self.number, *rest)
        if status == b"fenced":
            self.ends = 0.0
            other = msgspec.json.decode(leader, type=Leader)
            leads = f"the broker of {other.address} (process {other.pid} on {other.host}) leads in term {term}"
            raise StoreFenced(f"{leads}; this one led in term {self.number}")
        if status == b"behind":
            raise StoreBehind(f"Redis at {self.name} ends with record {seq.decode()} of term {term}")

    def renew(self) -> None:
        """Lead longer, while nothing is written. Raises as `write`."""
        self.write(self.prefix, [], "renew")

    @contextmanager
    def renewing(self) -> Generator[None]:
        """While active, a thread renews the term; a failure only means that another broker may take it."""
        ending = threading.Event()

        def renew() -> None:
            while not ending.wait(RENEW_S):
                try:
                    self.renew()
                except (StoreUnavailable, BrokerError) as error:
                    logger.warning("the term was not renewed: %s", error)

        thread = threading.Thread(target=renew, name="term", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def resign(self) -> None:
        """Let another broker lead now; a failure only means that the term ends by itself."""
        if not self.number:
            return
        try:
            self.write(self.prefix, [], "resign")
        except (StoreUnavailable, BrokerError) as error:
            logger.warning("the term ends by itself: %s", error)
        self.number = 0
        self.ends = 0.0

    @property
    def lapsed(self) -> bool:
        """Whether another broker may lead by now."""
        return time.monotonic() >= self.ends

    def _run(
        self, before: Sequence[Command], keys: Sequence[str], operation: str, term: int, *rest: bytes | str | int
    ) -> tuple[bytes, int, bytes, bytes]:
        begun = time.monotonic()
        arguments = (operation, msgspec.json.encode(self._me), term, round(TERM_S * 1000), *rest)
        replies = self.run([*before, ("EVAL", SCRIPT, 4, *self._keys, *keys, *arguments)])
        if replies[-1][0] == b"ok":
            self.ends = begun + TERM_S
        return tuple(replies[-1])

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Replies to plain commands, in one round trip. Raises as `write`."""
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        with asking(self.name):
            replies = pipe.execute(raise_on_error=False)  # otherwise redis-py puts the payloads into its message
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    def _check_folder(self, theirs: str) -> None:
        if theirs != self.run_dir:
            raise UsageError(
                f"run.name: the Redis server at {self.name} has a run of this name in the folder {theirs}, and this "
                f"one is {self.run_dir}. Choose another run.name or another database. Keys are never deleted here: "
                "docs/redis.md says how to do it"
            )


CHUNK = 1000  # keys or batches in one command

T = TypeVar("T")


class LogBatch(msgspec.Struct, frozen=True, array_like=True):
    """One element of the log: records of one term, each (sequence number, body, bytes of its payload or None)."""

    term: int
    records: list[tuple[int, bytes, int | None]]


_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(LogBatch)


class RedisStore(Store):
    """See Store. Only the broker whose `term` leads writes; any term serves to read. Raises as `Term.about`.

    `is_new`: Redis does not know this store yet. `last_seq`: sequence number of the last record that Redis has.
    """

    idle_s = RENEW_S

    def __init__(self, term: Term) -> None:
        self.term = term
        self.name = f"Redis at {term.name}"
        self._sizes: dict[str, int] = {}  # sizes of existing payload keys; 0 where one is not known
        self._stale: list[str] = []  # keys of former stores of the run
        self._bytes = 0
        about, self.last_seq = term.about()
        self.is_new = about is None
        self._open(about or About(secrets.token_hex(8), term.run_dir))

    def _open(self, about: About) -> None:
        self.store_id = about.store
        self._about = msgspec.json.encode(about)
        self._prefix = f"{self.term.prefix}{about.store}:"

    def begin_anew(self) -> None:
        """Leave the store that Redis has, which lacks acknowledged records, and begin an empty one."""
        self._open(About(secrets.token_hex(8), self.term.run_dir))
        self.is_new = True
        self.last_seq = 0

    def load(self) -> Loaded:
        records: list[StoredRecord] = []
        log = f"{self._prefix}log"
        for number, data in enumerate(self._elements(log)):
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
        key = f"{self._prefix}history"
        found = 0
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
        data = _encode(LogBatch(self.term.number, rows))
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
            expected = ""
            history = 0
            for record in compaction.rewritten:
                self.term.renew()  # many payloads take longer than a term
                sets, locations = self._payloads([record])
                self.term.run(sets)
                self._wrote(locations)
        with self.term.renewing():  # all finished tasks of a long run take longer than a term, too
            finished = compaction.finished()
            grown = history + (finished is not None)
            data = _encode(LogBatch(self.term.number, [(compaction.seq, compaction.snapshot(grown), None)]))
        arguments = (expected, compaction.seq, data, history, finished or b"", self._about)
        self.term.write(self._prefix, [], "compact", *arguments)
        self.is_new = False
        self.last_seq = compaction.seq
        self._bytes = len(data)
        wanted = {self._name(location): location.length for location in compaction.wanted()}
        for names in _chunks([*(self._sizes.keys() - wanted.keys()), *self._stale]):
            self.term.run([("UNLINK", *names)])
        self._sizes = wanted
        self._stale = []
        return grown

    def size_bytes(self) -> int:
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
        payloads = f"{self._prefix}p:"
        known = (f"{self.term.prefix}head", f"{self.term.prefix}leader")
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
