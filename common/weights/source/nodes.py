"""The nodes of the weight plane as the learner sees them: a state machine for each, and figures over all of them.

Events of the state machine are `hear`, `greet`, `begin`, `doubt`, `release`, `tick` and `drop`. Each gives the next
state and actions. An event that means nothing in the node's state changes nothing. `split` says which way a version
takes to which node: a broadcast or a fetch by relay.

The state machine has no socket, thread or clock. The control thread of publisher.py feeds the events and carries out
the actions. `NodeState` has the states.
"""

import ipaddress
import re
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from common.span_buffer import SPANS
from common.weights.source.attempt import Attempt
from common.weights.source.snapshot import Snapshot, VersionSchedule
from common.weights.transports.groups import silence_bound
from common.weights.wire import messages
from common.weights.wire.failures import Failure, FailureKind
from common.weights.wire.messages import ADAPTERS, BOTH, FROZEN, WHOLE

IDLE_SILENCE_S = 5.0  # a node is silent after the longer of this and weights.timeout_s when nothing is under way
LISTEN_WAIT_S = 3.0  # for the answer to a Welcome, before a node gets a version that others could fetch from it
MAX_ATTEMPTS = 3  # attempts at one version in the group, then as many by relay; after those the node is ejected
RETURN_AFTER, RETURN_AFTER_MOST = 4, 64  # publishes by relay before the group is tried again; doubled each time


class NodeState(Enum):
    JOINING = "joining"  # nothing is under way; it was never active on this connection
    IDLE = "idle"  # nothing is under way; it runs a proven version
    STAGING = "staging"  # it receives a version into its staging buffer
    DOUBTED = "doubted"  # its attempt failed; it has given no sign of life since
    ANSWERED = "answered"  # its attempt failed; it is alive and waits for the attempt's other members.
    FLIPPING = "flipping"  # It staged the version and was told to use it.
    EXCLUDED = "excluded"  # Its proof failed; it gets nothing more.
    GONE = "gone"


WHERE = re.compile(r"tcp://(?:([A-Za-z0-9_.-]+)|\[([0-9a-fA-F:.]+)\]):\d{1,5}")
READY = frozenset({NodeState.JOINING, NodeState.IDLE})
RECEIVING = frozenset({NodeState.STAGING, NodeState.DOUBTED, NodeState.ANSWERED})


@dataclass(frozen=True)
class Route:
    """The way to one node, as earlier attempts determined it."""

    failures: int = 0  # failed attempts at `version` by the present way
    version: int = -1
    relayed: bool = False  # broadcasts with this node failed, so it fetches
    returns_at: int = 0  # number of the publish at which a relayed node is tried in the group again
    return_after: int = RETURN_AFTER  # publishes until then, next time

    def failures_at(self, version: int) -> int:
        """Failed attempts at `version`; those at other versions do not count."""
        return self.failures if self.version == version else 0

    def failed(self, version: int) -> "Route":
        return replace(self, failures=self.failures_at(version) + 1, version=version)

    def to_relay(self, published: int) -> "Route":
        """Fetch from now on; the group is tried again some publishes later."""
        return Route(
            failures=0,
            version=self.version,
            relayed=True,
            returns_at=published + self.return_after,
            return_after=min(2 * self.return_after, RETURN_AFTER_MOST),
        )


