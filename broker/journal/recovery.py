"""From RUN/store back to a delivery state: the newest snapshot, then every move after it.

The work is bounded: one segment's records are read, not their payloads, and the history of finished tasks.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from broker.contract import BrokerEvent, RunInfo
from broker.delivery.event_log import RING_EVENTS, EventLog
from broker.delivery.moves import Accepted
from broker.delivery.state import DeliveryState
from broker.journal import records
from broker.journal.journal import Journal
from broker.journal.lost_payloads import locations, lose_payloads
from broker.journal.snapshot import restore
from broker.journal.store import Store, StoreCorrupt, StoredPayload, StoredRecord
from common.errors import UsageError

logger = logging.getLogger(__name__)

EVENT_TAIL_BYTES = 4 << 20


class Recovered(msgspec.Struct, frozen=True):
    """The result of a recovery; `torn` is the reason for which records at the end were dropped, if any."""

    seq: int = 0
    history_bytes: int = 0
    records: int = 0
    seconds: float = 0.0
    torn: str = ""


def rebuild(store: Store, state: DeliveryState) -> Recovered:
    """Fill an empty state from the store, without changing the store.

    Raises:
        StoreCorrupt: synced data is damaged.
    """
    begun = time.monotonic()
    found = store.load()
    if not found.records:
        return Recovered(torn=found.torn, seconds=time.monotonic() - begun)
    first = found.records[0]
    snapshot = _decoded(first)
    if not isinstance(snapshot, records.Snapshot) or snapshot.schema != records.SCHEMA:
        what = f"schema {snapshot.schema}" if isinstance(snapshot, records.Snapshot) else type(snapshot).__name__
        raise UsageError(
            f"{first.where}: expected snapshot schema {records.SCHEMA}, found {what}; run the release that wrote it"
        )
    restore(state, snapshot, partial(StoredPayload, store.read))
    for body in store.history(snapshot.history_bytes):
        for entry in records.decode_finished(body):
            state.tasks.history.add(entry)
    for record in found.records[1:]:
        _apply(state, store, record)
    seconds = time.monotonic() - begun
    return Recovered(found.records[-1].seq, snapshot.history_bytes, len(found.records), seconds, found.torn)


def recover(journal: Journal, make_state: Callable[[Journal], DeliveryState]) -> tuple[DeliveryState, Recovered]:
    """The state in the journal's store, which is recorded there from now on.

    Raises:
        StoreCorrupt: see `rebuild`.
    """
    state = make_state(journal)
    found = rebuild(journal.store, state)
    if found.torn:
        logger.warning("%s; nothing there was acknowledged, so it is dropped", found.torn)
        state.event_log.add("store_torn", reason=found.torn)
    lost, _ = lose_payloads(state, journal.store.missing(locations(state)))
    if lost:
        state.event_log.add("groups_lost", groups=len(lost), first=lost[0])
        logger.warning("%s has lost %d groups, which are generated again", journal.store.name, len(lost))
    state.recovery_s = round(found.seconds, 3)
    state.resume()
    if found.records:
        state.event_log.add("broker_recovered", records=found.records, seconds=round(found.seconds, 3))
        logger.info("recovered %d records in %.2f s", found.records, found.seconds)
    journal.begin(state, found.seq, found.history_bytes)
    return state, found


def read_only(store: Store, run: RunInfo) -> DeliveryState:
    """The state of the store, for readers; payloads are read on demand."""
    state = DeliveryState(run, time.monotonic, lambda: "", EventLog(), retain_steps=1 << 60)
    rebuild(store, state)
    return state


def former_events(path: Path) -> list[BrokerEvent]:
    """The newest broker events of RUN/events.jsonl, oldest first; lines of other writers are skipped."""
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
            continue  # a line of the supervisor, or a first or last line that is cut
    ordered = {event.index: event for event in found}
    return [ordered[index] for index in sorted(ordered)][-RING_EVENTS:]


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
        name = type(move).__name__
        raise StoreCorrupt(
            record.where, f"record {record.seq} ({name}) does not fit the records before it: {error!r}"
        ) from error


def _decoded(record: StoredRecord) -> records.AnyRecord:
    try:
        return records.decode(record.body)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(record.where, f"record {record.seq} does not decode: {error}") from error
