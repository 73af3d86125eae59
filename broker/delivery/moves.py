"""Every change of the delivery state that survives a restart: what is recorded, and what it does.

    pending -> leased -> ready -> taken -> committed, and leased -> pending | dead, taken -> pending

The broker applies a move and records it; a restarted broker applies the recorded moves again. Every move of a task is
O(log n). Structs are keyed and tagged as on the wire: fields are only appended, and new ones have defaults.
"""

import heapq
from bisect import bisect_left, insort

from broker.contract import LearnerReport, NodeReport, Waste
from broker.delivery.nodes import NodeCounts
from broker.delivery.tables import Move, Tables
from broker.delivery.task_table import COMMITTED, DEAD, LEASED, READY, TAKEN, Entry
from common.rollouts import GroupMeta, Task

REMEMBERED_TOKENS = 8192  # a repeated result with one of the newest accepted tokens is still answered with True
MOST_NODES_NAMED = 64  # the newest nodes that leased a task


class Offered(Move, frozen=True, tag="offered"):
    """Add a pending task."""

    task: Task

    def apply(self, tables: Tables) -> None:
        entry = tables.tasks.living[self.task.serial] = Entry(self.task)
        tables.tasks.requeue(entry)
        tables.tasks.next_serial = max(tables.tasks.next_serial, entry.serial + 1)


class Leased(Move, frozen=True, tag="leased"):
    """pending -> leased, for the oldest pending task."""

    serial: int
    node: str
    token: str

    def apply(self, tables: Tables) -> None:
        entry = tables.tasks.living[heapq.heappop(tables.tasks.pending)]
        if entry.serial != self.serial:
            raise ValueError(f"task {self.serial} was leased, the oldest pending one is {entry.serial}")
        entry.state, entry.node, entry.token = LEASED, self.node, self.token
        entry.attempts += 1
        entry.nodes = [*entry.nodes, self.node][-MOST_NODES_NAMED:]
        tables.tasks.leased[self.token] = entry
        node = tables.fleet.nodes.get(self.node)
        if node is not None:
            node.has_leased = True
            node.tokens.add(self.token)


class HandedBack(Move, frozen=True, tag="handed_back"):
    """leased -> pending; the attempt does not count."""

    token: str

    def apply(self, tables: Tables) -> None:
        entry = tables.end_lease(self.token)
        entry.attempts -= 1
        tables.tasks.requeue(entry)


class Lost(Move, frozen=True, tag="lost"):
    """leased -> pending, or dead at the `max_attempts`-th failure unless `spared`: another node may still succeed."""

    token: str
    reason: str
    max_attempts: int
    spared: bool = False

    def apply(self, tables: Tables) -> None:
        node = tables.tasks.leased[self.token].node
        entry = tables.end_lease(self.token)
        if node not in entry.failed_by and len(entry.failed_by) < 2:
            entry.failed_by = [*entry.failed_by, node]
        entry.failures += 1
        entry.reason = self.reason
        if entry.failures < self.max_attempts or self.spared:
            tables.tasks.requeue(entry)
        else:
            tables.tasks.finish(entry, DEAD)
            insort(tables.tasks.freed, entry.serial)


class Accepted(Move, frozen=True, tag="accepted"):
    """leased -> ready. The group's payload follows the record; TaskTable.put_group attaches it."""

    token: str
    meta: GroupMeta

    def apply(self, tables: Tables) -> None:
        tables.accepted[self.token] = tables.tasks.leased[self.token].node
        if len(tables.accepted) > REMEMBERED_TOKENS:
            tables.accepted.popitem(last=False)
        entry = tables.end_lease(self.token)
        entry.state, entry.meta = READY, self.meta
        insort(tables.tasks.ready, entry.serial)


class Taken(Move, frozen=True, tag="taken"):
    """ready -> taken by `step`, in this order."""

    step: int
    serials: list[int]

    def apply(self, tables: Tables) -> None:
        tasks, count = tables.tasks, len(self.serials)
        if tasks.ready[:count] != self.serials:
            raise ValueError(f"step {self.step} took {self.serials}, ready are {tasks.ready[:count]}")
        del tasks.ready[:count]
        for serial in self.serials:
            entry = tasks.living[serial]
            entry.state, entry.step = TAKEN, self.step
        tasks.steps.setdefault(self.step, []).extend(self.serials)


