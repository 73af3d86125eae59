"""The structures of the delivery state, with every move recorded.

Replay calls the same methods with recording off, so what is replayed is what was done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from broker.contract import LEARNER_ENDED, LearnerReport, NodeReport, StoreStatus, Waste
from broker.delivery.learner_fencing import LearnerRecord
from broker.delivery.node_ownership import NodeOwners
from broker.delivery.nodes import Fleet, Node
from broker.delivery.task_table import Entry, TaskTable
from broker.journal import records
from broker.journal.store import StoredPayload
from common.rollouts import GroupMeta, Task


class Recorder(Protocol):
    """Where moves go; a replay passes one that drops them."""

    def record(self, move: records.Move) -> None: ...

    def record_group(self, move: records.Move, payload: object) -> StoredPayload: ...

    def status(self) -> StoreStatus | None: ...


@dataclass(slots=True)
class Kept:
    """A committed group within broker.retain_steps."""

    task: Task
    node_id: str
    meta: GroupMeta
    filtered: bool
    stored: StoredPayload


class JournaledTable(TaskTable):
    """A TaskTable that records; it also knows where each group lies, and which committed ones are kept for replay."""

    def __init__(self, journal: Recorder, retain_steps: int) -> None:
        super().__init__()
        self.stored: dict[int, StoredPayload] = {}  # of ready and taken groups
        self.kept: dict[int, list[Kept]] = {}  # by committed step
        self.finished: list[int] = []  # serials that ended since the history was last written
        self._journal, self._retain_steps = journal, retain_steps

    def add(self, task: Task) -> None:
        super().add(task)
        self._journal.record(records.Offered(task))

    def lease_oldest(self, node: str, token: str, now: float, deadline: float) -> Entry:
        entry = super().lease_oldest(node, token, now, deadline)
        self._journal.record(records.Leased(entry.serial, node, token))
        return entry

    def hand_back(self, entry: Entry) -> None:
        move = records.HandedBack(entry.token)
        super().hand_back(entry)
        self._journal.record(move)

    def lose(self, entry: Entry, reason: str, max_attempts: int, spared: bool = False) -> bool:
        move = records.Lost(entry.token, reason, max_attempts, spared)
        dead = super().lose(entry, reason, max_attempts, spared)
        if dead:
            self.finished.append(entry.serial)
        self._journal.record(move)
        return dead

    def accept(self, entry: Entry, meta: GroupMeta, payload: object, payload_bytes: int) -> None:
        move = records.Accepted(entry.token, meta)
        super().accept(entry, meta, payload, payload_bytes)
        if isinstance(payload, StoredPayload):
            self.stored[entry.serial] = payload
        else:
            self.stored[entry.serial] = self._journal.record_group(move, payload)

    def take_oldest(self, step: int, count: int) -> None:
        super().take_oldest(step, count)
        self._journal.record(records.Taken(step, self.steps[step][-count:]))

    def filter(self, entry: Entry, most_replaced: int) -> bool:
        replaced = super().filter(entry, most_replaced)
        self._journal.record(records.Filtered(entry.serial, most_replaced))
        return replaced

    def give_up(self, entry: Entry) -> None:
        super().give_up(entry)
        del self.stored[entry.serial]
        self._journal.record(records.GivenUp(entry.serial))

    def commit(self, step: int) -> int:
        ended = sorted(s for s in self.steps if s <= step)
        if not ended:
            return 0
        for taken_step in ended:
            self._keep(taken_step)
        count = super().commit(step)
        self._journal.record(records.Committed(step))
        return count

    def _keep(self, step: int) -> None:
        kept: list[Kept] = []
        for serial in self.steps[step]:
            entry = self.living[serial]
            assert entry.meta is not None
            kept.append(Kept(entry.task, entry.nodes[-1], entry.meta, entry.filtered, self.stored.pop(serial)))
            self.finished.append(serial)
        self.kept[step] = kept
        for old in [s for s in self.kept if s <= step - self._retain_steps]:
            del self.kept[old]

    # ---------------------------------------------------------------- snapshots

    def saved(self) -> list[tuple[records.SavedTask, StoredPayload | None]]:
        """Living tasks, and where their groups are or will be."""
        return [(_saved(entry), self.stored.get(serial)) for serial, entry in self.living.items()]

    def describe(self) -> tuple[list[int], int, int, int]:
        """Serials that passed their place, how many older ones did, groups accepted, their bytes."""
        return list(self._passed), self._passed_gone, self._accepted_groups, self._accepted_bytes

    def restore(self, snapshot: records.Snapshot, stored: Sequence[StoredPayload | None]) -> None:
        """Fill an empty table; `stored` goes with `snapshot.tasks`."""
        self.next_serial = snapshot.next_serial
        self.steps = {step: list(serials) for step, serials in snapshot.steps.items()}
        self.replaced = dict(snapshot.replaced)
        self.filtered = snapshot.filtered
        self._passed, self._passed_gone = list(snapshot.passed), snapshot.passed_gone
        self._accepted_groups, self._accepted_bytes = snapshot.accepted_groups, snapshot.accepted_bytes
        for task, payload in zip(snapshot.tasks, stored, strict=True):
            entry = _restored(task)
            self.living[entry.serial] = entry
            if payload is not None and task.location is not None:
                entry.payload, entry.payload_bytes = payload, task.location.length
                self.bytes_held += entry.payload_bytes
                self.stored[entry.serial] = payload
            if entry.token:
                self.leased[entry.token] = entry
        self.pending = sorted(s for s, e in self.living.items() if e.state == "pending")  # sorted is a heap
        self.ready = sorted(s for s, e in self.living.items() if e.state == "ready")


def _saved(entry: Entry) -> records.SavedTask:
    return records.SavedTask(
        task=entry.task,
        state=entry.state,
        attempts=entry.attempts,
        failures=entry.failures,
        nodes=list(entry.nodes),
        token=entry.token,
        node=entry.node,
        meta=entry.meta,
        step=entry.step,
        reason=entry.reason,
        filtered=entry.filtered,
        location=None,
        failed_by=list(entry.failed_by),
    )


def _restored(saved: records.SavedTask) -> Entry:
    return Entry(
        task=saved.task,
        state=saved.state,
        attempts=saved.attempts,
        failures=saved.failures,
        nodes=list(saved.nodes),
        token=saved.token,
        node=saved.node,
        meta=saved.meta,
        step=saved.step,
        reason=saved.reason,
        filtered=saved.filtered,
        failed_by=list(saved.failed_by),
    )


class JournaledFleet(Fleet):
    """Which nodes there are survives; how long they were silent does not."""

    def __init__(self, silent_s: float, journal: Recorder) -> None:
        super().__init__(silent_s)
        self._journal = journal

    def join(self, report: NodeReport, now: float) -> Node:
        node = super().join(report, now)
        self._journal.record(records.Joined(report))
        return node

    def leave(self, node_id: str) -> None:
        known = node_id in self.nodes
        super().leave(node_id)
        if known:
            self._journal.record(records.Left(node_id))

    @property
    def past(self) -> tuple[int, dict[str, Waste]]:
        """Tokens generated, and what was wasted, by processes and nodes that are gone."""
        return self._past_generated, dict(self._past_wasted)

    @past.setter
    def past(self, totals: tuple[int, dict[str, Waste]]) -> None:
        self._past_generated, self._past_wasted = totals


class JournaledOwners(NodeOwners):
    """A node that lives keeps its name when the broker is started again."""

    def __init__(self, journal: Recorder) -> None:
        super().__init__()
        self._journal = journal

    def bind(self, node_id: str, public: str, alive: Callable[[str], bool]) -> None:
        super().bind(node_id, public, alive)
        self._journal.record(records.Owned(node_id, public))


class JournaledLearner(LearnerRecord):
    """The newest report survives, as far as it fences, ends or leads anywhere."""

    def __init__(self, journal: Recorder) -> None:
        super().__init__()
        self.job_ended = False  # the report is of a job that ended, and nobody has reported since
        self._journal = journal

    def update(self, report: LearnerReport, now: float) -> LearnerReport | None:
        before = super().update(report, now)
        self.job_ended = False
        if before is None or lasting(before) != lasting(report):
            self._journal.record(records.Reported(report))
        return before

    def replay(self, report: LearnerReport) -> None:
        """A report that was accepted then, whatever the time is now."""
        before, self.report, self.job_ended = self.report, report, False
        if before is None or report.incarnation > before.incarnation:
            self._replaced.clear()
        elif before.instance and report.instance and before.instance != report.instance:
            self._replaced.add(before.instance)

    @property
    def replaced(self) -> list[str]:
        """Instances of this incarnation that stay refused."""
        return sorted(self._replaced)

    def restore(self, report: LearnerReport | None, replaced: Sequence[str]) -> None:
        """As it was."""
        self.report, self._replaced = report, set(replaced)


def lasting(report: LearnerReport) -> LearnerReport:
    """What of a report matters to whoever comes later."""
    state = report.state if report.state in LEARNER_ENDED else ""
    return msgspec.structs.replace(report, state=state, policy_version=0, waiting_on="", since_s=0.0, step=0, waste={})
