"""The steps in a run's store, with their groups, for `slipstream replay`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from broker.contract import RunInfo, StoredGroup
from broker.journal.file_store.folder import StoreFolder
from broker.journal.file_store.store import FileStore
from broker.journal.recovery import read_only
from broker.journal.store import Store, StoredPayload
from common.errors import UsageError
from common.process.run_dir import RunDir
from common.rollouts import GroupMeta, Task


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group that a step took; `filtered`: the step trained nothing on it."""

    task: Task
    node_id: str
    meta: GroupMeta
    filtered: bool
    stored: StoredPayload

    def read(self) -> StoredGroup:
        """With its payload. Raises BrokerError when that cannot be had."""
        return StoredGroup(self.task.serial, self.node_id, self.meta, self.stored.read())


class RecordedSteps(Mapping[int, list[StoredGroup]]):
    """Groups by step, in the order in which they were handed out; payloads are read on each access.

    Attributes:
        store_id: the store's id.
        committed_step: the newest committed step; later ones were taken only.
        groups: the facts about each group that need no payload.
        next_serial: one past the highest serial ever offered.
        places: groups of a step without those that passed their place on: all of them are there when these are.
    """

    def __init__(
        self,
        store_id: str,
        committed_step: int,
        groups: dict[int, list[RecordedGroup]],
        next_serial: int,
        places: dict[int, int],
    ) -> None:
        self.store_id, self.committed_step, self.groups = store_id, committed_step, groups
        self.next_serial, self.places = next_serial, places

    def __getitem__(self, step: int) -> list[StoredGroup]:
        return [group.read() for group in self.groups[step]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


def recorded_steps(run_dir: str | Path) -> RecordedSteps:
    """The steps in RUN/store, whose broker may be running. Raises UsageError when it is missing or damaged."""
    return steps_of(existing_file_store(RunDir(run_dir)))


def steps_of(store: Store) -> RecordedSteps:
    """At least the last broker.retain_steps committed steps, and those taken after them; the store is only read.

    Raises:
        UsageError: the store is damaged.
    """
    state = read_only(store, RunInfo("", "", 1, 0, 1, 1.0, 1))
    tasks = state.tasks
    taken = {step: [tasks.living[serial] for serial in serials] for step, serials in tasks.steps.items()}
    groups = {
        step: [
            RecordedGroup(e.task, e.nodes[-1], e.meta, e.filtered, cast(StoredPayload, e.stored))
            for e in entries
            if e.meta is not None
        ]
        for step, entries in sorted((tasks.retained | taken).items())
    }
    places = {step: tasks.slots_filled(step) for step in tasks.steps}
    return RecordedSteps(store.store_id, state.committed_step, groups, tasks.next_serial, places)


def existing_file_store(run_dir: RunDir) -> FileStore:
    """The run's store, not locked; its broker may be running. Raises UsageError when there is none."""
    folder = StoreFolder(run_dir.store)
    info = folder.info()
    if info is None:
        raise UsageError(
            f"{folder.path}: expected the store of a run, found none; groups are recorded when broker.durability is "
            "fsync or everysec"
        )
    return FileStore(folder, info)
