"""Every change of the delivery state that survives a restart: what is recorded, and what it does.

    pending -> leased -> ready -> taken -> committed, and leased -> pending | dead, taken -> pending

The broker applies a move and records it; a restarted broker applies the recorded moves again. Every move of a task is
O(log n). Structs are keyed and tagged as on the wire: fields are only appended, and new ones have defaults.
"""

import heapq
from bisect import bisect_left, insort

from broker.contract import LearnerReport, NodeReport, WeightChange, WeightRequest
from broker.delivery.nodes import NodeCounts
from broker.delivery.state import DeliveryState, Move
from broker.delivery.task_table import COMMITTED, DEAD, LEASED, READY, TAKEN, Entry
from common.rollouts import GroupMeta, Task
from common.waste import Waste

REMEMBERED_TOKENS = 8192  # a repeated result with one of the newest accepted tokens is still answered with True
MOST_NODES_NAMED = 64  # the newest nodes that leased a task


class Offered(Move, frozen=True, tag="offered"):
    task: Task

    def apply(self, state: DeliveryState) -> None:
        entry = state.tasks.living[self.task.serial] = Entry(self.task)
        state.tasks.requeue(entry)
        state.tasks.next_serial = max(state.tasks.next_serial, entry.serial + 1)


class Leased(Move, frozen=True, tag="leased"):
    """pending -> leased, for the oldest pending task."""

    serial: int
    node: str
    token: str

    def apply(self, state: DeliveryState) -> None:
        entry = state.tasks.living[heapq.heappop(state.tasks.pending)]
        if entry.serial != self.serial:
            raise ValueError(f"task {self.serial} was leased, the oldest pending one is {entry.serial}")
        entry.state = LEASED
        entry.node = self.node
        entry.token = self.token
        entry.attempts += 1
        entry.nodes = [*entry.nodes, self.node][-MOST_NODES_NAMED:]
        state.tasks.leased[self.token] = entry
        node = state.fleet.nodes.get(self.node)
        if node is not None:
            node.has_leased = True
            node.tokens.add(self.token)


class HandedBack(Move, frozen=True, tag="handed_back"):
    """leased -> pending; the attempt does not count."""

    token: str

    def apply(self, state: DeliveryState) -> None:
        entry = state.end_lease(self.token)
        entry.attempts -= 1
        state.tasks.requeue(entry)


class Lost(Move, frozen=True, tag="lost"):
    """leased -> pending, or dead at the `max_attempts`-th failure unless `spared`: another node may still succeed."""

    token: str
    reason: str
    max_attempts: int
    spared: bool = False

    def apply(self, state: DeliveryState) -> None:
        node = state.tasks.leased[self.token].node
        entry = state.end_lease(self.token)
        if node not in entry.failed_by and len(entry.failed_by) < 2:
            entry.failed_by = [*entry.failed_by, node]
        entry.failures += 1
        entry.reason = self.reason
        if entry.failures < self.max_attempts or self.spared:
            state.tasks.requeue(entry)
        else:
            state.tasks.finish(entry, DEAD)
            insort(state.tasks.freed, entry.serial)


class Accepted(Move, frozen=True, tag="accepted"):
    """leased -> ready. The group's payload follows the record; TaskTable.put_group attaches it."""

    token: str
    meta: GroupMeta

    def apply(self, state: DeliveryState) -> None:
        state.accepted[self.token] = state.tasks.leased[self.token].node
        if len(state.accepted) > REMEMBERED_TOKENS:
            state.accepted.popitem(last=False)
        entry = state.end_lease(self.token)
        entry.state = READY
        entry.token = self.token
        entry.meta = self.meta
        insort(state.tasks.ready, entry.serial)


class Taken(Move, frozen=True, tag="taken"):
    """ready -> taken by `step`, in this order."""

    step: int
    serials: list[int]

    def apply(self, state: DeliveryState) -> None:
        tasks = state.tasks
        count = len(self.serials)
        if tasks.ready[:count] != self.serials:
            raise ValueError(f"step {self.step} took {self.serials}, ready are {tasks.ready[:count]}")
        del tasks.ready[:count]
        for serial in self.serials:
            entry = tasks.living[serial]
            entry.state = TAKEN
            entry.step = self.step
        tasks.steps.setdefault(self.step, []).extend(self.serials)


class Filtered(Move, frozen=True, tag="filtered"):
    """Mark a taken group that its step does not train on; for the step's first `most_replaced` it takes others."""

    serial: int
    most_replaced: int

    def apply(self, state: DeliveryState) -> None:
        tasks = state.tasks
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

    def apply(self, state: DeliveryState) -> None:
        entry = state.tasks.living[self.serial]
        assert entry.step is not None
        state.tasks.steps[entry.step].remove(entry.serial)
        state.tasks.give_up(entry)