class Filtered(Move, frozen=True, tag="filtered"):
    """Mark a taken group that its step does not train on; for the step's first `most_replaced` it takes others."""

    serial: int
    most_replaced: int

    def apply(self, tables: Tables) -> None:
        tasks = tables.tasks
        entry = tasks.living[self.serial]
        assert entry.step is not None
        entry.filtered = True
        tasks.filtered += 1
        freed = tasks.freed_by_step.get(entry.step, 0)
        if freed < self.most_replaced:
            tasks.freed_by_step[entry.step] = freed + 1
            insort(tasks.freed, entry.serial)


class GivenUp(Move, frozen=True, tag="given_up"):
    """taken -> pending: the group is dropped and generated again."""

    serial: int

    def apply(self, tables: Tables) -> None:
        entry = tables.tasks.living[self.serial]
        assert entry.step is not None
        tables.tasks.steps[entry.step].remove(entry.serial)
        tables.tasks.give_up(entry)


class Committed(Move, frozen=True, tag="committed"):
    """taken -> committed for everything that steps <= `step` took."""

    step: int

    def apply(self, tables: Tables) -> None:
        tasks = tables.tasks
        highest = max(tasks.steps, default=tables.committed_step)
        for step in sorted(s for s in tasks.steps if s <= self.step):
            tasks.freed_by_step.pop(step, None)
            entries = [tasks.living[serial] for serial in tasks.steps.pop(step)]
            for entry in entries:
                tasks.drop_payload(entry)
                tasks.finish(entry, COMMITTED)
            if tasks.retain_steps is not None:
                oldest = step - tasks.retain_steps + 1
                tasks.retained = {s: kept for s, kept in (tasks.retained | {step: entries}).items() if s >= oldest}
        tables.committed_step = max(tables.committed_step, min(self.step, highest))
        gone = bisect_left(tasks.freed, min(tasks.living, default=tasks.next_serial))
        del tasks.freed[:gone]  # older than every unfinished task: the list does not grow with the run
        tasks.freed_earlier += gone


class Reported(Move, frozen=True, tag="reported"):
    """The learner attached, ended, or changed something that outlives it."""

    report: LearnerReport

    def apply(self, tables: Tables) -> None:
        tables.learner.accept(self.report)


class Joined(Move, frozen=True, tag="joined"):
    """A node joined, or a new process of one."""

    report: NodeReport

    def apply(self, tables: Tables) -> None:
        tables.fleet.join(self.report, tables.clock())


class Left(Move, frozen=True, tag="left"):
    """A node is forgotten."""

    node_id: str

    def apply(self, tables: Tables) -> None:
        tables.fleet.leave(self.node_id)


class Marks(Move, frozen=True, tag="marks"):
    """Single values that replies to the learner depend on."""

    first_step: int
    committed_step: int

    def apply(self, tables: Tables) -> None:
        tables.first_step, tables.committed_step = self.first_step, self.committed_step


class Statistics(Move, frozen=True, tag="statistics"):
    """Counters that no reply depends on, recorded about once a second."""

    next_event: int = 0
    lease_expiries: int = 0
    stale_results: int = 0
    past_generated: int = 0
    past_wasted: dict[str, Waste] = {}
    nodes: dict[str, NodeCounts] = {}

    @classmethod
    def of(cls, tables: Tables) -> "Statistics":
        """The counters as they are now."""
        fleet, next_event = tables.fleet, tables.event_log.next_index
        nodes = {name: NodeCounts(node.handed_in, dict(node.counted)) for name, node in fleet.nodes.items()}
        past = fleet.past_generated, dict(fleet.past_wasted)
        return cls(next_event, tables.lease_expiries, tables.stale_results, *past, nodes)

    def apply(self, tables: Tables) -> None:
        fleet = tables.fleet
        tables.lease_expiries, tables.stale_results = self.lease_expiries, self.stale_results
        fleet.past_generated, fleet.past_wasted = self.past_generated, dict(self.past_wasted)
        for name in self.nodes.keys() & fleet.nodes.keys():
            fleet.nodes[name].handed_in = self.nodes[name].handed_in
            fleet.nodes[name].counted = dict(self.nodes[name].counted)
        tables.event_log.next_index = max(tables.event_log.next_index, self.next_event)


class Closed(Move, frozen=True, tag="closed"):
    """The broker ended in good order: everything before this record was synced."""

    def apply(self, tables: Tables) -> None:
        tables.learner.job_ended = True


AnyMove = (
    Offered | Leased | HandedBack | Lost | Accepted | Taken | Filtered | GivenUp | Committed
    | Reported | Joined | Left | Marks | Statistics | Closed
)  # fmt: skip
