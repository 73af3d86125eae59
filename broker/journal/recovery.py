"""From RUN/store back to a delivery state: the newest snapshot, then every move after it.

The work is bounded: one segment's records are read, not their payloads, and the history of finished tasks.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from broker.contract import BrokerEvent, RunInfo
from broker.delivery.event_log import RING_EVENTS, EventLog
from broker.journal import records as moves
from broker.journal.durable_state import DurableState
from broker.journal.journal import Journal
from broker.journal.journaled_tables import Recorder
from broker.journal.store import Store, StoreCorrupt, StoredPayload, StoredRecord
from common.errors import UsageError

logger = logging.getLogger(__name__)

EVENT_TAIL_BYTES = 4 << 20


class Recovered(msgspec.Struct, frozen=True):
    """What recovery found; `torn` says why records at the end were dropped, '' when none were."""

    seq: int = 0
    history_bytes: int = 0
    records: int = 0
    seconds: float = 0.0
    torn: str = ""


def rebuild(store: Store, state: DurableState) -> Recovered:
    """Fill an empty state from the store, which is only read.

    Raises:
        StoreCorrupt: something that had been synced is damaged.
    """
    begun = time.monotonic()
    found = store.load()
    if not found.records:
        return Recovered(torn=found.torn, seconds=time.monotonic() - begun)
    first = found.records[0]
    snapshot = _decoded(first)
    if not isinstance(snapshot, moves.Snapshot) or snapshot.schema != moves.SCHEMA:
        what = f"schema {snapshot.schema}" if isinstance(snapshot, moves.Snapshot) else type(snapshot).__name__
        raise UsageError(
            f"{first.where}: expected a snapshot of schema {moves.SCHEMA}, found {what}; use the release that wrote it"
        )
    state.restore(snapshot, store.read)
    for body in store.history(snapshot.history_bytes):
        for entry in moves.decode_finished(body):
            state.tasks.history.add(entry)
    for record in found.records[1:]:
        _apply(state, store, record)
    seconds = time.monotonic() - begun
    return Recovered(found.records[-1].seq, snapshot.history_bytes, len(found.records), seconds, found.torn)


def recover(journal: Journal, make_state: Callable[[Journal], DurableState]) -> tuple[DurableState, Recovered]:
    """The state in the journal's store, which is recorded there from now on.

    Raises:
        StoreCorrupt: see `rebuild`.
    """
    state = make_state(journal)
    found = rebuild(journal.store, state)
    if found.torn:
        logger.warning("%s; what was written there was not acknowledged to anybody and is dropped", found.torn)
        state.event_log.add("store_torn", reason=found.torn)
    state.recovery_s = round(found.seconds, 3)
    state.ready_again()
    if found.records:
        state.event_log.add("broker_recovered", records=found.records, seconds=round(found.seconds, 3))
        logger.info("recovered %d records in %.2f s", found.records, found.seconds)
    journal.begin(state, found.seq, found.history_bytes)
    return state, found


def read_only(store: Store, run: RunInfo) -> DurableState:
    """The state as the store has it, to look at; payloads are read when they are asked for."""
    state = DurableState(run, time.monotonic, lambda: "", EventLog(), Nowhere(), retain_steps=1 << 60)
    rebuild(store, state)
    return state


class Nowhere(Recorder):
    """Records nothing."""

    def record(self, move: moves.Move) -> None:
        return

    def record_group(self, move: moves.Move, payload: object) -> StoredPayload:
        raise AssertionError("a state that is only looked at accepts no groups")

    def status(self) -> None:
        return None


def former_events(path: Path) -> list[BrokerEvent]:
    """The newest broker events of RUN/events.jsonl, oldest first; lines of others are passed over."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - EVENT_TAIL_BYTES))
        lines = file.read().split(b"\n")
    found: list[BrokerEvent] = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=BrokerEvent))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # a supervisor's line, or the cut first or last one
    ordered = {event.index: event for event in found}
    return [ordered[index] for index in sorted(ordered)][-RING_EVENTS:]


def _apply(state: DurableState, store: Store, record: StoredRecord) -> None:
    stored = StoredPayload(store.read, record.payload) if record.payload is not None else None
    move = _decoded(record)
    try:
        state.apply(move, stored)
    except (LookupError, ValueError, AssertionError) as error:
        name = type(move).__name__
        raise StoreCorrupt(
            record.where, f"record {record.seq} ({name}) does not fit what came before: {error!r}"
        ) from error


def _decoded(record: StoredRecord) -> moves.AnyMove:
    try:
        return moves.decode(record.body)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(record.where, f"record {record.seq} does not decode: {error}") from error