class Committed(Move, frozen=True, tag="committed"):
    """taken -> committed for everything that steps <= `step` took."""

    step: int

    def apply(self, state: DeliveryState) -> None:
        tasks = state.tasks
        highest = max(tasks.steps, default=state.committed_step)
        for step in sorted(s for s in tasks.steps if s <= self.step):
            tasks.freed_by_step.pop(step, None)
            entries = [tasks.living[serial] for serial in tasks.steps.pop(step)]
            for entry in entries:
                tasks.drop_payload(entry)
                tasks.finish(entry, COMMITTED)
            if tasks.retain_steps is not None:
                oldest = step - tasks.retain_steps + 1
                tasks.retained = {s: kept for s, kept in (tasks.retained | {step: entries}).items() if s >= oldest}
        state.committed_step = max(state.committed_step, min(self.step, highest))
        gone = bisect_left(tasks.freed, min(tasks.living, default=tasks.next_serial))
        del tasks.freed[:gone]  # older than every unfinished task: the list does not grow with the run
        tasks.freed_earlier += gone


class WeightsRequested(Move, frozen=True, tag="weights_requested"):
    """A command asked for other weights of sources."""

    request: WeightRequest

    def apply(self, state: DeliveryState) -> None:
        state.weight_requests[self.request.id] = self.request


class WeightsChanged(Move, frozen=True, tag="weights_changed"):
    """Tasks that follow were made with these weights."""

    change: WeightChange

    def apply(self, state: DeliveryState) -> None:
        state.weight_changes.append(self.change)
        for name in self.change.requests:
            state.weight_requests.pop(name, None)


class Reported(Move, frozen=True, tag="reported"):
    """The learner attached, ended, or changed something that outlives it."""

    report: LearnerReport

    def apply(self, state: DeliveryState) -> None:
        state.learner.accept(self.report)


class Joined(Move, frozen=True, tag="joined"):
    """A node joined, or a new process of one."""

    report: NodeReport

    def apply(self, state: DeliveryState) -> None:
        state.fleet.join(self.report, state.clock())


class Left(Move, frozen=True, tag="left"):
    node_id: str

    def apply(self, state: DeliveryState) -> None:
        state.fleet.leave(self.node_id)


class StepCursor(Move, frozen=True, tag="marks"):
    """Single values that replies to the learner depend on."""

    first_step: int
    committed_step: int

    def apply(self, state: DeliveryState) -> None:
        state.first_step = self.first_step
        state.committed_step = self.committed_step


class Statistics(Move, frozen=True, tag="statistics"):
    """Counters that no reply depends on, recorded about once a second."""

    next_event: int = 0
    lease_expiries: int = 0
    stale_results: int = 0
    past_generated: int = 0
    past_wasted: dict[str, Waste] = {}
    nodes: dict[str, NodeCounts] = {}

    @classmethod
    def of(cls, state: DeliveryState) -> "Statistics":
        fleet = state.fleet
        return cls(
            next_event=state.event_log.next_index,
            lease_expiries=state.lease_expiries,
            stale_results=state.stale_results,
            past_generated=fleet.past_generated,
            past_wasted=dict(fleet.past_wasted),
            nodes={name: NodeCounts(node.delivered_tokens, dict(node.counted)) for name, node in fleet.nodes.items()},
        )

    def apply(self, state: DeliveryState) -> None:
        fleet = state.fleet
        state.lease_expiries = self.lease_expiries
        state.stale_results = self.stale_results
        fleet.past_generated = self.past_generated
        fleet.past_wasted = dict(self.past_wasted)
        for name in self.nodes.keys() & fleet.nodes.keys():
            fleet.nodes[name].delivered_tokens = self.nodes[name].delivered_tokens
            fleet.nodes[name].counted = dict(self.nodes[name].counted)
        state.event_log.next_index = max(state.event_log.next_index, self.next_event)


class Closed(Move, frozen=True, tag="closed"):
    """The broker ended in good order: everything before this record was synced."""

    def apply(self, state: DeliveryState) -> None:
        state.learner.job_ended = True


AnyMove = (
    Offered | Leased | HandedBack | Lost | Accepted | Taken | Filtered | GivenUp | Committed
    | WeightsRequested | WeightsChanged | Reported | Joined | Left | StepCursor | Statistics | Closed
)  # fmt: skip
