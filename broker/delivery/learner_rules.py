"""The rules for the learner: attaching, offering tasks, taking groups, committing them, evaluating."""

import time
from collections.abc import Container, Mapping, Sequence
from itertools import islice

import msgspec

from broker.contract import (
    LEARNER_ENDED,
    Attached,
    BrokerStatus,
    Evaluated,
    HeartbeatReply,
    LearnerReport,
    LogPosition,
    MachineReport,
    RendezvousOrder,
    WeightChange,
    WeightRequest,
)
from broker.delivery import moves
from broker.delivery.learner_fencing import lasting
from broker.delivery.learner_machines import MACHINES_EVENT
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import Entry
from common.errors import BrokerError, StoreChanged
from common.evaluation import EvaluationOrder
from common.rollouts import Task


class LearnerRules:
    """The learner's requests; see LearnerBroker in broker/client/calls.py."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state
        self._tasks = state.tasks
        self._record = state.learner
        self._machines = state.machines
        self._events = state.event_log

    def attach(self, report: LearnerReport) -> Attached:
        """Begin with a learner that (re)starts. Raises BrokerError as `report`.

        If no task was ever offered, task 0 is due at the step that the learner resumes at. So the staleness bound is
        kept for a learner that continues from a checkpoint with a new broker.
        """
        self.report(report)
        if self._tasks.next_serial == 0 and self._state.first_step != report.step:
            self._state.do(moves.StepCursor(report.step, self._state.committed_step))
        self._events.add("learner_attached", incarnation=report.incarnation, pid=report.pid, step=report.step)
        state = self._state
        return Attached(self._tasks.next_serial, state.store_id, state.committed_step, list(state.weight_changes))

    def report(self, report: LearnerReport, log: str | None = None, log_rank: int = -1) -> HeartbeatReply | None:
        """Keep a report.

        Raises BrokerError for another run's learner or a replaced one, or while another of its incarnation is alive.
        """
        self._state.run.check_member(report.run_id, "learner")
        self._record.check_report(report, self._state.clock())
        before = self._record.report
        if before is None or lasting(before) != lasting(report):
            self._state.do(moves.Reported(report))
        else:
            self._record.accept(report)
        self._record.seen_at = self._state.clock()
        if before is not None and before.state != report.state and report.state in LEARNER_ENDED:
            self._events.add("learner_" + report.state, incarnation=report.incarnation, step=report.step)
        wanted = self._state.logs.next_rank(log_rank, log)
        if not (self._state.stopping or wanted >= 0 or self._state.run.trace):
            return None
        time_s = self._state.trace_clock() if self._state.run.trace else 0.0
        return HeartbeatReply(stop=self._state.stopping, log_rank=wanted, time_s=time_s)

    def gather(self, report: MachineReport, log: str | None = None, log_rank: int = -1) -> RendezvousOrder:
        """The order to a launcher of learner ranks; the rules are in learner_machines.py."""
        before = self._machines.round
        learner_state = self._record.report.state if self._record.report else ""
        told = self._machines.gather(report, learner_state, self._state.clock(), self._state.stopping)
        current = self._machines.round
        if current is not None and current is not before:
            hosts = ", ".join(member.host for member in current.members)
            self._events.add(MACHINES_EVENT, round=current.number, hosts=hosts, restarts=self._machines.restarts)
        return msgspec.structs.replace(told, log_rank=self._state.logs.next_rank(log_rank, log))

    def check_learner(self, incarnation: int | None, instance: str = "") -> None:
        """Run before every request of a learner: it counts as a sign of life. Raises BrokerError for a replaced one."""
        self._record.check(incarnation, instance)
        if incarnation is not None:
            self._record.seen_at = self._state.clock()

    def check_position(self, position: LogPosition | None) -> None:
        """Raise StoreChanged when the log does not contain this position of an attached learner."""
        if position is None:
            return
        ends = [*list(self._state.openings.values())[1:], self._state.recorder.seq]
        if position.seq > dict(zip(self._state.openings, ends, strict=True)).get(position.opening, -1):
            raise StoreChanged(
                f"the broker's store {self._state.store_id} lacks what this learner was told: records up to "
                f"{position.seq} of the start {position.opening}. It is another store, or an older state of this one"
            )

    def offer(self, tasks: Sequence[Task], changes: Sequence[WeightChange] = (), first_change: int = 0) -> int:
        if first_change > len(self._state.weight_changes):
            raise BrokerError(f"change {first_change} of the weights comes after {len(self._state.weight_changes)}")
        first = expected = self._tasks.next_serial
        for task in tasks:
            if task.serial > expected or task.serial < 0:
                raise BrokerError(f"task {task.serial} was offered, the next serial is {expected}; offer without gaps")
            expected = max(expected, task.serial + 1)
        for change in changes[len(self._state.weight_changes) - first_change :]:
            self._state.do(moves.WeightsChanged(change))
            told = {"position": change.position, "step": change.step, "requests": " ".join(change.requests)}
            self._events.add("weights_changed", **told, weights=_shown(change.effective))
        for task in tasks:
            if task.serial >= self._tasks.next_serial:
                self._state.do(moves.Offered(task))
        added = self._tasks.next_serial - first
        self._state.lease_revision += bool(added)
        return added

    def take(self, step: int, count: int, in_order: bool = False) -> list[Entry] | None:
        """Give `step` its groups: those it took before, and the oldest ready ones; None when too few are ready.

        Filtered groups that freed their slot come on top of `count`. Raises BrokerError when `step` is committed.
        """
        if step <= self._state.committed_step:
            raise BrokerError(f"step {step} is committed (up to {self._state.committed_step}); its groups are gone")
        missing = count - self._tasks.slots_filled(step)
        if missing > 0:
            if not self._tasks.has_ready(missing, in_order):
                if missing > self._state.wanted:
                    self._state.wanted = missing
                    self._state.lease_revision += 1
                return None
            self._state.wanted = self._state.run.groups_per_step
            self._state.do(moves.Taken(step, self._tasks.ready[:missing]))
            self._state.lease_revision += 1
        return [self._tasks.living[serial] for serial in self._tasks.steps.get(step, [])]

    def look(self, count: int, held: Container[str]) -> list[Entry]:
        """At most `count` of the oldest groups that are ready, in memory and not `held`. Changes nothing."""
        ready = (self._tasks.living[serial] for serial in self._tasks.ready)
        return list(islice((e for e in ready if e.in_memory and e.token and e.token not in held), count))

    def regenerate(self, step: int, serials: Sequence[int]) -> None:
        """Give up groups that `step` has and did not filter. Raises BrokerError for an unknown or finished serial."""
        for entry in self._tasks.taken_by(step, serials, "generated again"):
            self._waste_group(entry, "regenerated")
            self._state.do(moves.GivenUp(entry.serial))
            self._events.add("regenerate", serial=entry.serial, step=step)
        self._state.lease_revision += 1

    def filter(self, step: int, serials: Sequence[int], most_replaced: int) -> None:
        """Mark groups that `step` does not train on; its first `most_replaced` free their slot. As `regenerate`."""
        entries = self._tasks.taken_by(step, serials, "filtered")
        before = self._tasks.freed_by_step.get(step, 0)
        for entry in entries:
            self._state.do(moves.Filtered(entry.serial, most_replaced))
            self._waste_group(entry, "filtered")
        replaced = self._tasks.freed_by_step.get(step, 0) - before
        if entries:
            self._events.add("filter", step=step, groups=len(entries), replaced=replaced)
        self._state.lease_revision += bool(replaced)

    def commit(self, step: int) -> int:
        """Release everything that steps <= `step` took; returns how many groups that were."""
        if step <= self._state.committed_step or not self._tasks.steps:
            return 0
        before = self._tasks.history.committed
        self._state.do(moves.Committed(step))
        count = self._tasks.history.committed - before
        if count:
            self._events.add("commit", step=step, groups=count)
            self._state.lease_revision += 1
        return count

    def evaluate(
        self, order: EvaluationOrder | None, tasks: Sequence[Task], stored: Sequence[int], shared: bool
    ) -> Evaluated:
        table = self._state.evaluation
        if order != table.order:
            table.begin(order, shared)
        self._state.lease_revision += bool(tasks) or shared != table.shared
        table.shared = shared
        return table.turn(tasks, stored)

    def set_weights(self, request: WeightRequest) -> int:
        """Keep a request until the learner carries it out; a known one changes nothing. Returns the next serial."""
        done = {name for change in self._state.weight_changes for name in change.requests}
        if request.id not in done | self._state.weight_requests.keys():
            self._state.do(moves.WeightsRequested(msgspec.structs.replace(request, time_s=time.time())))
            told = {"request": request.id, "serial": self._tasks.next_serial}
            self._events.add("weights_requested", **told, weights=_shown(request.weights))
        return self._tasks.next_serial

    def stop(self) -> BrokerStatus:
        if not self._state.stopping:
            self._state.stopping = True
            self._events.add("stop_requested")
        return self._state.status()

    def _waste_group(self, entry: Entry, reason: str) -> None:
        if entry.meta is not None:
            self._state.fleet.waste_of(entry.nodes[-1], reason, entry.meta.sampled_tokens, entry.meta.generation_s)


def _shown(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
