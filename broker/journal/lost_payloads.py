"""Groups that the store has lost: Redis may fail over to a replica that lacks what was acknowledged."""

from collections.abc import Collection

from broker.delivery.state import DeliveryState
from broker.delivery.task_table import READY, Entry
from broker.journal.store import Location, StoredPayload


def locations(state: DeliveryState) -> list[Location]:
    """Where the groups lie that may still be wanted."""
    retained = [entry for entries in state.tasks.retained.values() for entry in entries]
    found = [_location(entry) for entry in [*state.tasks.living.values(), *retained]]
    return [location for location in found if location is not None]


def lose_payloads(
    state: DeliveryState, missing: Collection[Location]
) -> tuple[list[int], list[tuple[StoredPayload, object]]]:
    """Groups that the store has lost become pending, unless the broker has them in memory.

    A group that a step took stays with the step, since the learner may have it; `take` gives it up when asked for it.
    The caller compacts the log afterwards, so these changes need no records.

    Returns the serials that are pending again, and the groups that must be written again, each with its payload.
    """
    lost: list[int] = []
    again: list[tuple[StoredPayload, object]] = []
    for entry in state.tasks.living.values():
        if not isinstance(entry.stored, StoredPayload) or not _is_lost(entry, missing):
            continue
        if not isinstance(entry.payload, StoredPayload):
            again.append((entry.stored, entry.payload))
        elif entry.state == READY:
            lost.append(entry.serial)
    for serial in lost:
        entry = state.tasks.living[serial]
        state.tasks.ready.remove(serial)
        state.tasks.drop_payload(entry)
        entry.meta = entry.stored = None
        state.tasks.requeue(entry)
    retained = state.tasks.retained
    state.tasks.retained = {s: group for s, group in retained.items() if not any(_is_lost(e, missing) for e in group)}
    return lost, again


def _location(entry: Entry) -> Location | None:
    return entry.stored.location if isinstance(entry.stored, StoredPayload) else None


def _is_lost(entry: Entry, missing: Collection[Location]) -> bool:
    location = _location(entry)
    return location is None or location in missing