class NodeView(msgspec.Struct, frozen=True):  # no dataclass: each message makes a new one, which takes those 10 us
    identity: bytes  # its connection
    node_id: str
    heard: float  # when its last message came, perf_counter seconds
    transports: tuple[str, ...] = ("gloo",)  # ways over which it can receive
    state: NodeState = NodeState.JOINING
    version: int = -1  # the version of this incarnation that it runs; -1: none
    base: int = -1  # the version in its staging buffer, which a delta may start from; -1: the buffer was written since
    canary_version: int = -1  # the newest version at which it compared a canary
    machine: str = ""  # nodes of one machine share a copy over its link
    welcomed: float | None = None  # when it was told the layout, perf_counter seconds
    address: str | None = None  # where other nodes fetch from it; '' nowhere, None: it has not answered yet
    settled: bool = False  # it was active on this connection; before that it is a newcomer: no broadcast waits for it
    route: Route = Route()
    attempt: Attempt | None = None  # under way to it
    excluded: Failure | None = None  # why it gets nothing more
    pool: str = ""  # eval: it gets evaluated versions only, and by relay
    kept: str | None = None  # checksum of the frozen weights that it had when it joined; None: it merges no adapters
    frozen: int = -1  # FROZEN, BOTH or WHOLE where versions may come to it as adapters

    @property
    def start(self) -> int:
        """The base of the payload that fits it."""
        return self.base if self.frozen == -1 else self.frozen

    def awaits(self, version: int) -> bool:
        """Whether it may get this version now, and does not run it."""
        return self.state in READY and self.version != version and self.welcomed is not None

    def listens(self, now: float) -> bool:
        """Whether it said where it serves, or had the time to say it."""
        return self.address is not None or (self.welcomed is not None and now > self.welcomed + LISTEN_WAIT_S)


class DropReason(StrEnum):
    """Why a node is no member of the weight plane any more; in the sentence: {version}, {count} or {seconds}."""

    LEFT = "it left"
    REJOINED = "it joined anew"
    CLOSED = "its connection closed"
    IDLE_SILENCE = "silent for {seconds:.1f} s"
    SILENCE = "silent while version {version} was sent"
    NEVER_ACTIVE = "version {version} was never active"
    FAILURES = "version {version} failed {count} times"


class SendMessage(msgspec.Struct, frozen=True):
    message: messages.LearnerMessage


class FailAttempt(msgspec.Struct, frozen=True):
    """The attempt failed for all of its members."""

    failure: Failure


class NoteStaged(msgspec.Struct, frozen=True):
    """The node staged the attempt's version."""


class NoteActive(msgspec.Struct, frozen=True):
    """The node runs the attempt's version."""

    difference: float | None  # that its canary found, None without one


class DropNode(msgspec.Struct, frozen=True):
    """The node is no member any more."""

    reason: DropReason
    version: int = -1
    count: int = 0
    seconds: float = 0.0

    @property
    def ejected(self) -> bool:
        """Tell the node so, and count it."""
        return self.reason not in (DropReason.LEFT, DropReason.REJOINED)

    @property
    def sentence(self) -> str:
        return self.reason.format(version=self.version, count=self.count, seconds=self.seconds)


Action = SendMessage | FailAttempt | NoteStaged | NoteActive | DropNode
Step = tuple[NodeView, tuple[Action, ...]]


def greet(node: NodeView, welcome: messages.Welcome, now: float, frozen: str = "") -> Step:
    """The layout is known; `frozen` is the checksum of the frozen weights beside which adapters stand."""
    start = -1
    if welcome.adapters is not None and node.kept is not None:
        start = FROZEN if node.kept == frozen else BOTH
    return structs.replace(node, welcomed=now, frozen=start), (SendMessage(welcome),)


def begin(node: NodeView, attempt: Attempt, rank: int = 0) -> Step:
    """An attempt starts. `rank` is that in a new group; 0 when the group exists already."""
    epoch = (SendMessage(structs.replace(attempt.epoch, rank=rank)),) if rank else ()
    # The staging buffer may be half written from here on, so it is no base of a delta.
    begun = structs.replace(node, state=NodeState.STAGING, attempt=attempt, base=-1)
    return begun, (*epoch, SendMessage(attempt.publish))


def hear(node: NodeView, message: messages.NodeMessage, now: float) -> Step:
    """A message of the node; any is a sign of life."""
    state = NodeState.ANSWERED if node.state is NodeState.DOUBTED else node.state
    node = structs.replace(node, heard=now, state=state)
    match message:
        case messages.Leave():
            return drop(node, DropNode(DropReason.LEFT))
        case messages.Listening():
            return structs.replace(node, address=message.address if _usable(message.address) else ""), ()
        case messages.Staged() if attempt := _answered(node, message):
            activate = messages.Activate(attempt.publish.incarnation, attempt.version)
            frozen = FROZEN if attempt.publish.frozen and node.frozen == BOTH else node.frozen
            return structs.replace(node, state=NodeState.FLIPPING, frozen=frozen), (NoteStaged(), SendMessage(activate))
        case messages.Active():
            return _active(node, message)
        case messages.Rejected() if message.fatal:
            failure = Failure.told(message.kind, message.reason)
            return structs.replace(node, state=NodeState.EXCLUDED, excluded=failure, attempt=None), ()
        case messages.Rejected() if attempt := _answered(node, message):
            failure = Failure.told(message.kind, message.reason)
            way = _next_way(node, attempt, failure)
            return structs.replace(node, state=NodeState.ANSWERED, frozen=way), (FailAttempt(failure),)
        case _:
            return node, ()


