"""The rollout nodes as the broker sees them: reports, versions, liveness, totals over nodes that left."""

from dataclasses import dataclass, field

from broker.contract import WASTE_REASONS, NodeReport, NodeStatus, Waste
from broker.delivery import waste
from broker.delivery.deadlines import Deadlines
from common.errors import BrokerError

MOST_NODES = 1 << 14  # dead ones that are not forgotten yet included
NOT_WORKING = ("quarantined", "draining")  # states in which a node takes no tasks
FORGET_AFTER_S = 600.0  # a dead node stays in the status for at least this long


@dataclass(slots=True)
class Node:
    report: NodeReport
    version: int
    seen_at: float
    tokens: set[str] = field(default_factory=set[str])  # its leases
    alive: bool = True
    has_leased: bool = False  # this process of the node
    handed_in: int = 0  # sampled tokens of the groups that this process handed in
    counted: dict[str, Waste] = field(default_factory=dict[str, Waste])  # by the broker, and of its earlier processes
    in_doubt: bool = False  # its last heartbeat told of an older version than `version`

    def asks_with(self, version: int) -> None:
        """A request that names the version."""
        self.version, self.in_doubt = version, False

    def told(self, version: int) -> bool:
        """A heartbeat with this version; returns whether the node's version changed.

        A heartbeat has a connection of its own, so a request that was sent later may overtake it: an older version
        than that of the request counts when the next heartbeat tells of it too, as after a learner's restart.
        """
        if version < self.version and not self.in_doubt:
            self.in_doubt = True
            return False
        changed = version != self.version
        self.asks_with(version)
        return changed

    @property
    def tokens_generated(self) -> int:
        """By this process; its reports come with heartbeats, so groups handed in since are the better lower bound."""
        return max(self.report.tokens_generated, self.handed_in)

    @property
    def wasted(self) -> dict[str, Waste]:
        """By this node id since it joined."""
        return waste.merged((self.counted, reported(self.report)))


class Fleet:
    """Nodes by id. A node unseen for `silent_s` seconds is dead until it is seen again."""

    def __init__(self, silent_s: float) -> None:
        self.nodes: dict[str, Node] = {}
        self._silent_s = silent_s
        self._deadlines = Deadlines()
        self._past_generated = 0  # tokens of processes that are gone
        self._past_wasted: dict[str, Waste] = {}  # of nodes that are gone

    def join(self, report: NodeReport, now: float) -> Node:
        """Add a node, or a new process of one; the record's leases are kept for the caller to end.

        Raises:
            BrokerError: there are MOST_NODES others.
        """
        old = self.nodes.get(report.node_id)
        if old is None and len(self.nodes) >= MOST_NODES:
            raise BrokerError(f"{len(self.nodes)} nodes have joined, which is as many as this broker takes")
        goes_on = old is not None and same_process(old.report, report)
        if old is not None and not goes_on:
            self._past_generated += old.tokens_generated
        node = Node(report, report.policy_version, now, old.tokens if old else set())
        if old is not None:
            node.counted = old.counted if goes_on else old.wasted
        if old is not None and goes_on:
            node.has_leased, node.handed_in = old.has_leased, old.handed_in
        self.nodes[report.node_id] = node
        self._deadlines.add(report.node_id, now + self._silent_s)
        return node

    def seen(self, node: Node, now: float) -> bool:
        """Note a sign of life. Returns whether the node was thought dead."""
        node.seen_at = now
        was_dead = not node.alive
        if was_dead:
            node.alive = True
            self._deadlines.add(node.report.node_id, now + self._silent_s)
        return was_dead

    def leave(self, node_id: str) -> None:
        """Forget a node, keeping its totals."""
        node = self.nodes.pop(node_id, None)
        if node is not None:
            self._past_generated += node.tokens_generated
            self._past_wasted = waste.merged((self._past_wasted, node.wasted))

    def next_check(self) -> float | None:
        """When some node may turn dead, monotonic seconds."""
        return self._deadlines.next()

    def newly_dead(self, now: float) -> list[str]:
        """Ids of nodes that turned dead by `now`; nodes long dead are forgotten."""
        forget_s = max(FORGET_AFTER_S, 10 * self._silent_s)

        def deadline(node_id: str) -> float | None:
            node = self.nodes.get(node_id)
            if node is None:
                return None
            return node.seen_at + (self._silent_s if node.alive else forget_s)

        dead: list[str] = []
        for node_id in list(self._deadlines.passed(now, deadline)):
            node = self.nodes[node_id]
            if node.alive:
                node.alive = False
                dead.append(node_id)
                self._deadlines.add(node_id, node.seen_at + forget_s)
            else:
                self.leave(node_id)
        return dead

    def others_may_succeed(self, node_id: str) -> bool:
        """Whether a node besides this one lives and may be given tasks."""
        return any(
            n.alive and n.version >= 0 and n.report.state not in NOT_WORKING
            for other, n in self.nodes.items()
            if other != node_id
        )

    def tokens_generated(self) -> int:
        """Sampled tokens over all nodes that ever joined."""
        return self._past_generated + sum(n.tokens_generated for n in self.nodes.values())

    def waste_of(self, node_id: str, reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """Count what was lost of a node's work; the node may be gone."""
        node = self.nodes.get(node_id)
        waste.add(self._past_wasted if node is None else node.counted, reason, tokens, seconds)

    def waste(self) -> dict[str, Waste]:
        """Over all nodes that ever joined."""
        return waste.merged([self._past_wasted, *(n.wasted for n in self.nodes.values())])

    def status(self, now: float) -> list[NodeStatus]:
        """One line per node, by id."""
        return [
            NodeStatus(n.report, len(n.tokens), n.alive, last_seen_s=max(0.0, now - n.seen_at), waste=n.wasted)
            for _, n in sorted(self.nodes.items())
        ]


def reported(report: NodeReport) -> dict[str, Waste]:
    """What a node says it wasted, under known reasons; a node of an earlier release says none."""
    if report.waste or not report.tokens_wasted:
        return {reason: spent for reason, spent in report.waste.items() if reason in WASTE_REASONS}
    return {"cancelled": Waste(report.tokens_wasted)}


def same_process(a: NodeReport, b: NodeReport) -> bool:
    """Whether two reports come from one process."""
    return (a.host, a.pid) == (b.host, b.pid)
