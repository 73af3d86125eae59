"""All data of a run, and the recorder that every change of it goes to.

It has no rules. They are in learner_rules.py and node_rules.py, the changes that they make in moves.py.
"""

import os
import re
import secrets
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.contract import (
    LEARNER_ENDED,
    BrokerStatus,
    LedgerEntry,
    LogPosition,
    RunInfo,
    StoreStatus,
    WeightChange,
    WeightRequest,
)
from broker.delivery.deadlines import Deadlines
from broker.delivery.evaluation import EvaluationTable
from broker.delivery.learner_fencing import LearnerRecord
from broker.delivery.learner_machines import LOST_S, MACHINES_EVENT, LearnerMachines
from broker.delivery.logs import EventLog, LogTails
from broker.delivery.nodes import Fleet
from broker.delivery.services import Services
from broker.delivery.task_table import Entry, StoredPayload, TaskTable
from common.errors import BrokerError
from common.process.logs import log_end, log_path
from common.segments import LineThread
from common.span_buffer import SPANS
from common.spans import SpanBatch
from common.staleness import Window
from common.transcripts import SentTranscript
from common.waste import wasted_tokens

TOKEN_BYTES = 8
MOST_OPENINGS = 64


class Move(msgspec.Struct, frozen=True):
    """A change that survives a restart. The subclasses are in broker/delivery/moves.py."""

    @abstractmethod
    def apply(self, state: "DeliveryState") -> None:
        """Make the change. Raises LookupError or ValueError when it does not fit the data."""


class Recorder:
    """Receives every move, in order. This one records nothing: its state is in memory only, or only read."""

    seq = 0  # number of the last record

    def record(self, move: Move) -> None: ...

    def record_group(self, move: Move, payload: object) -> StoredPayload | None:
        """Record a move with a group's payload; returns the payload's place in the store."""

    def status(self) -> StoreStatus | None:
        """The store's status; None when there is no store."""


@dataclass
class RejectedMessages:
    """How many messages were refused; `denied` and `kept` are some of them."""

    refused: int = 0
    denied: int = 0  # their sender's role may not send them
    kept: int = 0  # in RUN/quarantine


