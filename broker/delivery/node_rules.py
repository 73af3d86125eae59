"""The rules for nodes: joining, leasing tasks, heartbeats, results, and leases that are lost."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from broker.contract import LEARNER_ENDED, HeartbeatReply, Lease, NodeReport, RunInfo
from broker.delivery import moves
from broker.delivery.nodes import MOST_NODES, Node, same_process
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import DEAD, Entry
from common.errors import BrokerError
from common.evaluation import EvaluationResult
from common.rollouts import GroupMeta
from common.spans import SpanBatch, credible

ALONE = 4  # times tasks.max_attempts: so often must one node fail a task to kill it while others work
SPAN_BYTES_PER_S = 256 << 10  # by all nodes together
SPANS_FOR_S = 10.0  # Longest silence for which a node may catch up.


class NodeRules:
    """The nodes' requests; see NodeBroker in broker/client/calls.py."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state
        self._run = state.run
        self._tasks = state.tasks
        self._fleet = state.fleet
        self._problems = state.evaluation
        self._events = state.event_log

    def register(self, report: NodeReport) -> RunInfo:
        """Add a node, whose new process loses the leases of the old one. Raises BrokerError beyond MOST_NODES."""
        old = self._fleet.nodes.get(report.node_id)
        if old is None and len(self._fleet.nodes) >= MOST_NODES:
            raise BrokerError(f"{MOST_NODES} nodes have joined, which is as many as this broker takes")
        is_new = old is None or not same_process(old.report, report)
        for token in list(old.tokens) if old is not None and is_new else ():
            self._take_back(self._tasks.leased[token], f"node {report.node_id} restarted")
        for token in self._problems.tokens_of(report.node_id) if is_new else ():
            self._lose_problem(token, f"node {report.node_id} restarted")
        self._state.do(moves.Joined(report))
        if is_new:
            self._events.add("join", node=report.node_id, pid=report.pid, host=report.host)
        self._note_version(report.node_id, report.policy_version)
        return self._run

    def leave(self, node_id: str) -> None:
        node = self._fleet.nodes.get(node_id)
        if node is None:
            return
        self.release(node_id, [*node.tokens, *self._problems.tokens_of(node_id)])
        self._state.do(moves.Left(node_id))
        self._fleet.show_as_left(node)
        self._events.add("leave", node=node_id, pid=node.report.pid)

    def lease(self, node_id: str, version: int | None, max_groups: int) -> list[Lease]:
        """Lease up to `max_groups` oldest tasks to a node at `version`, at the last one it named with None.

        A node without weights (version -1) gets nothing. Raises BrokerError when the node is not registered.
        """
        node = self._fleet.nodes.get(node_id)
        if node is None:
            raise BrokerError(f"node {node_id} is not registered with this broker; register first")
        if version is not None:
            node.set_version(version)
            self._state.newest_version = max(self._state.newest_version, version)
            self._seen(node_id)
        in_pool = bool(node.report.pool)
        is_first = not node.has_leased
        most = max_groups if node.version >= 0 and not self._state.stopping else 0
        leases: list[Lease] = []
        while len(leases) < most and self._problems.admits(node.version, in_pool):  # first: the fleet may wait for it
            entry = self._problems.lease(node_id, self._state.new_token())
            self._state.begin_lease(entry)
            leases.append(Lease(entry.task, entry.token, entry.failures + 1, self._run.lease_s, self._problems.order))
        end = 0 if in_pool else self._state.window.end(node.version)  # nodes of a pool lease no tasks
        while len(leases) < most and self._admits_oldest(end):
            token = self._state.new_token()
            self._state.do(moves.Leased(self._tasks.pending[0], node_id, token))
            entry = self._tasks.leased[token]
            self._state.begin_lease(entry)
            leases.append(Lease(entry.task, token, entry.attempts, self._run.lease_s))
        if is_first and node.has_leased:
            self._events.add("first_lease", node=node_id, version=node.version)
        return leases

    def _admits_oldest(self, end: int) -> bool:
        """Whether a node whose window ends at serial `end` may lease the oldest pending task.

        While the broker is full, only tasks with fewer older ones ready or leased than the learner wants are leased. So
        memory and store are bounded, and the learner never waits for a task that no node may start.
        """
        tasks = self._tasks
        if self._state.stopping or not tasks.pending:
            return False
        serial = tasks.pending[0]
        if serial >= end:
            return False
        if not self._state.full:
            return True
        return bisect_left(tasks.ready, serial) + tasks.leased.older_than(serial) < self._state.wanted

    def heartbeat(
        self, report: NodeReport, tokens: Sequence[str], log: str | None = None, spans: SpanBatch | None = None
    ) -> HeartbeatReply:
        """Renew the leases of `tokens`; an unknown node is registered by this.

        The first heartbeat after the broker restarted shows which recovered leases the node never received, since the
        reply was lost with the broker. They are handed back at once and count no attempt. Raises BrokerError when
        another process has registered under this id, since that one would lose its leases.
        """
        node_id = report.node_id
        node = self._fleet.nodes.get(node_id)
        if node is None:
            self.register(report)
            node = self._fleet.nodes[node_id]
        elif not same_process(node.report, report):
            owner = f"process {node.report.pid} on {node.report.host or 'this host'}"
            raise BrokerError(f"node id {node_id!r} belongs to {owner} now; every node needs an id of its own")
        recovered = self._state.unconfirmed & node.tokens
        self._state.unconfirmed -= recovered
        if unheard := recovered.difference(tokens):
            self.release(node_id, sorted(unheard))
        self._seen(node_id)
        if node.note_heartbeat(report.policy_version):
            self._note_version(node_id, report.policy_version)
        node.report = report
        self._state.logs.answer(node_id, log)
        lost: list[str] = []
        for token in tokens:
            entry = self._leased_by(node_id, token)
            if entry is not None:
                entry.deadline = min(self._state.clock() + self._run.lease_s, entry.leased_at + self._run.max_lease_s)
            elif node_id not in (self._state.accepted.get(token), self._problems.accepted.get(token)):
                lost.append(token)
        if spans is not None and self._run.trace and credible(spans, self._state.trace_clock()):
            self._state.trace(msgspec.structs.replace(spans, who=node_id))
        return self._heartbeat_reply(node, lost)

    def _heartbeat_reply(self, node: Node, lost: list[str]) -> HeartbeatReply:
        learner = self._state.learner.report
        trace = self._run.trace
        now = self._state.clock()
        since_s = min(now - node.spans_at, SPANS_FOR_S)
        node.spans_at = now
        done = learner is not None and learner.state == "done"
        return HeartbeatReply(
            lost=lost,
            weights_address="" if learner is None or learner.state in LEARNER_ENDED else learner.weights_address,
            learner_incarnation=learner.incarnation if learner is not None else 0,
            drain=done and not self._state.learner.job_ended,  # a job that ended continues: nodes stay
            stop=self._state.stopping,
            log_rank=0 if node.report.node_id in self._state.logs.asked else -1,
            time_s=self._state.trace_clock() if trace else 0.0,
            span_bytes=int(since_s * SPAN_BYTES_PER_S / len(self._fleet.nodes)) if trace else 0,
        )

    def complete(self, node_id: str, token: str, meta: GroupMeta, payload: object, payload_bytes: int) -> bool:
        """Accept a group under a current token, once; a repetition of an accepted one is True, anything else False."""
        self._seen(node_id)
        entry = self._leased_by(node_id, token) if token in self._tasks.leased else None
        if entry is None and self._state.accepted.get(token) == node_id:
            return True
        if node_id in self._fleet.nodes:
            self._fleet.nodes[node_id].delivered_tokens += meta.sampled_tokens
        if entry is None:
            self._state.stale_results += 1
            self._fleet.waste_of(node_id, "lost", meta.sampled_tokens)  # its seconds were counted with the lost lease
            self._events.add("stale_result", node=node_id, tokens=meta.sampled_tokens)
            return False
        move = moves.Accepted(token, meta)
        move.apply(self._state)
        self._tasks.put_group(entry, payload, payload_bytes, self._state.recorder.record_group(move, payload))
        return True

    def complete_evaluation(self, node_id: str, token: str, result: EvaluationResult) -> bool:
        self._seen(node_id)
        return self._problems.complete(node_id, token, result)

    def fail(
        self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0, transcript: bytes = b""
    ) -> None:
        """End a lease whose group could not be generated, after `tokens` and `seconds`; an old token is ignored."""
        self._seen(node_id)
        entry = self._leased_by(node_id, token)
        if entry is None:
            return
        if token in self._problems.leased:
            return self._lose_problem(token, reason)
        self._events.add("group_failed", serial=entry.serial, node=node_id, reason=reason)
        self._fleet.waste_of(node_id, "failed", tokens, seconds)
        if transcript and self._state.transcripts is not None:
            self._state.transcripts.put((entry.serial, node_id, transcript))
        self._lose(entry, reason)

    def release(self, node_id: str, tokens: Sequence[str]) -> None:
        self._seen(node_id)
        for token in tokens:
            if self._leased_by(node_id, token) is None:
                continue
            if token in self._problems.leased:
                self._problems.give_back(token)
            else:
                self._state.do(moves.HandedBack(token))
        self._state.lease_revision += 1

    def expire(self) -> None:
        """Take back leases past their deadline, mark silent nodes dead, forget those long dead."""
        now = self._state.clock()

        def deadline(token: str) -> float | None:
            entry = self._state.lease_of(token)
            return entry.deadline if entry is not None else None

        for token in self._state.lease_deadlines.passed(now, deadline):
            if (problem := self._problems.leased.get(token)) is not None:
                self._lose_problem(token, f"lease of node {problem.node} expired")
                continue
            entry = self._tasks.leased[token]
            if entry.deadline >= entry.leased_at + self._run.max_lease_s:  # the node lives but does not finish
                limit = f"node {entry.node} held the lease for {self._run.max_lease_s:g} s (broker.max_lease_s)"
                self._take_back(entry, f"{limit} and did not finish", "lease_overdue")
            else:
                self._take_back(entry, f"lease of node {entry.node} expired")
        dead, forgotten = self._fleet.expire(now)
        for node_id in dead:
            self._events.add("node_lost", node=node_id, silent_s=self._run.lease_s)
            self._state.changed_nodes.add(node_id)
        for node_id in forgotten:
            self._state.do(moves.Left(node_id))

    def _lose_problem(self, token: str, reason: str) -> None:
        problem = self._problems.lose(token, reason)
        self._events.add("evaluation_lease_lost", problem=problem.serial, node=problem.node, reason=reason)
        self._state.lease_revision += 1

    def _take_back(self, entry: Entry, reason: str, kind: str = "lease_expired") -> None:
        self._state.lease_expiries += 1
        self._fleet.waste_of(entry.node, "lost", seconds=self._state.clock() - entry.leased_at)
        self._events.add(kind, serial=entry.serial, node=entry.node, attempt=entry.attempts)
        self._lose(entry, reason)

    def _lose(self, entry: Entry, reason: str) -> None:
        alone = not set(entry.failed_by) - {entry.node} and entry.failures + 1 < ALONE * self._run.max_attempts
        spared = alone and self._fleet.others_may_succeed(entry.node)
        self._state.do(moves.Lost(entry.token, reason, self._run.max_attempts, spared))
        if entry.state == DEAD:
            self._events.add("task_dead", serial=entry.serial, attempts=entry.attempts, reason=reason)
        self._state.lease_revision += 1

    def _leased_by(self, node_id: str, token: str) -> Entry | None:
        entry = self._state.lease_of(token)
        return entry if entry is not None and entry.node == node_id else None

    def _note_version(self, node_id: str, version: int) -> None:
        self._state.newest_version = max(self._state.newest_version, version)
        self._state.changed_nodes.add(node_id)

    def _seen(self, node_id: str) -> None:
        node = self._fleet.nodes.get(node_id)
        if node is not None and self._fleet.seen(node, self._state.clock()):
            self._events.add("node_back", node=node_id)
