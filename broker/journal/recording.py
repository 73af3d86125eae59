"""The steps in a run's store, for `slipstream replay`; they go into a broker again as steps that were taken."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from broker.contract import LedgerEntry, RunInfo
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import TAKEN, Entry
from broker.journal.file_store import FileStore, lock_store, read_info
from broker.journal.leader_election import LeaderElection
from broker.journal.recovery import rebuild
from broker.journal.store import Store, StoreUnavailable
from common.config.schema import Config
from common.errors import BrokerError, UsageError
from common.process.run_dir import RunDir


@dataclass(frozen=True)
class Recording:
    """Steps that have all their groups, each in the order in which it took them; `stored` of an entry reads the group.

    `steps` are the last broker.retain_steps committed ones at least, and those taken after them.
    """

    store_id: str
    next_serial: int
    steps: dict[int, list[Entry]]


@contextmanager
def open_recording(run_dir: RunDir, config: Config) -> Generator[Recording]:
    """The groups that the run's store still has, in RUN/store or Redis; they can be read while this is open.

    No broker of the run can start meanwhile. Raises UsageError when there is no store, the run works, the store is
    damaged, or Redis does not answer.
    """
    if config.broker.store == "redis":
        try:
            store = LeaderElection(config, str(run_dir.path.resolve())).without_leading()
            recording = recorded(store, config.learner.groups_per_step)
        except (StoreUnavailable, BrokerError) as error:
            raise UsageError(f"broker.redis: the recorded groups of {run_dir.path} cannot be read: {error}") from error
        yield recording
        return
    store = existing_file_store(run_dir)
    try:
        lock = lock_store(run_dir.store)
    except UsageError:
        why = f"is running: a broker has {run_dir.store}; stop the job before it is replayed"
        raise UsageError(f"{run_dir.path} {why}") from None
    with lock:
        yield recorded(store, config.learner.groups_per_step)


def recorded(store: Store, groups_per_step: int) -> Recording:
    """The recording in a store, which is only read. Raises UsageError when it is damaged."""
    tasks = _state_in(store).tasks
    steps = dict(sorted(tasks.retained.items()))
    for step, serials in sorted(tasks.steps.items()):
        if tasks.slots_filled(step) >= groups_per_step:
            steps[step] = [tasks.living[serial] for serial in serials]
    return Recording(store.store_id, tasks.next_serial, steps)


def stored_ledger(run_dir: RunDir, config: Config) -> list[LedgerEntry]:
    """The ledger of a run whose broker does not answer, from its store; one of a running broker may be read, too.

    Raises UsageError when there is no store, or it cannot be read at the moment.
    """
    try:
        if config.broker.store == "redis":
            return _state_in(LeaderElection(config, str(run_dir.path.resolve())).to_read()).ledger()
        return _state_in(existing_file_store(run_dir)).ledger()
    except (OSError, StoreUnavailable, BrokerError) as error:
        raise UsageError(f"the store of {run_dir.path} cannot be read: {error}") from error


def _state_in(store: Store) -> DeliveryState:
    state = DeliveryState(RunInfo("", "", 1, 0, 1, 1.0, 1), retain_steps=1 << 60)
    rebuild(store, state)
    return state


def existing_file_store(run_dir: RunDir) -> FileStore:
    """The run's store, not locked; its broker may be running. Raises UsageError when there is none."""
    info = read_info(run_dir.store)
    if info is None:
        when = "groups are recorded when broker.durability is fsync or everysec"
        raise UsageError(f"{run_dir.store}: expected the store of a run, found none; {when}")
    return FileStore(run_dir.store, info)


def preloaded(run: RunInfo, recording: Recording, steps: Sequence[int]) -> DeliveryState:
    """A state in which `steps` have taken what they took then, and everything before them is committed."""
    state = DeliveryState(run, store_id=recording.store_id)
    table = state.tasks
    table.next_serial = recording.next_serial
    state.committed_step = steps[0] - 1
    for step in steps:
        groups = recording.steps[step]
        table.steps[step] = [group.serial for group in groups]
        table.freed_by_step[step] = len(groups) - run.groups_per_step  # filtered groups that others were taken for
        for group in groups:
            entry = msgspec.structs.replace(group, state=TAKEN, step=step, payload=group.stored, stored=None)
            table.living[group.serial] = entry
    return state
