"""What `slipstream broker CONFIG` runs with broker.backend: redis.

Learner and nodes talk to Redis themselves. The keeper checks the server, makes the run's store or goes on with it, and
then about once a second takes back expired leases, writes the run's events to RUN/events.jsonl, and now and then
RUN/ledger.json and RUN/status.json. A keeper that is gone stops nobody: any call takes back expired leases too.
RUN/redis.json says which store is this folder's and how far it was seen to come: a Redis that comes back with less has
lost what it acknowledged, and gets a new store in place of the old one (docs/redis.md).
"""

import fcntl
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from broker.contract import BrokerEvent
from broker.journal.open_state import set_aside_store
from broker.journal.status_files import SNAPSHOT_S
from broker.main import keep_former_ledger, run_info
from broker.redis.checks import check_server
from broker.redis.client import RedisClient
from broker.redis.endpoint import endpoint
from broker.redis.link import Link
from broker.redis.moves import Command, Moves, StoreGone
from broker.redis.run_store import RunStore, new_store
from common.config.schema import Config
from common.errors import EXIT_DONE, BrokerError, BrokerUnreachable, UsageError
from common.process.lifecycle import DrainFlag
from common.process.run_dir import BrokerFile, RunDir, write_atomic
from common.redis_address import with_run

logger = logging.getLogger(__name__)

ROLE = "broker"
START_S = 20.0  # for a server that is still loading its data
ASK_S = 5.0
TICK_S = 1.0
ORPHANS_S = 600.0  # between searches for payloads that nobody has
SCAN_KEYS = 1000


class Seen(msgspec.Struct, frozen=True):
    """RUN/redis.json: this folder's store, the one before it, and the highest epoch and last event that were seen."""

    store: str
    former: str = ""
    epoch: int = 0
    event: int = -1


