"""From a Redis server to a store that this broker leads, and what the run folder remembers of it."""

import logging
import time

import msgspec

from broker.journal.redis_server import check_server, open_client
from broker.journal.redis_store import TERM_S, Leader, RedisStore, Term
from broker.journal.store import StoreUnavailable
from common.config.schema import Config
from common.errors import BrokerUnreachable, UsageError
from common.process.run_dir import RunDir, write_atomic

logger = logging.getLogger(__name__)

START_S = 20.0  # for a server that is still loading its data
PAUSE_S = 0.5


class StorePointer(msgspec.Struct, frozen=True):
    """RUN/redis.json: the run's store, the one before it, and the last record and term that were seen."""

    store: str
    former: str = ""
    seq: int = 0
    term: int = 0
    address: str = ""  # where the broker listened last


class LeaderElection:
    """One broker's way to the lead of a run, whose folder the job writes as `run_dir`."""

    def __init__(self, config: Config, run_dir: str) -> None:
        self.server = config.broker.redis or ""
        self._config = config
        self._client = open_client(self.server, config.broker.credentials)
        self.term = Term(self._client, self.server, config.run.name, run_dir)
        self._file = RunDir(config.run.dir).redis_json
        self._noted = StorePointer("")  # by this broker
        self.lost = ""
        self._former: Leader | None = None  # the last other broker that led
        self._wait_until = 0.0  # it may return until then

    def await_server(self) -> None:
        """Check the server's settings, once it has its data. Raises as `check_server`, BrokerUnreachable in the end."""
        end = time.monotonic() + START_S
        told = False
        while True:
            try:
                check_server(self._client, self.server, self._config.broker.durability)
                return
            except StoreUnavailable as error:
                if time.monotonic() >= end:
                    raise BrokerUnreachable(f"broker.redis: {error}; is the server running?") from error
                if not told:
                    logger.warning("waiting for Redis at %s for up to %d s: %s", self.server, START_S, error)
                told = True
                time.sleep(PAUSE_S)

    @property
    def pointer(self) -> StorePointer:
        """RUN/redis.json. Raises UsageError when it cannot be read."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=StorePointer)
        except FileNotFoundError:
            return StorePointer("")
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{self._file} cannot be read ({error}); it names this run's store in Redis") from None

    def take(self, address: str) -> Leader | None:
        """Lead, with clients at `address`, unless another broker does: returns that one.

        Raises as `Term.take`; StoreUnavailable also while a living leader has time to write what Redis has lost.
        """
        try:
            about, seq = self.term.about()
        except StoreUnavailable:
            if self._former is not None:
                self._wait_until = time.monotonic() + TERM_S
            raise
        pointer = self.pointer
        behind = pointer.seq > 0 and (about is None or about.store != pointer.store or seq < pointer.seq)
        if behind and not self._wait_until:
            self._wait_until = time.monotonic() + TERM_S
        if time.monotonic() < self._wait_until and self.term.leader() is None:
            why = f"lacks records up to {pointer.seq}" if behind else "was away"
            raise StoreUnavailable(f"Redis at {self.server} {why}; its former leader has {TERM_S:g} s to return")
        self._former = self.term.take(address, pointer.term)
        if not behind:
            self._wait_until = 0.0
        return self._former

    def open(self) -> RedisStore:
        """The run's store, a new one where there is none or where records that were acknowledged are missing.

        Raises as `Term.write`; UsageError when the server's run of that name is an earlier one.
        """
        pointer = self.pointer
        store = RedisStore(self.term)
        if not store.is_new and store.store_id not in (pointer.store, pointer.former):
            raise UsageError(
                f"run.dir: the Redis server has a run of {self.term.run_dir} with the store {store.store_id}, but "
                f"{self._file} names {pointer.store or 'none'}. Was the folder emptied after an earlier run? Its "
                "keys are never deleted here: delete them as docs/redis.md says, or choose another run.name"
            )
        former = "" if store.is_new else store.store_id
        if pointer.seq and former != pointer.store:
            self.lost = f"store {pointer.store} is gone, with all its records up to {pointer.seq}"
        elif store.last_seq < pointer.seq:
            self.lost = f"records {store.last_seq + 1} to {pointer.seq} of store {pointer.store} are gone"
        if self.lost or former != pointer.store:
            store.begin_anew()
        if self.lost:
            logger.error("Redis at %s: %s; an empty store takes its place", self.server, self.lost)
        self.term.renew()  # a broker that was stopped until now must not overwrite its successor's note
        self._note(StorePointer(store.store_id, former, store.last_seq, self.term.number, pointer.address))
        return store

    def without_leading(self) -> RedisStore:
        """The run's store, to read it. Raises UsageError when a broker leads; also as `to_read`."""
        leader = self.term.leader()
        if leader is not None:
            why = f"is running: the broker of {leader.address} leads; stop the job before it is replayed"
            raise UsageError(f"{self.term.run_dir} {why}")
        return self.to_read()

    def to_read(self) -> RedisStore:
        """The run's store, which a broker may lead. Raises UsageError when there is none; also as `asking`."""
        store = RedisStore(self.term)
        if store.is_new or store.store_id != self.pointer.store:
            raise UsageError(f"{self._file}: expected the store of a run in Redis at {self.server}, found none")
        return store

    def remember(self, address: str, seq: int) -> None:
        """Note in RUN/redis.json where the broker listens, and how far the store came. After `open`; raises OSError."""
        self._note(msgspec.structs.replace(self._noted, address=address, seq=seq))

    def _note(self, pointer: StorePointer) -> None:
        if pointer != self._noted:
            write_atomic(self._file, msgspec.json.encode(pointer), sync=False)
            self._noted = pointer
