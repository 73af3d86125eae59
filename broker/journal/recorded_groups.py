"""The steps that a run's store still holds, with their groups, for `slipstream replay`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.contract import RunInfo, StoredGroup
from broker.journal.file_store.folder import StoreFolder, StoreInfo
from broker.journal.recovery import read_only
from broker.journal.stored_payload import KeptPayload
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
    stored: KeptPayload

    def read(self) -> StoredGroup:
        """With its payload. Raises BrokerError when that cannot be had."""
        return StoredGroup(self.task.serial, self.node_id, self.meta, self.stored.read())


class RecordedSteps(Mapping[int, list[StoredGroup]]):
    """Groups by step, in the order in which they were handed out; payloads are read on each access.

    Attributes:
        store_id: of the store.
        committed_step: the newest committed step; later ones were taken only.
        groups: what is known without reading payloads.
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
    """What RUN/store holds: at least the last broker.retain_steps committed steps, and those taken after them.

    The store is only read; its broker may be running or gone.

    Raises:
        UsageError: the run has no store, or it is damaged.
    """
    folder = StoreFolder(RunDir(run_dir).store)
    info = store_info(folder)
    state = read_only(folder, info, RunInfo(info.run_name, str(run_dir), 1, 0, 1, 1.0, 1))
    steps = {
        step: [RecordedGroup(k.task, k.node_id, k.meta, k.filtered, k.stored) for k in kept]
        for step, kept in state.table.kept.items()
    }
    for step, serials in state.tasks.steps.items():
        entries = [state.tasks.living[serial] for serial in serials]
        steps[step] = [
            RecordedGroup(e.task, e.nodes[-1], e.meta, e.filtered, state.table.stored[e.serial])
            for e in entries
            if e.meta is not None
        ]
    places = {step: state.tasks.places_taken(step) for step in state.tasks.steps}
    return RecordedSteps(
        info.store_id, state.committed_step, dict(sorted(steps.items())), state.tasks.next_serial, places
    )


def store_info(folder: StoreFolder) -> StoreInfo:
    """Which store it is; raises UsageError when there is none."""
    info = folder.info()
    if info is None:
        raise UsageError(
            f"{folder.path}: expected the store of a run, found none; groups are recorded when broker.durability is "
            "fsync or everysec"
        )
    return info
