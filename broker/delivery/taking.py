"""The rules for the learner: attaching, offering tasks, taking groups and committing them."""

from collections.abc import Sequence

import msgspec

from broker.contract import (
    LEARNER_ENDED,
    Assembly,
    Attached,
    HeartbeatReply,
    LearnerReport,
    LogPosition,
    MachineReport,
)
from broker.delivery import moves
from broker.delivery.learner_fencing import lasting
from broker.delivery.learner_machines import MACHINES_EVENT
from broker.delivery.tables import Tables
from broker.delivery.task_table import Entry
from common.errors import BrokerError, StoreChanged
from common.rollouts import Task


class Taking(Tables):
    """The learner's side of the delivery state; see LearnerBroker in broker/contract.py."""

    def attach(self, report: LearnerReport) -> Attached:
        """Begin with a learner that (re)starts. Raises BrokerError as `report`.

        If no task was ever offered, task 0 is due at the step that the learner resumes at. So the staleness bound is
        kept for a learner that continues from a checkpoint with a new broker.
        """
        self.report(report)
        if self.tasks.next_serial == 0 and self.first_step != report.step:
            self.do(moves.Marks(report.step, self.committed_step))
        self.event_log.add("learner_attached", incarnation=report.incarnation, pid=report.pid, step=report.step)
        return Attached(self.tasks.next_serial, self.store_id, self.committed_step)

    def report(self, report: LearnerReport, log: str | None = None, log_rank: int = -1) -> HeartbeatReply | None:
        """Keep a report. Raises BrokerError for a replaced learner, or while another of its incarnation is alive."""
        self.learner.check_report(report, self.clock())
        before = self.learner.report
        if before is None or lasting(before) != lasting(report):
            self.do(moves.Reported(report))
        else:
            self.learner.accept(report)
        self.learner.seen_at = self.clock()
        if before is not None and before.state != report.state and report.state in LEARNER_ENDED:
            self.event_log.add("learner_" + report.state, incarnation=report.incarnation, step=report.step)
        wanted = self.logs.next_rank(log_rank, log)
        if not (self.stopping or wanted >= 0 or self.run.trace):
            return None
        return HeartbeatReply(stop=self.stopping, log_rank=wanted, time_s=self.trace_clock() if self.run.trace else 0.0)

    def gather(self, report: MachineReport, log: str | None = None, log_rank: int = -1) -> Assembly:
        """The order to a launcher of learner ranks; the rules are in learner_machines.py."""
        before = self.machines.round
        learner_state = self.learner.report.state if self.learner.report else ""
        told = self.machines.gather(report, learner_state, self.clock(), self.stopping)
        current = self.machines.round
        if current is not None and current is not before:
            hosts = ", ".join(member.host for member in current.members)
            self.event_log.add(MACHINES_EVENT, round=current.number, hosts=hosts, restarts=self.machines.restarts)
        return msgspec.structs.replace(told, log_rank=self.logs.next_rank(log_rank, log))

    def check_learner(self, incarnation: int | None, instance: str = "") -> None:
        """Run before every request of a learner: it counts as a sign of life. Raises BrokerError for a replaced one."""
        self.learner.check(incarnation, instance)
        if incarnation is not None:
            self.learner.seen_at = self.clock()

    def check_position(self, position: LogPosition | None) -> None:
        """Raise StoreChanged when the log does not contain this position of an attached learner."""
        if position is None:
            return
        ends = [*list(self.openings.values())[1:], self.recorder.seq]
        if position.seq > dict(zip(self.openings, ends, strict=True)).get(position.opening, -1):
            raise StoreChanged(
                f"the broker's store {self.store_id} lacks what this learner was told: records up to {position.seq} "
                f"of the start {position.opening}. It is another store, or an older state of the same one"
            )

    def offer(self, tasks: Sequence[Task]) -> int:
        """Add tasks; known ones are ignored. Returns how many were new; a gap raises BrokerError and adds none."""
        first = expected = self.tasks.next_serial
        for task in tasks:
            if task.serial > expected or task.serial < 0:
                raise BrokerError(f"task {task.serial} was offered, the next serial is {expected}; offer without gaps")
            expected = max(expected, task.serial + 1)
        for task in tasks:
            if task.serial >= self.tasks.next_serial:
                self.do(moves.Offered(task))
        added = self.tasks.next_serial - first
        self.lease_revision += bool(added)
        return added

    def take(self, step: int, count: int, in_order: bool = False) -> list[Entry] | None:
        """Give `step` its groups: those it took before, and the oldest ready ones; None when too few are ready.

        Filtered groups that freed their slot come on top of `count`. Raises BrokerError when `step` is committed.
        """
        if step <= self.committed_step:
            raise BrokerError(f"step {step} is committed (up to {self.committed_step}); its groups are gone")
        missing = count - self.tasks.slots_filled(step)
        if missing > 0:
            if not self.tasks.has_ready(missing, in_order):
                if missing > self.wanted:
                    self.wanted = missing
                    self.lease_revision += 1
                return None
            self.wanted = self.run.groups_per_step
            self.do(moves.Taken(step, self.tasks.ready[:missing]))
            self.lease_revision += 1
        return [self.tasks.living[serial] for serial in self.tasks.steps.get(step, [])]

    def regenerate(self, step: int, serials: Sequence[int]) -> None:
        """Give up groups that `step` has and did not filter. Raises BrokerError for an unknown or finished serial."""
        for entry in self.tasks.taken_by(step, serials, "generated again"):
            self._waste_group(entry, "regenerated")
            self.do(moves.GivenUp(entry.serial))
            self.event_log.add("regenerate", serial=entry.serial, step=step)
        self.lease_revision += 1

    def filter(self, step: int, serials: Sequence[int], most_replaced: int) -> None:
        """Mark groups that `step` does not train on; its first `most_replaced` free their slot. As `regenerate`."""
        entries = self.tasks.taken_by(step, serials, "filtered")
        before = self.tasks.freed_by_step.get(step, 0)
        for entry in entries:
            self.do(moves.Filtered(entry.serial, most_replaced))
            self._waste_group(entry, "filtered")
        replaced = self.tasks.freed_by_step.get(step, 0) - before
        if entries:
            self.event_log.add("filter", step=step, groups=len(entries), replaced=replaced)
        self.lease_revision += bool(replaced)

    def commit(self, step: int) -> int:
        """Release everything that steps <= `step` took; returns how many groups that were."""
        if step <= self.committed_step or not self.tasks.steps:
            return 0
        before = self.tasks.history.committed
        self.do(moves.Committed(step))
        count = self.tasks.history.committed - before
        if count:
            self.event_log.add("commit", step=step, groups=count)
            self.lease_revision += 1
        return count

    def _waste_group(self, entry: Entry, reason: str) -> None:
        if entry.meta is not None:
            self.fleet.waste_of(entry.nodes[-1], reason, entry.meta.sampled_tokens, entry.meta.generation_s)