def _usable(address: str) -> bool:
    """Whether a node may be told to fetch from there."""
    match = WHERE.fullmatch(address)
    try:
        return match is not None and bool(match[1] or ipaddress.IPv6Address(match[2]))
    except ValueError:
        return False


def _answered(node: NodeView, message: messages.Staged | messages.Rejected) -> Attempt | None:
    """The attempt under way, if the message is about it; the node no longer has the buffer of an earlier one."""
    attempt = node.attempt
    if attempt is None or node.state not in RECEIVING:
        return None
    return attempt if (message.version, message.epoch) == (attempt.version, attempt.publish.epoch) else None


def _active(node: NodeView, message: messages.Active) -> Step:
    attempt = node.attempt
    if attempt is None or node.state is not NodeState.FLIPPING or message.version != attempt.version:
        return node, ()
    difference = message.canary_max_difference
    excluded = None
    if message.checksum != attempt.publish.checksum:
        excluded = Failure(FailureKind.PROOF, f"node {node.node_id} has other weights than were sent")
    runs = structs.replace(
        node,
        state=NodeState.IDLE if excluded is None else NodeState.EXCLUDED,
        excluded=excluded,
        version=message.version,
        base=message.version,
        canary_version=node.canary_version if difference is None else message.version,
        settled=True,
        route=replace(node.route, failures=0),
        attempt=None,
    )
    return runs, (NoteActive(difference),)


def doubt(node: NodeView) -> Step:
    """Some member of the node's attempt failed, or the sender did."""
    return structs.replace(node, state=NodeState.DOUBTED) if node.state is NodeState.STAGING else node, ()


def release(node: NodeView, published: int) -> Step:
    """All members of the failed attempt have answered or are gone; `published`: publishes so far.

    The attempt counts, unless another member was on trial in it.
    """
    attempt, route = node.attempt, node.route
    if attempt is None or node.state is not NodeState.ANSWERED:
        return node, ()
    if attempt.probation is None:
        route = route.failed(attempt.version)
        if route.failures >= MAX_ATTEMPTS:
            if attempt.relayed or "relay" not in node.transports:
                return drop(node, DropNode(DropReason.FAILURES, version=attempt.version, count=route.failures))
            route = route.to_relay(published)
    elif attempt.probation == node.identity:
        route = route.to_relay(published)
    state = NodeState.IDLE if node.settled else NodeState.JOINING
    return structs.replace(node, state=state, route=route, attempt=None), ()


def tick(node: NodeView, timeout_s: float, now: float) -> Step:
    """Time passes; `timeout_s`: weights.timeout_s."""
    silent_s = now - node.heard
    attempt, state = node.attempt, node.state
    if silent_s > max(timeout_s, IDLE_SILENCE_S):
        return drop(node, DropNode(DropReason.IDLE_SILENCE, seconds=silent_s))
    if attempt is None:
        return node, ()
    # Nodes answer pings at once, also while weights flow. Pings are rarer before the attempt.
    silent = now - max(node.heard, attempt.started) > silence_bound(timeout_s)
    if state is NodeState.FLIPPING:
        if now > attempt.deadline + (attempt.deadline - attempt.started):
            return drop(node, DropNode(DropReason.NEVER_ACTIVE, version=attempt.version))
        if silent and not attempt.failed:
            return node, (FailAttempt(Failure(FailureKind.SILENT, "it is silent")),)
        return node, ()
    if silent and state is not NodeState.ANSWERED:
        return drop(node, DropNode(DropReason.SILENCE, version=attempt.version))
    if state is NodeState.STAGING and now > attempt.deadline:
        late = Failure(FailureKind.LATE, "it did not stage the version in time")
        way = _next_way(node, attempt, late)
        return structs.replace(node, state=NodeState.DOUBTED, frozen=way), (FailAttempt(late),)
    return node, ()


