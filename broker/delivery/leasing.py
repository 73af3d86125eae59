"""The rules for nodes: joining, leasing tasks, heartbeats, results, and leases that are lost."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from broker.contract import LEARNER_ENDED, HeartbeatReply, Lease, NodeReport, RunInfo
from broker.delivery import moves
from broker.delivery.nodes import MOST_NODES, Node, same_process
from broker.delivery.tables import Tables
from broker.delivery.task_table import DEAD, Entry
from common.errors import BrokerError
from common.rollouts import GroupMeta
from common.spans import SpanBatch, credible

ALONE = 4  # times tasks.max_attempts: so often must one node fail a task to kill it while others work
SPAN_BYTES_PER_S = 256 << 10  # by all nodes together
SPANS_FOR_S = 10.0  # Longest silence for which a node may catch up.


class Leasing(Tables):
    """The nodes' side of the delivery state; see NodeBroker in broker/contract.py."""

    def register(self, report: NodeReport) -> RunInfo:
        """Add a node, whose new process loses the leases of the old one. Raises BrokerError beyond MOST_NODES."""
        old = self.fleet.nodes.get(report.node_id)
        if old is None and len(self.fleet.nodes) >= MOST_NODES:
            raise BrokerError(f"{MOST_NODES} nodes have joined, which is as many as this broker takes")
        is_new = old is None or not same_process(old.report, report)
        for token in list(old.tokens) if old is not None and is_new else ():
            self._take_back(self.tasks.leased[token], f"node {report.node_id} restarted")
        for token in self.evaluation.tokens_of(report.node_id) if is_new else ():
            self._lose_problem(token, f"node {report.node_id} restarted")
        self.do(moves.Joined(report))
        if is_new:
            self.event_log.add("join", node=report.node_id, pid=report.pid, host=report.host)
        self._note_version(report.node_id, report.policy_version)
        return self.run

    def leave(self, node_id: str) -> None:
        """Forget a node; its leases are handed back without counting an attempt."""
        node = self.fleet.nodes.get(node_id)
        if node is None:
            return
        self.release(node_id, [*node.tokens, *self.evaluation.tokens_of(node_id)])
        self.do(moves.Left(node_id))
        self.fleet.show_as_left(node)
        self.event_log.add("leave", node=node_id, pid=node.report.pid)

    def lease(self, node_id: str, version: int | None, max_groups: int) -> list[Lease]:
        """Lease up to `max_groups` oldest tasks to a node at `version`, at the last one it named with None.

        A node without weights (version -1) gets nothing. Raises BrokerError when the node is not registered.
        """
        node = self.fleet.nodes.get(node_id)
        if node is None:
            raise BrokerError(f"node {node_id} is not registered with this broker; register first")
        if version is not None:
            node.set_version(version)
            self.newest_version = max(self.newest_version, version)
            self._seen(node_id)
        in_pool = bool(node.report.pool)
        is_first = not node.has_leased
        most = max_groups if node.version >= 0 and not self.stopping else 0
        leases: list[Lease] = []
        while len(leases) < most and self.evaluation.admits(node.version, in_pool):  # first: the fleet may wait for it
            entry = self.evaluation.lease(node_id, self.new_token())
            self.begin_lease(entry)
            leases.append(Lease(entry.task, entry.token, entry.failures + 1, self.run.lease_s, self.evaluation.order))
        end = 0 if in_pool else self.window.end(node.version)  # nodes of a pool lease no tasks
        while len(leases) < most and self._admits_oldest(end):
            token = self.new_token()
            self.do(moves.Leased(self.tasks.pending[0], node_id, token))
            entry = self.tasks.leased[token]
            self.begin_lease(entry)
            leases.append(Lease(entry.task, token, entry.attempts, self.run.lease_s))
        if is_first and node.has_leased:
            self.event_log.add("first_lease", node=node_id, version=node.version)
        return leases

    def _admits_oldest(self, end: int) -> bool:
        """Whether a node whose window ends at serial `end` may lease the oldest pending task.

        While ready and expected groups exceed `max_bytes`, only tasks with fewer older ones ready or leased than the
        learner wants are leased. So memory is bounded, and the learner never waits for a task that no node may start.
        """
        tasks, run = self.tasks, self.run
        if self.stopping or not tasks.pending:
            return False
        serial = tasks.pending[0]
        if serial >= end:
            return False
        if tasks.bytes_expected() <= run.max_bytes:
            return True
        return bisect_left(tasks.ready, serial) + tasks.leased.older_than(serial) < self.wanted

    def heartbeat(
        self, report: NodeReport, tokens: Sequence[str], log: str | None = None, spans: SpanBatch | None = None
    ) -> HeartbeatReply:
        """Renew the leases of `tokens`; an unknown node is registered by this.

        The first heartbeat after the broker restarted shows which recovered leases the node never received, since the
        reply was lost with the broker. They are handed back at once and count no attempt. Raises BrokerError when
        another process has registered under this id, since that one would lose its leases.
        """
        node_id = report.node_id
        node = self.fleet.nodes.get(node_id)
        if node is None:
            self.register(report)
            node = self.fleet.nodes[node_id]
        elif not same_process(node.report, report):
            owner = f"process {node.report.pid} on {node.report.host or 'this host'}"
            raise BrokerError(f"node id {node_id!r} belongs to {owner} now; every node needs an id of its own")
        recovered = self.unconfirmed & node.tokens
        self.unconfirmed -= recovered
        if unheard := recovered.difference(tokens):
            self.release(node_id, sorted(unheard))
        self._seen(node_id)
        if node.note_heartbeat(report.policy_version):
            self._note_version(node_id, report.policy_version)
        node.report = report
        self.logs.answer(node_id, log)
        lost: list[str] = []
        for token in tokens:
            entry = self._leased_by(node_id, token)
            if entry is not None:
                entry.deadline = min(self.clock() + self.run.lease_s, entry.leased_at + self.run.max_lease_s)
            elif node_id not in (self.accepted.get(token), self.evaluation.accepted.get(token)):
                lost.append(token)
        if spans is not None and self.run.trace and credible(spans, self.trace_clock()):
            self.trace(msgspec.structs.replace(spans, who=node_id))
        return self._heartbeat_reply(node, lost)

    def _heartbeat_reply(self, node: Node, lost: list[str]) -> HeartbeatReply:
        learner, trace, now = self.learner.report, self.run.trace, self.clock()
        since_s, node.spans_at = min(now - node.spans_at, SPANS_FOR_S), now
        done = learner is not None and learner.state == "done"
        return HeartbeatReply(
            lost=lost,
            weights_address="" if learner is None or learner.state in LEARNER_ENDED else learner.weights_address,
            learner_incarnation=learner.incarnation if learner is not None else 0,
            drain=done and not self.learner.job_ended,  # a job that ended continues: nodes stay
            stop=self.stopping,
            log_rank=0 if node.report.node_id in self.logs.asked else -1,
            time_s=self.trace_clock() if trace else 0.0,
            span_bytes=int(since_s * SPAN_BYTES_PER_S / len(self.fleet.nodes)) if trace else 0,
        )

    def complete(self, node_id: str, token: str, meta: GroupMeta, payload: object, payload_bytes: int) -> bool:
        """Accept a group under a current token, once; a repetition of an accepted one is True, anything else False."""
        self._seen(node_id)
        entry = self._leased_by(node_id, token) if token in self.tasks.leased else None
        if entry is None and self.accepted.get(token) == node_id:
            return True
        if node_id in self.fleet.nodes:
            self.fleet.nodes[node_id].handed_in += meta.sampled_tokens
        if entry is None:
            self.stale_results += 1
            self.fleet.waste_of(node_id, "lost", meta.sampled_tokens)  # its seconds were counted with the lost lease
            self.event_log.add("stale_result", node=node_id, tokens=meta.sampled_tokens)
            return False
        move = moves.Accepted(token, meta)
        move.apply(self)
        self.tasks.put_group(entry, payload, payload_bytes, self.recorder.record_group(move, payload))
        return True

    def fail(
        self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0, transcript: bytes = b""
    ) -> None:
        """End a lease whose group could not be generated, after `tokens` and `seconds`; an old token is ignored."""
        self._seen(node_id)
        entry = self._leased_by(node_id, token)
        if entry is None:
            return
        if token in self.evaluation.leased:
            return self._lose_problem(token, reason)
        self.event_log.add("group_failed", serial=entry.serial, node=node_id, reason=reason)
        self.fleet.waste_of(node_id, "failed", tokens, seconds)
        if transcript and self.transcripts is not None:
            self.transcripts.put((entry.serial, node_id, transcript))
        self._lose(entry, reason)

    def release(self, node_id: str, tokens: Sequence[str]) -> None:
        """Hand leases back without counting an attempt. Tokens that are not current are ignored."""
        self._seen(node_id)
        for token in tokens:
            if self._leased_by(node_id, token) is None:
                continue
            if token in self.evaluation.leased:
                self.evaluation.give_back(token)
            else:
                self.do(moves.HandedBack(token))
        self.lease_revision += 1

    def expire(self) -> None:
        """Take back leases past their deadline, mark silent nodes dead, forget those long dead."""
        now = self.clock()

        def deadline(token: str) -> float | None:
            entry = self.lease_of(token)
            return entry.deadline if entry is not None else None

        for token in self.lease_deadlines.passed(now, deadline):
            if (problem := self.evaluation.leased.get(token)) is not None:
                self._lose_problem(token, f"lease of node {problem.node} expired")
                continue
            entry = self.tasks.leased[token]
            if entry.deadline >= entry.leased_at + self.run.max_lease_s:  # the node lives but does not finish
                limit = f"node {entry.node} held the lease for {self.run.max_lease_s:g} s (broker.max_lease_s)"
                self._take_back(entry, f"{limit} and did not finish", "lease_overdue")
            else:
                self._take_back(entry, f"lease of node {entry.node} expired")
        dead, forgotten = self.fleet.expire(now)
        for node_id in dead:
            self.event_log.add("node_lost", node=node_id, silent_s=self.run.lease_s)
            self.changed_nodes.add(node_id)
        for node_id in forgotten:
            self.do(moves.Left(node_id))

    def _lose_problem(self, token: str, reason: str) -> None:
        problem = self.evaluation.lose(token, reason)
        self.event_log.add("evaluation_lease_lost", problem=problem.serial, node=problem.node, reason=reason)
        self.lease_revision += 1

    def _take_back(self, entry: Entry, reason: str, kind: str = "lease_expired") -> None:
        self.lease_expiries += 1
        self.fleet.waste_of(entry.node, "lost", seconds=self.clock() - entry.leased_at)
        self.event_log.add(kind, serial=entry.serial, node=entry.node, attempt=entry.attempts)
        self._lose(entry, reason)

    def _lose(self, entry: Entry, reason: str) -> None:
        alone = not set(entry.failed_by) - {entry.node} and entry.failures + 1 < ALONE * self.run.max_attempts
        spared = alone and self.fleet.others_may_succeed(entry.node)
        self.do(moves.Lost(entry.token, reason, self.run.max_attempts, spared))
        if entry.state == DEAD:
            self.event_log.add("task_dead", serial=entry.serial, attempts=entry.attempts, reason=reason)
        self.lease_revision += 1

    def _leased_by(self, node_id: str, token: str) -> Entry | None:
        entry = self.lease_of(token)
        return entry if entry is not None and entry.node == node_id else None

    def _note_version(self, node_id: str, version: int) -> None:
        self.newest_version = max(self.newest_version, version)
        self.changed_nodes.add(node_id)

    def _seen(self, node_id: str) -> None:
        node = self.fleet.nodes.get(node_id)
        if node is not None and self.fleet.seen(node, self.clock()):
            self.event_log.add("node_back", node=node_id)
