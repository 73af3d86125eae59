"""The groups of a run's store as a recording: read back whole, and put into a broker again as steps that were taken."""

import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.contract import RunInfo
from broker.event_log import EventLog
from broker.recorded import RecordedGroup, recorded_steps, store_info
from broker.state import DeliveryState
from broker.store.folder import StoreFolder
from broker.tasks import TAKEN, Entry
from common.errors import UsageError
from common.run_dir import RunDir


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
    store_info(folder)
    try:
        folder.lock()
    except UsageError:
        raise UsageError(
            f"{run_dir.path} is running: a broker has {run_dir.store}; stop the job before it is replayed"
        ) from None
    try:
        found = recorded_steps(run_dir.path)
        steps = {
            step: groups
            for step, groups in found.groups.items()
            if found.places.get(step, run.groups_per_step) >= run.groups_per_step
        }
        yield Recording(found.store_id, found.next_serial, steps)
    finally:
        folder.unlock()


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
                payload=group.stored,
                step=step,
                filtered=group.filtered,
            )
    return state
