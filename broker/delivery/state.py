"""The delivery state machine: single-threaded, with the clock, the token generator and the recorder passed in.

The rules are those of broker/contract.py. They are in taking.py (learner) and leasing.py (nodes), the changes that
they make in moves.py, and the data in tables.py.
"""

import os
import re
from itertools import islice
from pathlib import Path

import msgspec

from broker.contract import LEARNER_ENDED, LEDGER_LINES, BrokerEvent, BrokerStatus, Evaluated, LedgerEntry
from broker.delivery.learner_machines import LOST_S, MACHINES_EVENT
from broker.delivery.leasing import Leasing
from broker.delivery.nodes import wasted_tokens
from broker.delivery.taking import Taking
from common.errors import BrokerError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.process.logs import log_end, log_path
from common.rollouts import Task


class DeliveryState(Taking, Leasing):
    """Tasks, leases, groups and nodes of one run; see Tables for the arguments."""

    def resume(self) -> None:
        """Begin to serve what was recovered: leases and nodes get a fresh deadline, since the time away is unknown."""
        self.learner.seen_at = self.clock()
        state = self.learner.report.state if self.learner.report is not None else ""
        formed = any(event.kind == MACHINES_EVENT for event in self.event_log.after(-1))
        may_run = formed if state in ("", "failed") else state not in LEARNER_ENDED
        self.machines.hold_until = self.clock() + LOST_S if may_run else 0.0
        for entry in self.tasks.leased.values():
            self.begin_lease(entry)
        self.unconfirmed = set(self.tasks.leased)
        self.lease_revision += 1

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do, in monotonic seconds; None: never."""
        times = (self.lease_deadlines.next(), self.fleet.deadlines.next())
        return min((time for time in times if time is not None), default=None)

    def evaluate(self, order: EvaluationOrder | None, tasks: list[Task], stored: list[int], shared: bool) -> Evaluated:
        """Begin, continue or (None) end the round of evaluation; see LearnerBroker.evaluate."""
        if order != self.evaluation.order:
            self.evaluation.begin(order, shared)
        self.lease_revision += bool(tasks) or shared != self.evaluation.shared
        self.evaluation.shared = shared
        return self.evaluation.turn(tasks, stored)

    def complete_evaluation(self, node_id: str, token: str, result: EvaluationResult) -> bool:
        """Take the samples of a held-out problem; see NodeBroker.complete_evaluation."""
        self._seen(node_id)
        return self.evaluation.complete(node_id, token, result)

    def ledger(self) -> list[LedgerEntry]:
        """Every task at once; for tests and measurements."""
        return [self.tasks.line(serial) for serial in self.tasks.known()]

    def ledger_page(self, first: int, unfinished: bool) -> list[LedgerEntry]:
        """The next tasks from `first` on; see ObserverBroker.ledger_pages."""
        tasks = self.tasks
        serials = sorted(serial for serial in tasks.living if serial >= first) if unfinished else tasks.known(first)
        return [tasks.line(serial) for serial in islice(serials, LEDGER_LINES)]

    def events(self, after: int) -> list[BrokerEvent]:
        return self.event_log.after(after)

    def stop(self) -> BrokerStatus:
        """Ask every role to leave; the server ends when they have."""
        if not self.stopping:
            self.stopping = True
            self.event_log.add("stop_requested")
        return self.status()

    def log(self, role: str) -> str | None:
        """The end of a role's log, None until the role has sent it. Raises BrokerError for an unknown role."""
        if role == "broker":
            return log_end(log_path(Path(self.run.run_dir, "logs"), role, "0"))
        if rank := re.fullmatch(r"learner(?:-(\d{1,5}))?", role, re.ASCII):
            return self.logs.ask(int(rank[1] or 0))
        if role not in self.fleet.nodes:
            raise BrokerError(f"no node {role!r} has joined")
        return self.logs.ask(role)

    def status(self) -> BrokerStatus:
        now = self.clock()
        tasks, wasted, store = self.tasks, self.fleet.waste(), self.recorder.status()
        if store is not None:
            store = msgspec.structs.replace(store, recovery_s=self.recovery_s)
        return BrokerStatus(
            pid=os.getpid(),
            address=self.address,
            run=self.run,
            groups_pending=len(tasks.pending),
            groups_ready=len(tasks.ready),
            groups_leased=len(tasks.leased),
            groups_taken=sum(len(serials) for serials in tasks.steps.values()),
            groups_committed=tasks.history.committed,
            groups_dead=tasks.history.dead,
            bytes_held=tasks.bytes_held,
            lease_expiries=self.lease_expiries,
            stale_results=self.stale_results,
            tokens_generated_total=self.fleet.tokens_generated(),
            tokens_wasted_total=wasted_tokens(wasted),
            learner=self.learner.status(now),
            learner_last_seen_s=self.learner.silent_s(now),
            nodes=self.fleet.status(now),
            oldest_lease_s=max((now - e.leased_at for e in tasks.leased.values()), default=0.0),
            refused_messages=self.refused_messages,
            denied_requests=self.denied_requests,
            quarantined_messages=self.quarantined_messages,
            steps_taken=sum(tasks.slots_filled(step) >= self.run.groups_per_step for step in tasks.steps),
            groups_filtered=tasks.filtered,
            waste=wasted,
            store=store,
            full=tasks.bytes_expected() > self.run.max_bytes,
            machines=self.machines.status(now),
            machines_wait=self.machines.waits(now),
            stopping=self.stopping,
            transcripts_dropped=self.transcripts.dropped if self.transcripts is not None else 0,
            evaluation=self.evaluation.progress,
            window=self.window,
            left=self.fleet.status_of_left(now),
            evaluation_tokens_total=sum(node.report.evaluation_tokens for node in self.fleet.nodes.values()),
        )
