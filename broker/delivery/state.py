"""The delivery state machine: pure, single-threaded, with the clock and the token generator passed in.

Every backend that keeps its state in one process is a shell around this class. The rules are those of
broker/contract.py; the structures are in broker/delivery/task_table.py and broker/delivery/nodes.py.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from broker.contract import (
    LEARNER_ENDED,
    Attached,
    BrokerEvent,
    BrokerStatus,
    HeartbeatReply,
    LearnerReport,
    Lease,
    LedgerEntry,
    NodeReport,
    RunInfo,
)
from broker.delivery.admission import admits_oldest
from broker.delivery.deadlines import Deadlines
from broker.delivery.event_log import EventLog
from broker.delivery.learner_fencing import LearnerRecord
from broker.delivery.node_ownership import NodeOwners
from broker.delivery.nodes import Fleet, Node, same_process
from broker.delivery.status import status_of
from broker.delivery.task_table import LEASED, Entry, TaskTable
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task

ALONE = 4  # times tasks.max_attempts: so often one node must fail a task to kill it while others work
REMEMBERED_TOKENS = 8192  # accepted results whose repetition is still answered with True


class DeliveryState:
    """Tasks, leases, groups and nodes of one run.

    Args:
        run: fixed facts of the job.
        clock: monotonic seconds.
        new_token: unguessable, never repeating strings for leases.
        events: where events go.
        pid, address: of the broker, for the status.
        store_id: of the store that this state was read from; a new one when there was none.
    """

    def __init__(
        self,
        run: RunInfo,
        clock: Callable[[], float],
        new_token: Callable[[], str],
        events: EventLog,
        pid: int = 0,
        address: str = "",
        store_id: str = "",
    ) -> None:
        self.run = run
        self.address = address
        self.store_id = store_id or new_token()
        self.tasks = TaskTable()
        self.fleet = Fleet(run.lease_s)
        self.owners = NodeOwners()
        self.event_log = events
        self.lease_revision = 0  # grows whenever a lease that was refused before may now be given to any node
        self.changed_nodes: set[str] = set()  # of which alone that may be so, or whose requests have an end
        self.newest_version = -1  # no node holds a later one
        self.refused_messages = self.denied_requests = self.quarantined_messages = 0
        self.learner = LearnerRecord()
        self.clock, self._new_token, self.pid = clock, new_token, pid
        self._lease_deadlines = Deadlines()
        self._accepted: OrderedDict[str, str] = OrderedDict()  # token -> node of the newest accepted results
        self.committed_step = -1
        self._first_step = 0  # the step at which task 0 is due
        self._wanted = run.groups_per_step  # groups that the learner needs to go on
        self.lease_expiries = self.stale_results = 0

    # ---------------------------------------------------------------- learner

    def attach(self, report: LearnerReport) -> Attached:
        """A learner (re)starts. Raises BrokerError when it was replaced, or another of its incarnation is alive.

        Where no task was ever offered, task 0 is due at the step that the learner resumes at: so the staleness
        bound holds for a learner that continues from a checkpoint with a new broker.
        """
        self.report(report)
        if self.tasks.next_serial == 0:
            self._first_step = report.step
        self.event_log.add("learner_attached", incarnation=report.incarnation, pid=report.pid, step=report.step)
        return Attached(self.tasks.next_serial, self.store_id, self.committed_step)

    def report(self, report: LearnerReport) -> None:
        """Keep what the learner says of itself. Raises BrokerError when fenced."""
        before = self.learner.update(report, self.clock())
        if before is not None and before.state != report.state and report.state in LEARNER_ENDED:
            self.event_log.add("learner_" + report.state, incarnation=report.incarnation, step=report.step)

    def check_learner(self, incarnation: int | None, instance: str = "") -> None:
        """Before any request of a learner: a sign of life if it has attached, or BrokerError when it was replaced."""
        self.learner.check(incarnation, instance)
        if incarnation is not None:
            self.learner.seen(self.clock())

    def offer(self, tasks: Sequence[Task]) -> int:
        """Add tasks in order of serial; known ones are ignored. Raises BrokerError on a gap, before adding any."""
        expected = self.tasks.next_serial
        for task in tasks:
            if task.serial > expected or task.serial < 0:
                raise BrokerError(f"task {task.serial} was offered, the next serial is {expected}; offer without gaps")
            expected = max(expected, task.serial + 1)
        new = [t for t in tasks if t.serial >= self.tasks.next_serial]
        added = 0
        for task in new:
            if task.serial >= self.tasks.next_serial:
                self.tasks.add(task)
                added += 1
        self.lease_revision += bool(added)
        return added

    def take(self, step: int, count: int, in_order: bool = False) -> list[Entry] | None:
        """The `count` oldest ready groups for `step`, or those it took before; None when there are not enough.

        Filtered groups that passed their place on come on top of `count`.

        Raises:
            BrokerError: when `step` is committed, its groups being gone.
        """
        if step <= self.committed_step:
            raise BrokerError(f"step {step} is committed (up to {self.committed_step}); its groups are gone")
        missing = count - self.tasks.places_taken(step)
        if missing > 0:
            if self.tasks.oldest_ready(missing, in_order) is None:
                if missing > self._wanted:
                    self._wanted = missing
                    self.lease_revision += 1
                return None
            self._wanted = self.run.groups_per_step
            self.tasks.take_oldest(step, missing)
            self.lease_revision += 1
        return [self.tasks.living[serial] for serial in self.tasks.steps.get(step, [])]

    def regenerate(self, step: int, serials: Sequence[int]) -> None:
        """Give up groups that `step` took; filtered ones and those no longer taken by it are ignored (a repetition).

        Raises:
            BrokerError: when a serial was never offered, or is committed.
        """
        for entry in self.tasks.taken_by(step, serials, "generated again"):
            self._waste_group(entry, "regenerated")
            self.tasks.give_up(entry)
            self.event_log.add("regenerate", serial=entry.serial, step=step)
        self.lease_revision += 1

    def filter(self, step: int, serials: Sequence[int], most_replaced: int) -> None:
        """`step` trains nothing on these; the first `most_replaced` that it ever filtered pass their place on.

        Groups filtered before, or no longer taken by the step, are ignored (a repetition).

        Raises:
            BrokerError: when a serial was never offered, or is committed.
        """
        entries = self.tasks.taken_by(step, serials, "filtered")
        replaced = sum([self.tasks.filter(entry, most_replaced) for entry in entries])
        for entry in entries:
            self._waste_group(entry, "filtered")
        if entries:
            self.event_log.add("filter", step=step, groups=len(entries), replaced=replaced)
        self.lease_revision += bool(replaced)

    def commit(self, step: int) -> int:
        """Release everything taken by steps <= `step`; returns how many groups that were."""
        highest = max(self.tasks.steps, default=self.committed_step)
        count = self.tasks.commit(step)
        self.committed_step = max(self.committed_step, min(step, highest))
        if count:
            self.event_log.add("commit", step=step, groups=count)
            self.lease_revision += 1
        return count

    # ---------------------------------------------------------------- nodes

    def register(self, report: NodeReport) -> RunInfo:
        """A node joins. A new process under a known id loses what the old one held."""
        now = self.clock()
        old = self.fleet.nodes.get(report.node_id)
        replaced = old is not None and not same_process(old.report, report)
        if old is not None and replaced:
            self._lose_all(old, f"node {report.node_id} restarted")
        self.fleet.join(report, now)
        if old is None or replaced:
            self.event_log.add("join", node=report.node_id, pid=report.pid, host=report.host)
        self._note_version(report.node_id, report.policy_version)
        return self.run

    def lease(self, node_id: str, version: int | None, max_groups: int) -> list[Lease]:
        """Up to `max_groups` oldest tasks that a node at `version` may start; None: the node's last known version.

        A node without weights (version -1) gets nothing.

        Raises:
            BrokerError: when the node is not registered.
        """
        node = self._node(node_id)
        if version is not None:
            node.asks_with(version)
            self.newest_version = max(self.newest_version, version)
            self._seen(node)
        leases: list[Lease] = []
        steps = node.version - self._first_step
        most = max_groups if node.version >= 0 else 0
        while len(leases) < most and admits_oldest(self.tasks, self.run, steps, self._wanted):
            now = self.clock()
            token = self._new_token()
            entry = self.tasks.lease_oldest(node_id, token, now, now + min(self.run.lease_s, self.run.max_lease_s))
            self._lease_deadlines.add(token, entry.deadline)
            node.tokens.add(token)
            leases.append(Lease(entry.task, token, entry.attempts, self.run.lease_s))
        if leases and not node.has_leased:
            node.has_leased = True
            self.event_log.add("first_lease", node=node_id, version=node.version)
        return leases

    def node_alive(self, node_id: str) -> bool:
        """Whether the node is known and was seen within the lease time."""
        node = self.fleet.nodes.get(node_id)
        return node is not None and node.alive

    def heartbeat(self, report: NodeReport, tokens: Sequence[str]) -> HeartbeatReply:
        """Renew the leases of `tokens`; an unknown node is registered by this.

        Raises:
            BrokerError: another process has registered under this id; two that took it from each other in turn would
                lose each other's leases until the tasks are dead.
        """
        now = self.clock()
        node = self.fleet.nodes.get(report.node_id)
        if node is None:
            self.register(report)
            node = self.fleet.nodes[report.node_id]
        elif not same_process(node.report, report):
            holder = f"process {node.report.pid} on {node.report.host or 'this host'}"
            raise BrokerError(f"node id {report.node_id!r} belongs to {holder} now; every node needs an id of its own")
        self._seen(node)
        if node.told(report.policy_version):
            self._note_version(report.node_id, report.policy_version)
        node.report = report
        lost: list[str] = []
        for token in tokens:
            entry = self.tasks.leased.get(token)
            if entry is not None and entry.node == report.node_id:
                self.tasks.renew(entry, now, self.run.lease_s, self.run.max_lease_s)
            elif self._accepted.get(token) != report.node_id:
                lost.append(token)
        learner = self.learner.report
        if learner is None:
            return HeartbeatReply(lost=lost)
        return HeartbeatReply(
            lost=lost,
            weights_address="" if learner.state in LEARNER_ENDED else learner.weights_address,
            learner_incarnation=learner.incarnation,
            drain=learner.state == "done",
        )

    def complete(self, node_id: str, token: str, meta: GroupMeta, payload: object, payload_bytes: int) -> bool:
        """Accept a group under a current token, once; a repetition of an accepted one is True, anything else False."""
        self._seen_if_known(node_id)
        entry = self.tasks.leased.get(token)
        current = entry is not None and entry.node == node_id
        if not current and self._accepted.get(token) == node_id:
            return True
        if node_id in self.fleet.nodes:
            self.fleet.nodes[node_id].handed_in += meta.sampled_tokens
        if entry is None or not current:
            self.stale_results += 1
            self.fleet.waste_of(node_id, "lost", meta.sampled_tokens)  # the seconds were, when the lease was lost
            self.event_log.add("stale_result", node=node_id, tokens=meta.sampled_tokens)
            return False
        self._drop_token(entry)
        self.tasks.accept(entry, meta, payload, payload_bytes)
        self._remember(token, node_id)
        return True

    def fail(self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """The group could not be generated, after `tokens` and `seconds`; counts towards death.

        A token that is not current is ignored.
        """
        self._seen_if_known(node_id)
        entry = self.tasks.leased.get(token)
        if entry is not None and entry.node == node_id:
            self.event_log.add("group_failed", serial=entry.serial, node=node_id, reason=reason)
            self.fleet.waste_of(node_id, "failed", tokens, seconds)
            self._lose(entry, reason)

    def release(self, node_id: str, tokens: Sequence[str]) -> None:
        """Take leases back without counting an attempt. Tokens that are not current are ignored."""
        self._seen_if_known(node_id)
        for token in tokens:
            entry = self.tasks.leased.get(token)
            if entry is not None and entry.node == node_id:
                self._drop_token(entry)
                self.tasks.hand_back(entry)
        self.lease_revision += 1

    def leave(self, node_id: str) -> None:
        """The node goes; what it still holds is handed back without counting an attempt."""
        node = self.fleet.nodes.get(node_id)
        if node is None:
            return
        self.release(node_id, list(node.tokens))
        self.fleet.leave(node_id)
        self.event_log.add("leave", node=node_id, pid=node.report.pid)

    # ---------------------------------------------------------------- time

    def expire(self) -> None:
        """Take back leases past their deadline and mark silent nodes dead."""
        now = self.clock()

        def deadline(token: str) -> float | None:
            entry = self.tasks.leased.get(token)
            return entry.deadline if entry is not None else None

        for token in self._lease_deadlines.passed(now, deadline):
            entry = self.tasks.leased[token]
            if entry.deadline >= entry.leased_at + self.run.max_lease_s:  # the bound, not the silence, ended it
                held = f"node {entry.node} held the lease for {self.run.max_lease_s:g} s (broker.max_lease_s)"
                self._take_back(entry, f"{held} and did not finish", "lease_overdue")
            else:
                self._take_back(entry, f"lease of node {entry.node} expired")
        for node_id in self.fleet.newly_dead(now):
            self.event_log.add("node_lost", node=node_id, silent_s=self.run.lease_s)
            self.changed_nodes.add(node_id)

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do, monotonic seconds; None: never."""
        times = [t for t in (self._lease_deadlines.next(), self.fleet.next_check()) if t is not None]
        return min(times, default=None)

    # ---------------------------------------------------------------- observers

    def status(self) -> BrokerStatus:
        """Counts, learner, nodes."""
        return status_of(self)

    def ledger(self) -> list[LedgerEntry]:
        """Every task ever offered, ascending by serial."""
        return self.tasks.ledger()

    def events(self, after: int) -> list[BrokerEvent]:
        """Recent events with an index greater than `after`."""
        return self.event_log.after(after)

    # ---------------------------------------------------------------- inside

    def _node(self, node_id: str) -> Node:
        node = self.fleet.nodes.get(node_id)
        if node is None:
            raise BrokerError(f"node {node_id} is not registered with this broker; register first")
        return node

    def _note_version(self, node_id: str, version: int) -> None:
        self.newest_version = max(self.newest_version, version)
        self.changed_nodes.add(node_id)

    def _seen(self, node: Node) -> None:
        if self.fleet.seen(node, self.clock()):
            self.event_log.add("node_back", node=node.report.node_id)

    def _seen_if_known(self, node_id: str) -> None:
        node = self.fleet.nodes.get(node_id)
        if node is not None:
            self._seen(node)

    def _drop_token(self, entry: Entry) -> None:
        self._lease_deadlines.discard(entry.token)
        node = self.fleet.nodes.get(entry.node)
        if node is not None:
            node.tokens.discard(entry.token)

    def _remember(self, token: str, node_id: str) -> None:
        """So that a repetition of this result is still answered with True."""
        self._accepted[token] = node_id
        if len(self._accepted) > REMEMBERED_TOKENS:
            self._accepted.popitem(last=False)

    def _lose(self, entry: Entry, reason: str) -> None:
        assert entry.state == LEASED
        self._drop_token(entry)
        alone = not set(entry.failed_by) - {entry.node} and entry.failures + 1 < ALONE * self.run.max_attempts
        spared = alone and self.fleet.others_may_succeed(entry.node)
        if self.tasks.lose(entry, reason, self.run.max_attempts, spared):
            self.event_log.add("task_dead", serial=entry.serial, attempts=entry.attempts, reason=reason)
        self.lease_revision += 1

    def _waste_group(self, entry: Entry, reason: str) -> None:
        if entry.meta is not None:
            self.fleet.waste_of(entry.nodes[-1], reason, entry.meta.sampled_tokens, entry.meta.generation_s)

    def _lose_all(self, node: Node, reason: str) -> None:
        for token in list(node.tokens):
            self._take_back(self.tasks.leased[token], reason)

    def _take_back(self, entry: Entry, reason: str, kind: str = "lease_expired") -> None:
        self.lease_expiries += 1
        self.fleet.waste_of(entry.node, "lost", seconds=self.clock() - entry.leased_at)
        self.event_log.add(kind, serial=entry.serial, node=entry.node, attempt=entry.attempts)
        self._lose(entry, reason)
