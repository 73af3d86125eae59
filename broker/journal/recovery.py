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
from broker.journal.file_store.errors import StoreCorrupt
from broker.journal.file_store.folder import StoreFolder, StoreInfo
from broker.journal.file_store.frames import Frame, Location, Scan
from broker.journal.file_store.payloads import StoredPayload
from broker.journal.journal import Journal
from broker.journal.journaled_tables import Recorder
from common.errors import UsageError

logger = logging.getLogger(__name__)

EVENT_TAIL_BYTES = 4 << 20


class Recovered(msgspec.Struct, frozen=True):
    """What recovery found; `torn` says why records at the end were dropped, '' when none were."""

    seq: int = 0
    segment: int = 0  # the newest; 0: the store was empty
    history_bytes: int = 0
    records: int = 0
    seconds: float = 0.0
    torn: str = ""


def rebuild(folder: StoreFolder, info: StoreInfo, state: DurableState) -> Recovered:
    """Fill an empty state from the store, whose files are left as they are.

    Raises:
        StoreCorrupt: something that had been synced is damaged.
    """
    begun = time.monotonic()
    newest, torn = _newest_whole(folder, info.seed)
    if newest is None:
        return Recovered(segment=max(folder.segments(), default=0), torn=torn, seconds=time.monotonic() - begun)
    number, found = newest
    path = folder.segment(number)
    snapshot = _decoded(path, found.frames[0])
    if not isinstance(snapshot, moves.Snapshot) or snapshot.schema != moves.SCHEMA:
        what = f"schema {snapshot.schema}" if isinstance(snapshot, moves.Snapshot) else type(snapshot).__name__
        raise UsageError(
            f"{path}: expected a snapshot of schema {moves.SCHEMA}, found {what}; use the release that wrote it"
        )
    state.restore(snapshot, folder.path, info.seed)
    for body in folder.read_history(snapshot.history_bytes, info.seed):
        for entry in moves.decode_finished(body):
            state.tasks.history.add(entry)
    for frame in found.frames[1:]:
        _apply(state, folder, number, info.seed, frame)
    if found.torn:
        torn = f"{path}: byte {found.end}: {found.torn}"
    return Recovered(
        found.frames[-1].seq,
        max(folder.segments()),
        snapshot.history_bytes,
        len(found.frames),
        time.monotonic() - begun,
        torn,
    )


def recover(
    folder: StoreFolder,
    info: StoreInfo,
    journal: Journal,
    make_state: Callable[[Journal], DurableState],
) -> tuple[DurableState, Recovered]:
    """The state that the store holds, recording into it from now on; `folder` is locked.

    Raises:
        StoreCorrupt: see `rebuild`.
    """
    state = make_state(journal)
    found = rebuild(folder, info, state)
    if found.torn:
        logger.warning("%s; what was written there was not acknowledged to anybody and is dropped", found.torn)
        state.event_log.add("store_torn", reason=found.torn)
    state.recovery_s = round(found.seconds, 3)
    state.ready_again()
    if found.records:
        state.event_log.add("broker_recovered", records=found.records, seconds=round(found.seconds, 3))
        logger.info("recovered %d records in %.2f s", found.records, found.seconds)
    journal.begin(state, found.seq, found.segment + 1, found.history_bytes)
    return state, found


def read_only(folder: StoreFolder, info: StoreInfo, run: RunInfo) -> DurableState:
    """The state as the store has it, to look at; payloads are read when they are asked for."""
    state = DurableState(run, time.monotonic, lambda: "", EventLog(), Nowhere(), retain_steps=1 << 60)
    rebuild(folder, info, state)
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


def _newest_whole(folder: StoreFolder, seed: int) -> tuple[tuple[int, Scan] | None, str]:
    """The newest segment whose snapshot is whole; one without was being begun when the broker died."""
    torn = ""
    for number in reversed(folder.segments()):
        found = folder.scan_segment(number, seed)
        if found.frames:
            return (number, found), torn
        torn = torn or f"{folder.segment(number)}: byte 0: {found.torn or 'empty'}"
    return None, torn


def _apply(state: DurableState, folder: StoreFolder, number: int, seed: int, frame: Frame) -> None:
    path = folder.segment(number)
    stored = None
    if frame.payload_bytes or frame.payload_checksum:
        place = Location(number, frame.payload_offset, frame.payload_bytes, frame.payload_checksum)
        stored = StoredPayload(folder.path, seed, place)
    move = _decoded(path, frame)
    try:
        state.apply(move, stored)
    except (LookupError, ValueError, AssertionError) as error:
        name = type(move).__name__
        raise StoreCorrupt(
            path, frame.offset, f"record {frame.seq} ({name}) does not fit what came before: {error!r}"
        ) from error


def _decoded(path: Path, frame: Frame) -> moves.AnyMove:
    try:
        return moves.decode(frame.body)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(path, frame.offset, f"record {frame.seq} does not decode: {error}") from error