def _next_way(node: NodeView, attempt: Attempt, failure: Failure) -> int:
    """`frozen` of a node after a failure: from adapters to both, and to whole versions; a merge may be slow."""
    same = (FailureKind.DAMAGED, FailureKind.LEFT, FailureKind.GIVEN_UP)  # say nothing of the encoding
    if failure.kind in same or attempt.publish.encoding not in ADAPTERS:
        return node.frozen
    return BOTH if attempt.publish.encoding == "adapter" and failure.kind is not FailureKind.LATE else WHOLE


def drop(node: NodeView, action: DropNode) -> Step:
    """The node is no member any more: the connection has ended, or a new one replaces it, or it is ejected."""
    return structs.replace(node, state=NodeState.GONE, attempt=None), (action,)


@dataclass
class Split:
    """The ways that a version takes to the nodes that are ready for it."""

    together: list[NodeView] = field(default_factory=lambda: list[NodeView]())  # by broadcast
    relayed: list[NodeView] = field(default_factory=lambda: list[NodeView]())
    probation: NodeView | None = None  # the one of `together` that is on trial


def split(
    ready: list[NodeView], everyone: Iterable[NodeView], *, transport: str, published: int, version: int
) -> Split:
    """The ways to `ready` for `version`; `published`: publishes so far.

    The group takes nodes that were active before and can receive over `transport`. The relay takes newcomers, unless
    no node has weights yet, and nodes that the group does not reach. One of the latter at a time gets another trial.
    Where versions travel as adapters, the relay takes nodes that need more.
    """
    if transport == "relay":
        return Split(relayed=ready)
    waiting = {node.identity for node in ready}
    begun = any(node.version >= 0 or (node.attempt is not None and node.identity not in waiting) for node in everyone)
    ways = Split()
    for node in ready:
        route = node.route
        if transport not in node.transports or (begun and not node.settled) or node.frozen in (BOTH, WHOLE):
            ways.relayed.append(node)
        elif not route.relayed:
            ways.together.append(node)
        elif ways.probation is None and route.failures_at(version) == 0 and route.returns_at <= published:
            ways.probation = node
        else:
            ways.relayed.append(node)
    if ways.probation is not None:
        ways.together.append(ways.probation)
    return ways


# ---------------------------------------------------------------- figures

STAGES = {NodeState.JOINING: "queued", NodeState.IDLE: "queued", NodeState.FLIPPING: "flipping"}


@dataclass(frozen=True)
class Undelivered:
    """A node without the version that is meant for it."""

    node_id: str
    version: int
    stage: str  # queued (an earlier broadcast is under way), receiving (not Staged yet), flipping (Staged, not Active)
    since: float  # when the attempt began, or when the version was published; perf_counter seconds


@dataclass(frozen=True)
class PublishStats:
    published: int = 0  # versions handed to `publish`
    publish_s: float = 0.0  # from `publish` to the last Staged of the newest finished publish
    publish_bytes: int = 0  # sent for it, over all nodes
    broadcast_s: float = 0.0  # part of `publish_s` after the announcement to the nodes; before it: the copy, its hash
    seconds_to_active: float = 0.0  # from `publish` to the last Active of it
    nodes: int = 0  # live members of the receiving group
    ejections: int = 0  # nodes dropped so far because they died, stalled or failed
    canary_max_difference: float = 0.0  # largest |difference| of log-probabilities at the newest comparison, in nats
    fatal: str | None = None  # why no node may generate (every node's proof failed); None while any is fine
    crashed: bool = False  # `fatal` is a crash of the publisher itself
    canary_owed: bool = False  # a live node never compared the newest canary: it joined later, or skipped that version
    undelivered: tuple[Undelivered, ...] = ()  # the longest-waiting first
    held: tuple[str, ...] = ()  # why newer versions wait; () when none has to
    version_active: int = -1  # oldest version that a live node runs now; -1 when one has none, or there is no node


