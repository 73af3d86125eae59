"""The delivery state of a broker that starts: empty, or from its store the newest snapshot and every move after it.

The work is bounded: one segment's records are read, not their payloads, and the history of finished tasks.
"""

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.contract import BrokerEvent, RunInfo
from broker.delivery.logs import EventLog
from broker.delivery.moves import Accepted
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import StoredPayload
from broker.journal import records
from broker.journal.file_store import lock_store, open_file_store
from broker.journal.journal import Journal, lose_payloads
from broker.journal.leader_election import LeaderElection
from broker.journal.store import Store, StoreCorrupt, StoredRecord
from common.config.schema import Config
from common.errors import UsageError
from common.json_lines import lines_of
from common.process.files import move_aside
from common.process.run_dir import RunDir

logger = logging.getLogger(__name__)

EVENT_TAIL_BYTES = 4 << 20


class Recovered(msgspec.Struct, frozen=True):
    """The result of a recovery; `torn` is that of Loaded."""

    seq: int = 0
    history_bytes: int = 0
    records: int = 0
    seconds: float = 0.0
    torn: str = ""


@dataclass
class OpenedState:
    """A delivery state, and where it is kept; `journal` is None when it is kept nowhere."""

    state: DeliveryState
    journal: Journal | None = None
    recovered: bool = False  # whether it continues the state of an earlier broker

    def close(self) -> None:
        """Close the store; a no-op when the server has done so."""
        if self.journal is not None:
            self.journal.close()


def open_state(
    config: Config, run: RunInfo, write_event: Callable[[BrokerEvent], None], election: LeaderElection | None = None
) -> OpenedState:
    """The state that this broker begins with.

    `election` is the one that this broker has won, with broker.store: redis. Raises UsageError when another broker has
    the store or it is damaged, StoreUnavailable when Redis cannot be asked, StoreFenced when another broker leads.
    """
    run_dir = RunDir(config.run.dir)
    if election is not None:
        _set_aside_store(run_dir, "broker.store is redis")
        opened = _recovered(config, run, election.open(), write_event)
        if election.lost:
            opened.state.event_log.add("store_lost", reason=election.lost)
        return opened
    if config.broker.durability == "memory":
        _set_aside_store(run_dir, "broker.durability is memory")
        _set_aside_redis(run_dir)
        return OpenedState(DeliveryState(run, events=EventLog(write_event)))
    store = open_file_store(run_dir.store, config.run.name)
    try:
        _set_aside_redis(run_dir)
        return _recovered(config, run, store, write_event)
    except BaseException:
        store.close()
        raise


def recover(journal: Journal, state: DeliveryState) -> Recovered:
    """Fill an empty state from the journal's store; its moves are recorded there from now on. Raises as `rebuild`."""
    found = rebuild(journal.store, state)
    if found.torn:
        logger.warning("%s; nothing there was acknowledged, so it is dropped", found.torn)
        state.event_log.add("store_torn", reason=found.torn)
    lost, _ = lose_payloads(state, journal.store)
    if lost:
        state.event_log.add("groups_lost", groups=len(lost), first=lost[0])
        logger.warning("%s has lost %d groups, which are generated again", journal.store.name, len(lost))
    state.recovery_s = round(found.seconds, 3)
    state.resume()
    if found.records:
        state.event_log.add("broker_recovered", records=found.records, seconds=round(found.seconds, 3))
        logger.info("recovered %d records in %.2f s", found.records, found.seconds)
    journal.begin(state, found.seq, found.history_bytes)
    return found


def rebuild(store: Store, state: DeliveryState) -> Recovered:
    """Fill an empty state from the store, which is only read. Raises StoreCorrupt when synced data is damaged."""
    begun = time.monotonic()
    found = store.load()
    if not found.records:
        return Recovered(torn=found.torn, seconds=time.monotonic() - begun)
    first = found.records[0]
    snapshot = _decoded(first)
    if not isinstance(snapshot, records.Snapshot) or snapshot.schema != records.SCHEMA:
        what = f"schema {snapshot.schema}" if isinstance(snapshot, records.Snapshot) else type(snapshot).__name__
        expected = f"expected snapshot schema {records.SCHEMA}"
        raise UsageError(f"{first.where}: {expected}, found {what}; run the release that wrote it")
    records.restore(state, snapshot, store.read)
    for body in store.history(snapshot.history_bytes):
        for entry in records.decode_finished(body):
            state.tasks.history.add(entry)
    for record in found.records[1:]:
        _apply(state, store, record)
    seconds = time.monotonic() - begun
    return Recovered(found.records[-1].seq, snapshot.history_bytes, len(found.records), seconds, found.torn)


def _recovered(config: Config, run: RunInfo, store: Store, write_event: Callable[[BrokerEvent], None]) -> OpenedState:
    assert config.broker.durability != "memory"
    journal = Journal(store, config.broker.durability)
    events = EventLog(write_event, earlier=_former_events(RunDir(config.run.dir).events))
    state = DeliveryState(
        run, events=events, recorder=journal, retain_steps=config.broker.retain_steps, store_id=store.store_id
    )
    with _telling(RunDir(config.run.dir).recovering):
        return OpenedState(state, journal, recover(journal, state).records > 0)


@contextmanager
def _telling(mark: Path) -> Generator[None]:
    """The file `mark` exists meanwhile: a long history takes long, and `slipstream up` waits."""
    with suppress(OSError):
        mark.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink()


def _former_events(path: Path) -> list[BrokerEvent]:
    """The last broker events of RUN/events.jsonl, oldest first; lines of other writers are skipped."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - EVENT_TAIL_BYTES))
        found = list(lines_of(file.read(), BrokerEvent))  # the first may be cut, others are the supervisor's
    ordered = {event.index: event for event in found}
    return [ordered[index] for index in sorted(ordered)]


def _apply(state: DeliveryState, store: Store, record: StoredRecord) -> None:
    move = _decoded(record)
    try:
        if isinstance(move, records.Snapshot):
            raise ValueError("a snapshot is only expected at the beginning")
        if isinstance(move, Accepted):
            if record.payload is None:
                raise ValueError("an accepted group has no payload")
            stored = StoredPayload(store.read, record.payload)
            state.tasks.put_group(state.tasks.leased[move.token], stored, record.payload.length, stored)
        move.apply(state)
    except (LookupError, ValueError, AssertionError) as error:
        what = f"record {record.seq} ({type(move).__name__})"
        raise StoreCorrupt(record.where, f"{what} does not fit the records before it: {error!r}") from error


def _decoded(record: StoredRecord) -> records.AnyRecord:
    try:
        return records.decode(record.body)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(record.where, f"record {record.seq} does not decode: {error}") from error


def _set_aside_store(run_dir: RunDir, why: str) -> None:
    """Number the store that this broker does not use: when it is opened again it would be out of date."""
    if run_dir.store.exists():
        lock_store(run_dir.store).close()
        logger.warning("%s: the run's store was moved to %s", why, move_aside(run_dir.store))


def _set_aside_redis(run_dir: RunDir) -> None:
    """Number the file that names a store in Redis; a broker with broker.store: redis then refuses that store."""
    if run_dir.redis_json.exists():
        moved = move_aside(run_dir.redis_json)
        logger.warning("broker.store is file: what named the run's store in Redis was moved to %s", moved)