class Keeper:
    """Keeps one run. Not safe for threads.

    Args:
        config, config_json: of the job.
    """

    def __init__(self, config: Config, config_json: bytes) -> None:
        self.run_dir = Path(config.run.dir)
        self.address = with_run(config.broker.address, config.run.name)
        self._durability = config.broker.durability
        server = endpoint(self.address, ROLE, config.broker.credentials)
        self._link = Link(server, ROLE, ASK_S + 1)
        run = run_info(config, config_json)
        self._store = RunStore(self._link, run, config.broker.retain_steps, os.getpid(), ASK_S)
        self._observer = RedisClient(self.address, role=ROLE, credentials=config.broker.credentials, deadline_s=ASK_S)
        self._file = RunDir(self.run_dir).redis_json
        self._seen = Seen("")
        self._moves: Moves | None = None
        self._snapshot_at = self._orphans_at = 0.0
        self._answering = True

    @property
    def store(self) -> str:
        """The run's store; '' before `open`."""
        return self._seen.store

    def close(self) -> None:
        """Drop the connections."""
        self._link.close()
        self._observer.close()

    def open(self) -> None:
        """Check the server and enter the run's store, a new one where there is none.

        Raises:
            UsageError: a setting that loses data, a run of that name that is another folder's or an earlier one's.
            BrokerUnreachable: the server does not answer.
        """
        self._await_server(time.monotonic() + START_S)
        check_server(self._link, self._durability, time.monotonic() + ASK_S)
        self._seen = self._read_seen()
        pointer = self._store.pointer()
        seen = self._seen
        if pointer is not None and pointer.store not in (seen.store, seen.former):
            raise UsageError(
                f"run.dir: the Redis server has a run of {pointer.run_dir} with the store {pointer.store}, and the one "
                f"in {self._file} is {seen.store or 'missing'}: a run of this folder before it was emptied? Its "
                "keys are never deleted here; docs/redis.md says how to, or choose another run.name"
            )
        set_aside_store(RunDir(self.run_dir), "broker.backend is redis")
        if pointer is not None and pointer.store == seen.store and not self._store.lost(seen.store):
            try:
                self._enter(seen.store)
            except StoreGone as error:
                logger.error("%s", error)
                self._begin_store()
        else:
            if seen.store:
                logger.error("store %s of this run is lost; a new one takes its place", seen.store)
            self._begin_store()

    def tick(self) -> None:
        """Sweep, and write down what is new."""
        try:
            try:
                self._sweep()
                self._write_events()
                self._snapshot(force=False)
                self._drop_orphans()
            except StoreGone as error:
                logger.error("%s", error)
                self._begin_store()
            if not self._answering:
                logger.info("Redis answers again")
            self._answering = True
        except (BrokerUnreachable, BrokerError, OSError) as error:
            if self._answering:
                logger.error("%s; going on as soon as that is over", error)
            self._answering = False

    def finish(self) -> None:
        """The last events and snapshot; what cannot be had is logged."""
        try:
            self._write_events()
            self._snapshot(force=True)
        except (BrokerUnreachable, BrokerError, OSError) as error:
            logger.error("the last snapshot was not written: %s", error)

    def _await_server(self, end: float) -> None:
        """Until the server has its data; says at once what is waited for."""
        ask: list[Command] = [("EXISTS", self._store.pointer_key)]  # refused while it loads
        try:
            self._link.run(lambda repeated, whole: ask, time.monotonic())
        except BrokerUnreachable as error:
            server = self._link.endpoint.name
            logger.warning("waiting for Redis at %s (broker.address) for up to %d s: %s", server, START_S, error)
            try:
                self._link.run(lambda repeated, whole: ask, end)
            except BrokerUnreachable as later:
                raise BrokerUnreachable(f"broker.address: {later}; is the server running?") from later

    # ---------------------------------------------------------------- the store

    def _begin_store(self) -> None:
        """A new store; its name is on the disk before Redis knows it, so that a crash in between leaves no riddle.

        Nor do two: `former` is what Redis has, which is not the last new store when that never got there.
        """
        pointer = self._store.pointer()
        keep_former_ledger(self.run_dir)
        self._see(Seen(new_store(), pointer.store if pointer is not None else self._seen.store))
        self._enter(self._seen.store)

    def _enter(self, store: str) -> None:
        self._moves = self._store.enter(store)
        self._moves.expect(self._seen.epoch)
        self._sweep()

    def _sweep(self) -> None:
        moves = self._moves
        assert moves is not None

        def build(repeated: bool, whole: bool) -> list[Command]:
            return [moves.command("sweep", whole=whole)]

        moves.answer(self._link.run(build, time.monotonic() + ASK_S)[0])
        if moves.epoch > self._seen.epoch:
            self._see(msgspec.structs.replace(self._seen, epoch=moves.epoch))

    def _drop_orphans(self) -> None:
        """Payloads of nodes that died between setting them and saying so."""
        now, moves = time.monotonic(), self._moves
        if now < self._orphans_at or moves is None:
            return
        self._orphans_at = now + ORPHANS_S
        cursor, dropped = b"0", 0
        while True:
            scan: Command = ("SCAN", cursor, "MATCH", moves.keys.all_payloads, "COUNT", SCAN_KEYS)
            cursor, keys = self._ask(scan)
            if keys:
                names = [moves.keys.payload_name(key) for key in keys]
                dropped += moves.answer(self._ask(moves.command("orphans", *names)))[0]
            if cursor == b"0":
                break
        if dropped:
            logger.info("dropped %d payloads whose groups were never handed in", dropped)

    def _ask(self, command: Command) -> Any:
        return self._link.run(lambda repeated, whole: [command], time.monotonic() + ASK_S)[0]

    def _read_seen(self) -> Seen:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Seen)
        except FileNotFoundError:
            return Seen("")
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{self._file} cannot be read ({error}); it names this run's store in Redis") from None

    def _see(self, seen: Seen) -> None:
        self._seen = seen
        write_atomic(self._file, msgspec.json.encode(seen))

    # ---------------------------------------------------------------- files

    def _write_events(self) -> None:
        events = self._observer.events(self._seen.event)
        if not events:
            return
        if events[0].index > self._seen.event + 1:
            logger.warning(
                "%d events came too fast and are not in events.jsonl", events[0].index - self._seen.event - 1
            )
        self.note(*events)
        self._see(msgspec.structs.replace(self._seen, event=events[-1].index))

    def note(self, *events: BrokerEvent) -> None:
        """Append to RUN/events.jsonl."""
        with (self.run_dir / "events.jsonl").open("ab", buffering=0) as file:
            file.write(b"".join(msgspec.json.encode(event) + b"\n" for event in events))

    def _snapshot(self, *, force: bool) -> None:
        """RUN/ledger.json and RUN/status.json, at most every SNAPSHOT_S and a fiftieth of the time."""
        started = time.monotonic()
        if started < self._snapshot_at and not force:
            return
        write_atomic(self.run_dir / "ledger.json", msgspec.json.encode(self._observer.ledger()))
        write_atomic(self.run_dir / "status.json", msgspec.json.encode(self._observer.status()))
        now = time.monotonic()
        self._snapshot_at = now + max(SNAPSHOT_S, 50 * (now - started))


def run_keeper(config: Config, config_json: bytes) -> int:
    """Keep the run until SIGTERM or SIGINT; returns the exit code. RUN/broker.json exists meanwhile.

    Raises:
        UsageError: see Keeper.open; or this run has a keeper already.
    """
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with only_keeper(run_dir):
        keeper = Keeper(config, config_json)
        try:
            flag = DrainFlag.install()
            keeper.open()
            here = BrokerFile(os.getpid(), keeper.address, time.time())
            write_atomic(run_dir / "broker.json", msgspec.json.encode(here))
            logger.info("keeping run %s at %s", config.run.name, keeper.address)
            try:
                while not flag.wait(TICK_S):
                    keeper.tick()
            finally:
                (run_dir / "broker.json").unlink(missing_ok=True)
                keeper.finish()
        finally:
            keeper.close()
    logger.info("the keeper of run %s has stopped", config.run.name)
    return EXIT_DONE


@contextmanager
def only_keeper(run_dir: Path, otherwise: str = "") -> Generator[None]:
    """Hold RUN/keeper.lock, which the kernel releases when this process ends.

    Raises:
        UsageError: another process holds it; `otherwise` is the message.
    """
    with (run_dir / "keeper.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                otherwise or f"run.dir: {run_dir} already has a broker; stop it first, or choose another run.dir"
            ) from None
        yield