class DeliveryState:
    """Tasks, leases, groups, nodes and the learner of one run. Single-threaded."""

    def __init__(
        self,
        run: RunInfo,
        clock: Callable[[], float] = time.monotonic,  # seconds
        new_token: Callable[[], str] = lambda: secrets.token_hex(TOKEN_BYTES),  # lease tokens that never repeat
        events: EventLog | None = None,
        recorder: Recorder | None = None,
        retain_steps: int | None = None,  # so many committed steps stay known for a replay; None: there is no store
        store_id: str = "",  # that of the store that is read; '': a new one is made
    ) -> None:
        self.run = run
        self.clock = clock
        self.new_token = new_token
        self.event_log = events or EventLog()
        self.recorder = recorder or Recorder()
        self.store_id = store_id or new_token()
        # starts of brokers on this store, oldest first: random id -> the last record before it
        self.openings: dict[str, int] = {secrets.token_hex(TOKEN_BYTES): 0}
        self.tasks = TaskTable(retain_steps)
        self.fleet = Fleet(run.lease_s)
        self.learner = LearnerRecord()
        self.machines = LearnerMachines()
        self.evaluation = EvaluationTable(run.max_attempts)
        self.logs = LogTails(clock)
        self.services = Services(run.name, self.logs)
        self.accepted: OrderedDict[str, str] = OrderedDict()  # token -> node of the newest accepted results
        self.lease_deadlines: Deadlines[str] = Deadlines()
        self.first_step = 0  # the step at which task 0 is due
        self.committed_step = -1
        self.weight_requests: dict[str, WeightRequest] = {}  # that no task was made with yet, oldest first
        self.weight_changes: list[WeightChange] = []  # that came with tasks, oldest first
        self.lease_expiries = 0
        self.stale_results = 0
        self.wanted = run.groups_per_step  # groups that the learner's next take needs
        self.unconfirmed: set[str] = set()  # recovered leases whose nodes have sent no heartbeat yet
        self.lease_revision = 0  # grows whenever a lease that was refused may now be given to any node
        self.newest_version = -1  # no node has a later one
        self.changed_nodes: set[str] = set()  # nodes whose long polls must be checked again
        self.address = ""  # where clients reach the broker; the server sets it
        self.stopping = False  # the job is being stopped; a broker that starts anew knows nothing of it
        self.recovery_s = 0.0
        self.transcripts: LineThread[SentTranscript] | None = None  # writes those of failed groups
        self.trace: Callable[[SpanBatch], None] = lambda batch: None  # gets the nodes' spans
        self.trace_clock = lambda: SPANS.now()  # for answers, Unix seconds
        self.rejected = RejectedMessages()

    def do(self, move: Move) -> None:
        move.apply(self)
        self.recorder.record(move)

    def open(self, seq: int) -> None:
        """A broker starts to write behind record `seq`."""
        newest = list(self.openings.items())[1 - MOST_OPENINGS :]
        self.openings = {**dict(newest), secrets.token_hex(TOKEN_BYTES): seq}

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

    @property
    def position(self) -> LogPosition:
        return LogPosition(next(reversed(self.openings)), self.recorder.seq)

    @property
    def window(self) -> Window:
        run = self.run
        tasks = self.tasks
        return Window(run.groups_per_step, run.max_staleness, self.first_step, tasks.freed_earlier, tuple(tasks.freed))

    @property
    def full(self) -> bool:
        """Whether only those tasks are leased that the learner's next take needs."""
        return self.tasks.store_lags or self.tasks.bytes_expected() > self.run.max_bytes

    def begin_lease(self, entry: Entry) -> None:
        entry.leased_at = self.clock()
        entry.deadline = entry.leased_at + min(self.run.lease_s, self.run.max_lease_s)
        self.lease_deadlines.add(entry.token, entry.deadline)

    def end_lease(self, token: str) -> Entry:
        """Take a lease from its node; returns the task, which is in no state until the caller gives it one."""
        entry = self.tasks.leased[token]
        del self.tasks.leased[token]
        self.lease_deadlines.discard(token)
        node = self.fleet.nodes.get(entry.node)
        if node is not None:
            node.tokens.discard(token)
        entry.token = entry.node = ""
        return entry

    def lease_of(self, token: str) -> Entry | None:
        """The task or held-out problem that is leased under this token."""
        return self.tasks.leased.get(token) or self.evaluation.leased.get(token)

    def next_deadline(self) -> float | None:
        """When `NodeRules.expire` may next have something to do, in monotonic seconds; None: never."""
        times = (self.lease_deadlines.next(), self.fleet.deadlines.next())
        return min((time for time in times if time is not None), default=None)

    def ledger(self) -> list[LedgerEntry]:
        """Every task at once; for tests and measurements."""
        return [self.tasks.line(serial) for serial in self.tasks.known()]

    def log(self, role: str) -> str | None:
        """The end of a role's log, None until the role has sent it. Raises BrokerError for an unknown role."""
        if role == "broker":
            return log_end(log_path(Path(self.run.run_dir, "logs"), role, "0"))
        if rank := re.fullmatch(r"learner(?:-(\d{1,5}))?", role, re.ASCII):
            return self.logs.ask(int(rank[1] or 0))
        if role not in self.fleet.nodes and not self.services.has(role):
            raise BrokerError(f"no node or scorer {role!r} has joined")
        return self.logs.ask(role)

    def status(self) -> BrokerStatus:
        now = self.clock()
        tasks = self.tasks
        wasted = self.fleet.waste()
        store = self.recorder.status()
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
            refused_messages=self.rejected.refused,
            denied_requests=self.rejected.denied,
            quarantined_messages=self.rejected.kept,
            steps_taken=sum(tasks.slots_filled(step) >= self.run.groups_per_step for step in tasks.steps),
            groups_filtered=tasks.filtered,
            waste=wasted,
            store=store,
            full=self.full,
            bytes_in_memory=tasks.bytes_in_memory,
            store_lags=tasks.store_lags,
            machines=self.machines.status(now),
            machines_wait=self.machines.waits(now),
            stopping=self.stopping,
            transcripts_dropped=self.transcripts.dropped if self.transcripts is not None else 0,
            evaluation=self.evaluation.progress,
            window=self.window,
            left=self.fleet.status_of_left(now),
            weights=self.weight_changes[-1] if self.weight_changes else None,
            weight_requests=list(self.weight_requests.values()),
            evaluation_tokens_total=sum(node.report.evaluation_tokens for node in self.fleet.nodes.values()),
            services=self.services.status(now),
        )
