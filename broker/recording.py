"""The groups of a run's store as a recording: read back whole, and put into a broker again as steps that were taken."""

import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.contract import RunInfo
from broker.event_log import EventLog
from broker.recovery import read_only
from broker.state import DeliveryState
from broker.store.folder import StoreFolder
from broker.store.payloads import StoredPayload
from broker.tasks import TAKEN, Entry
from common.errors import UsageError
from common.rollouts import GroupMeta, Task
from common.run_dir import RunDir


@dataclass(frozen=True)
class RecordedGroup:
    """A group that a step took; the payload is read when it is asked for."""

    task: Task
    node_id: str
    meta: GroupMeta
    filtered: bool
    payload: StoredPayload


@dataclass(frozen=True)
class Recording:
    """Steps that have all their groups, each in the order in which it took them."""

    store_id: str
    next_serial: int
    steps: dict[int, list[RecordedGroup]]


@contextmanager
def open_recording(run_dir: RunDir, run: RunInfo) -> Generator[Recording]:
    """What RUN/store still has; no broker can write there meanwhile.

    Raises:
        UsageError: there is no store, a broker has it, or it is damaged.
    """
    folder = StoreFolder(run_dir.store)
    info = folder.info() if run_dir.store.is_dir() else None
    if info is None:
        raise UsageError(
            f"{run_dir.store} does not exist: the run kept no groups. Only the embedded broker with broker.durability: "
            "fsync or everysec does, for the newest broker.retain_steps committed steps and all that are not committed"
        )
    try:
        folder.lock()
    except UsageError:
        raise UsageError(
            f"{run_dir.path} is running: a broker has {run_dir.store}; stop the job before it is replayed"
        ) from None
    try:
        state = read_only(folder, info, run)
        steps = {
            step: [RecordedGroup(g.task, g.node_id, g.meta, g.filtered, g.stored) for g in groups]
            for step, groups in state.table.kept.items()
        }
        for step, serials in state.tasks.steps.items():
            if state.tasks.places_taken(step) >= run.groups_per_step:
                entries = [state.tasks.living[serial] for serial in serials]
                steps[step] = [_recorded(entry, state.table.stored[entry.serial]) for entry in entries]
        yield Recording(info.store_id, state.tasks.next_serial, dict(sorted(steps.items())))
    finally:
        folder.unlock()


def _recorded(entry: Entry, payload: StoredPayload) -> RecordedGroup:
    assert entry.meta is not None
    return RecordedGroup(entry.task, entry.nodes[-1], entry.meta, entry.filtered, payload)


def preloaded(run: RunInfo, recording: Recording, steps: Sequence[int]) -> DeliveryState:
    """A state in which `steps` have taken what they took then, and everything before them is committed."""
    state = DeliveryState(
        run,
        time.monotonic,
        lambda: secrets.token_hex(8),
        EventLog(),
        os.getpid(),
        store_id=recording.store_id,
    )
    table = state.tasks
    table.next_serial = recording.next_serial
    state.committed_step = steps[0] - 1
    for step in steps:
        groups = recording.steps[step]
        table.steps[step] = [group.task.serial for group in groups]
        table.replaced[step] = len(groups) - run.groups_per_step  # filtered groups that others were taken for
        for group in groups:
            table.living[group.task.serial] = Entry(
                group.task,
                state=TAKEN,
                attempts=1,
                nodes=[group.node_id],
                meta=group.meta,
                payload=group.payload,
                step=step,
                filtered=group.filtered,
            )
    return state