class LostNode(NamedTuple):
    """A node that was dropped because it died, stalled or failed, or that is excluded since its proof failed."""

    node_id: str
    reason: str


class Figures:
    """The PublishStats so far, `now`, and the nodes `lost`. The control thread changes them, any thread reads them."""

    def __init__(self, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self._changed = threading.Condition()
        self.now = PublishStats()
        self.lost: SimpleQueue[LostNode] = SimpleQueue()  # each until one reader has taken it
        self._canary_version = -1  # newest version with a canary
        self._newest = self._traced = (-1, 0.0)  # newest target and newest one with a span: version, when it started

    def change(self, **changes: Any) -> None:
        with self._changed:
            kept = {"fatal": self.now.fatal} if self.now.crashed else {}  # the first crash stays the reason
            self.now = replace(self.now, **changes | kept)
            self._changed.notify_all()

    def offered(self, snapshot: Snapshot) -> None:
        if snapshot.canary is not None:
            self._canary_version = snapshot.version
        self.change(published=self.now.published + 1)

    def describe(self, nodes: Collection[NodeView], schedule: VersionSchedule) -> None:
        """Derive from the nodes how far the versions have come."""
        fleet = [node for node in nodes if not node.pool]  # no figure waits for an evaluation
        live = [node for node in fleet if node.state is not NodeState.EXCLUDED]
        excluded = [node.excluded.text for node in fleet if node.excluded is not None]
        active = min((node.version for node in live), default=-1)
        # An excluded node leaves within a second. Its reason stays until some other node may generate.
        fatal = None if live else (excluded[0] if excluded else self.now.fatal)
        self.change(
            nodes=len(live),
            version_active=active,
            fatal=fatal,
            canary_owed=any(node.version >= self._canary_version > node.canary_version for node in live),
            undelivered=undelivered(nodes, schedule),
            held=tuple(schedule.holds),
        )
        self._trace(schedule.current)

    def activated(self, attempt: Attempt, whole: bool, difference: float | None) -> None:
        """A node runs the attempt's version; `whole`: every settled node does. `difference`: what its canary found."""
        if difference is not None:
            self.change(canary_max_difference=difference)
        if whole:
            self.change(
                publish_s=attempt.last_staged - attempt.snapshot.started,
                broadcast_s=attempt.last_staged - attempt.started,
                seconds_to_active=time.perf_counter() - attempt.snapshot.started,
                publish_bytes=attempt.snapshot.bytes_staged,
            )

    def _trace(self, current: Snapshot | None) -> None:
        """A publish lasts until the version has reached all nodes, or until a newer one takes its place."""
        before = self._newest
        if current is not None:
            self._newest = current.version, current.started
        for target in (before, self._newest):
            through = target != self._newest or not self.now.undelivered
            if target > self._traced and through:
                self._traced = target
                version, started = target
                told = {"version": version, "incarnation": self._incarnation}
                SPANS.add(f"publish version {version}", "publish", started, track="publish", **told)

    def wait_settled(self, published: int, version: int, timeout_s: float) -> bool:
        """Wait until the `published`th offer, `version`, is active on every live node, or newer versions have to wait.

        Returns False when time ran out.
        """

        def settled() -> bool:
            stats = self.now
            through = stats.published >= published and (stats.nodes == 0 or stats.version_active >= version)
            return through or stats.crashed or bool(stats.held)

        with self._changed:
            return self._changed.wait_for(settled, timeout_s)


def undelivered(nodes: Iterable[NodeView], schedule: VersionSchedule) -> tuple[Undelivered, ...]:
    """The nodes that the version meant for them has not reached yet, the longest-waiting first."""
    found: list[Undelivered] = []
    for node in nodes:
        current = schedule.evaluated if node.pool else schedule.current
        stage = STAGES.get(node.state, "receiving")
        if node.attempt is not None:
            found.append(Undelivered(node.node_id, node.attempt.version, stage, since=node.attempt.started))
        elif stage == "queued" and current is not None and node.version != current.version:
            found.append(Undelivered(node.node_id, current.version, stage, since=current.started))
    return tuple(sorted(found, key=lambda one: one.since))
