"""All data of a run, and the recorder that every change of it goes to."""

import secrets
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from broker.contract import RunInfo, StoreStatus
from broker.delivery.deadlines import Deadlines
from broker.delivery.evaluation import EvaluationTable
from broker.delivery.event_log import EventLog
from broker.delivery.learner_fencing import LearnerRecord
from broker.delivery.learner_machines import LearnerMachines
from broker.delivery.log_ends import LogEnds
from broker.delivery.nodes import Fleet
from broker.delivery.task_table import Entry, Stored, TaskTable
from common.segments import LineThread
from common.span_buffer import SPANS
from common.spans import SpanBatch
from common.transcripts import SentTranscript

TOKEN_BYTES = 8


class Move(msgspec.Struct, frozen=True):
    """A change that survives a restart. The subclasses are in broker/delivery/moves.py."""

    @abstractmethod
    def apply(self, tables: "Tables") -> None:
        """Make the change. Raises LookupError or ValueError when it does not fit the data."""


class Recorder:
    """Receives every move, in order. This one records nothing: its state is in memory only, or only read."""

    def record(self, move: Move) -> None: ...

    def record_group(self, move: Move, payload: object) -> Stored | None:
        """Record a move with a group's payload; returns the payload's place in the store."""

    def status(self) -> StoreStatus | None:
        """The store's status; None when there is no store."""


class Tables:
    """Data without rules; the rules are in taking.py and leasing.py."""

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
        self.run, self.clock = run, clock
        self.event_log, self.recorder = events or EventLog(), recorder or Recorder()
        self.new_token, self.store_id = new_token, store_id or new_token()
        self.tasks = TaskTable(retain_steps)
        self.fleet = Fleet(run.lease_s)
        self.learner = LearnerRecord()
        self.machines = LearnerMachines()
        self.evaluation = EvaluationTable(run.max_attempts)
        self.accepted: OrderedDict[str, str] = OrderedDict()  # token -> node of the newest accepted results
        self.lease_deadlines: Deadlines[str] = Deadlines()
        self.first_step, self.committed_step = 0, -1  # `first_step`: the step at which task 0 is due
        self.lease_expiries: int = 0
        self.stale_results: int = 0
        self.wanted = run.groups_per_step  # groups that the learner's next take needs
        self.unconfirmed: set[str] = set()  # recovered leases whose nodes have sent no heartbeat yet
        self.lease_revision: int = 0  # grows whenever a lease that was refused may now be given to any node
        self.newest_version = -1  # no node has a later one
        self.changed_nodes: set[str] = set()  # nodes whose waiting lease requests must be checked again
        self.address = ""  # where clients reach the broker; the server sets it
        # `stopping`: the job is being stopped; a broker that starts anew knows nothing of it
        self.stopping, self.logs = False, LogEnds(clock)
        self.recovery_s = 0.0
        self.transcripts: LineThread[SentTranscript] | None = None  # writes those of failed groups
        self.trace: Callable[[SpanBatch], None] = lambda batch: None  # gets the nodes' spans
        self.trace_clock = lambda: SPANS.now()  # for answers, Unix seconds
        self.refused_messages = self.denied_requests = self.quarantined_messages = 0

    def do(self, move: Move) -> None:
        """Make a change and record it."""
        move.apply(self)
        self.recorder.record(move)

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

    def begin_lease(self, entry: Entry) -> None:
        now = self.clock()
        entry.leased_at, entry.deadline = now, now + min(self.run.lease_s, self.run.max_lease_s)
        self.lease_deadlines.add(entry.token, entry.deadline)
