"""The rollout nodes as the broker sees them: reports, versions, liveness, and the waste of docs/waste.md."""

from dataclasses import dataclass, field

import msgspec

from broker.contract import NodeReport, NodeStatus
from broker.delivery.deadlines import Deadlines
from common.waste import WASTE_REASONS, Waste, add_waste, merged_waste

MOST_NODES = 1 << 14  # including dead ones that are not forgotten yet
NOT_WORKING = ("excluded", "draining")  # states in which a node takes no tasks
MOST_LEFT = 64  # nodes that have left and are still shown
FORGET_AFTER_S = 600.0  # a dead node stays in the status for at least this long


class NodeCounts(msgspec.Struct, frozen=True, rename={"delivered_tokens": "handed_in"}):
    """The broker's counters of a node, as they are recorded."""

    delivered_tokens: int
    counted: dict[str, Waste]


@dataclass(slots=True)
class Node:
    report: NodeReport
    version: int
    seen_at: float
    tokens: set[str] = field(default_factory=set[str])  # its leases
    alive: bool = True
    has_leased: bool = False  # whether this process of the node ever leased a task
    delivered_tokens: int = 0  # sampled tokens of the groups that this process handed in
    # waste that the broker counted, and all waste of earlier processes of the node
    counted: dict[str, Waste] = field(default_factory=dict[str, Waste])
    in_doubt: bool = False  # the last heartbeat named an older version than `version`
    spans_at: float = 0.0  # when it was last allowed to send spans; 0: never

    def set_version(self, version: int) -> None:
        self.version = version
        self.in_doubt = False

    def note_heartbeat(self, version: int) -> bool:
        """Note the version that a heartbeat named; returns whether the node's version changed.

        A later request may overtake a heartbeat, which has its own connection. So an older version than that of the
        request counts only when the next heartbeat repeats it, as after a learner's restart.
        """
        if version < self.version and not self.in_doubt:
            self.in_doubt = True
            return False
        changed = version != self.version
        self.set_version(version)
        return changed

    @property
    def tokens_generated(self) -> int:
        """Tokens of this process. Reports come with heartbeats; groups handed in since then may raise the bound."""
        return max(self.report.tokens_generated, self.delivered_tokens)

    @property
    def wasted(self) -> dict[str, Waste]:
        """Waste of this node id since it joined."""
        told = {reason: spent for reason, spent in self.report.waste.items() if reason in WASTE_REASONS}
        if not self.report.waste and self.report.tokens_wasted:  # a node of an earlier release reports one number only
            told = {"cancelled": Waste(self.report.tokens_wasted)}
        return merged_waste((self.counted, told))


class Fleet:
    """Nodes by id. A node unseen for `silent_s` seconds is dead until it is seen again.

    `past_generated` counts tokens of processes that are gone, `past_wasted` the waste of nodes that are gone.
    """

    def __init__(self, silent_s: float) -> None:
        self.nodes: dict[str, Node] = {}
        self.left: dict[str, Node] = {}  # only shown, and not kept in a store
        self._silent_s = silent_s
        self.deadlines: Deadlines[str] = Deadlines()
        self.past_generated = 0
        self.past_wasted: dict[str, Waste] = {}

    def alive(self, node_id: str) -> bool:
        """Whether the node is known and was seen within the lease time."""
        node = self.nodes.get(node_id)
        return node is not None and node.alive

    def join(self, report: NodeReport, now: float) -> Node:
        """Add a node, or a new process of one. The new record takes over the leases of the old one."""
        old = self.nodes.get(report.node_id)
        node = Node(report, report.policy_version, now, old.tokens if old else set())
        if old is not None and same_process(old.report, report):
            node.counted = old.counted
            node.has_leased = old.has_leased
            node.delivered_tokens = old.delivered_tokens
        elif old is not None:
            node.counted = old.wasted
            self.past_generated += old.tokens_generated
        self.nodes[report.node_id] = node
        self.left.pop(report.node_id, None)
        self.deadlines.add(report.node_id, now + self._silent_s)
        return node

    def seen(self, node: Node, now: float) -> bool:
        """Note a sign of life. Returns whether the node was thought dead."""
        was_dead = not node.alive
        node.seen_at = now
        node.alive = True
        if was_dead:
            self.deadlines.add(node.report.node_id, now + self._silent_s)
        return was_dead

    def leave(self, node_id: str) -> None:
        """Forget a node, keeping its totals."""
        node = self.nodes.pop(node_id, None)
        if node is not None:
            self.past_generated += node.tokens_generated
            self.past_wasted = merged_waste((self.past_wasted, node.wasted))

    def show_as_left(self, node: Node) -> None:
        self.left[node.report.node_id] = node
        if len(self.left) > MOST_LEFT:
            del self.left[next(iter(self.left))]

    def expire(self, now: float) -> tuple[list[str], list[str]]:
        """Ids of nodes that turned dead by `now`, and of those dead for so long that the caller may forget them."""
        forget_s = max(FORGET_AFTER_S, 10 * self._silent_s)

        def deadline(node_id: str) -> float | None:
            node = self.nodes.get(node_id)
            return None if node is None else node.seen_at + (self._silent_s if node.alive else forget_s)

        dead: list[str] = []
        forgotten: list[str] = []
        for node_id in list(self.deadlines.passed(now, deadline)):
            node = self.nodes[node_id]
            if node.alive:
                node.alive = False
                dead.append(node_id)
                self.deadlines.add(node_id, node.seen_at + forget_s)
            else:
                forgotten.append(node_id)
        return dead, forgotten

    def others_may_succeed(self, node_id: str) -> bool:
        """Whether a node besides this one lives and may be given tasks."""
        return any(
            n.alive and n.version >= 0 and n.report.state not in NOT_WORKING and not n.report.pool
            for other, n in self.nodes.items()
            if other != node_id
        )

    def tokens_generated(self) -> int:
        """Sampled tokens over all nodes that ever joined."""
        return self.past_generated + sum(n.tokens_generated for n in self.nodes.values())

    def waste_of(self, node_id: str, reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """Count waste of a node, which may be gone."""
        node = self.nodes.get(node_id)
        add_waste(self.past_wasted if node is None else node.counted, reason, tokens, seconds)

    def waste(self) -> dict[str, Waste]:
        """Waste of all nodes that ever joined, by reason."""
        return merged_waste([self.past_wasted, *(n.wasted for n in self.nodes.values())])

    def status(self, now: float) -> list[NodeStatus]:
        return [_status(node, node.alive, now) for _, node in sorted(self.nodes.items())]

    def status_of_left(self, now: float) -> list[NodeStatus]:
        return [_status(node, False, now) for node in self.left.values()]


def _status(node: Node, alive: bool, now: float) -> NodeStatus:
    return NodeStatus(node.report, len(node.tokens), alive, max(0.0, now - node.seen_at), node.wasted)


def same_process(a: NodeReport, b: NodeReport) -> bool:
    return (a.host, a.pid, a.instance) == (b.host, b.pid, b.instance)
