"""One receiver of the weight plane as a state machine: a function per event gives the next state, and actions.

Events are `hear`, `greet`, `begin`, `doubt`, `release`, `tick` and `drop`. One that means nothing in the receiver's
state changes nothing. `split` says which way a version takes to which receiver: a broadcast or a fetch by relay.

Nothing here has a socket, a thread or a clock. The control thread of publisher.py feeds the events and carries out the
actions.
docs/weights.md shows the states.
"""

import ipaddress
import re
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import msgspec

from common.span_buffer import SPANS
from common.weights.source.attempt import Attempt
from common.weights.source.snapshot import Snapshot, VersionSchedule
from common.weights.transports.groups import silence_bound
from common.weights.wire import messages

IDLE_SILENCE_S = 5.0  # a node is silent after the longer of this and weights.timeout_s when nothing is under way
LISTEN_WAIT_S = 3.0  # for the answer to a Welcome, before a node gets a version that others could fetch from it
MAX_ATTEMPTS = 3  # attempts at one version in the group, then as many by relay; after those the node is ejected
RETURN_AFTER, RETURN_AFTER_MOST = 4, 64  # publishes by relay before the group is tried again; doubled each time


class NodeState(Enum):
    JOINING = "joining"  # nothing is under way; it was never active on this connection
    IDLE = "idle"  # nothing is under way; it runs a proven version
    STAGING = "staging"  # it receives a version into its staging buffer
    DOUBTED = "doubted"  # its attempt failed; it has given no sign of life since
    ANSWERED = "answered"  # its attempt failed; it is alive and waits for the attempt's other receivers.
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
        """One more attempt at `version` failed."""
        return replace(self, failures=self.failures_at(version) + 1, version=version)

    def to_relay(self, published: int) -> "Route":
        """Fetch from now on; the group is tried again some publishes later."""
        longer = min(2 * self.return_after, RETURN_AFTER_MOST)
        return Route(0, self.version, True, published + self.return_after, longer)


@dataclass(frozen=True)
class NodeView:
    """A node as the learner sees it."""

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
    route: Route = field(default_factory=Route)
    attempt: Attempt | None = None  # under way to it
    reason: str = ""  # why it is excluded
    pool: str = ""  # eval: it gets evaluated versions only, and by relay

    def awaits(self, version: int) -> bool:
        """Whether it may get this version now, and does not run it."""
        return self.state in READY and self.version != version and self.welcomed is not None

    def listens(self, now: float) -> bool:
        """Whether it said where it serves, or had the time to say it."""
        return self.address is not None or (self.welcomed is not None and now > self.welcomed + LISTEN_WAIT_S)


class SendMessage(msgspec.Struct, frozen=True):
    message: messages.LearnerMessage


class FailAttempt(msgspec.Struct, frozen=True):
    """The attempt failed for all of its members."""

    reason: str


class NoteStaged(msgspec.Struct, frozen=True):
    """The receiver staged the attempt's version."""


class NoteActive(msgspec.Struct, frozen=True):
    """The receiver runs the attempt's version."""

    difference: float | None  # that its canary found, None without one


class DropNode(msgspec.Struct, frozen=True):
    why: str
    ejected: bool  # tell the receiver so, and count it


Action = SendMessage | FailAttempt | NoteStaged | NoteActive | DropNode
Step = tuple[NodeView, tuple[Action, ...]]


def greet(receiver: NodeView, welcome: messages.Welcome, now: float) -> Step:
    """The layout is known."""
    return replace(receiver, welcomed=now), (SendMessage(welcome),)


def begin(receiver: NodeView, attempt: Attempt, rank: int = 0) -> Step:
    """An attempt starts. `rank` is that in a new group; 0 when the group exists already."""
    epoch = (SendMessage(msgspec.structs.replace(attempt.epoch, rank=rank)),) if rank else ()
    # The staging buffer may be half written from here on, so it is no base of a delta.
    return replace(receiver, state=NodeState.STAGING, attempt=attempt, base=-1), (*epoch, SendMessage(attempt.publish))


def hear(receiver: NodeView, message: messages.NodeMessage, now: float) -> Step:
    """A message of the node; any is a sign of life."""
    state = NodeState.ANSWERED if receiver.state is NodeState.DOUBTED else receiver.state
    receiver = replace(receiver, heard=now, state=state)
    match message:
        case messages.Leave():
            return drop(receiver, "it left", ejected=False)
        case messages.Listening():
            return replace(receiver, address=message.address if _usable(message.address) else ""), ()
        case messages.Staged() if attempt := _answered(receiver, message):
            activate = messages.Activate(attempt.publish.incarnation, attempt.version)
            return replace(receiver, state=NodeState.FLIPPING), (NoteStaged(), SendMessage(activate))
        case messages.Active():
            return _active(receiver, message)
        case messages.Rejected() if message.fatal:
            return replace(receiver, state=NodeState.EXCLUDED, reason=message.reason, attempt=None), ()
        case messages.Rejected() if _answered(receiver, message):
            return replace(receiver, state=NodeState.ANSWERED), (FailAttempt(message.reason),)
        case _:
            return receiver, ()


def _usable(address: str) -> bool:
    """Whether a node may be told to fetch from there."""
    match = WHERE.fullmatch(address)
    try:
        return match is not None and bool(match[1] or ipaddress.IPv6Address(match[2]))
    except ValueError:
        return False


def _answered(receiver: NodeView, message: messages.Staged | messages.Rejected) -> Attempt | None:
    """The attempt under way, if the message is about it; the node no longer has the buffer of an earlier one."""
    attempt = receiver.attempt
    if attempt is None or receiver.state not in RECEIVING:
        return None
    return attempt if (message.version, message.epoch) == (attempt.version, attempt.publish.epoch) else None


def _active(receiver: NodeView, message: messages.Active) -> Step:
    attempt, version = receiver.attempt, message.version
    if attempt is None or receiver.state is not NodeState.FLIPPING or version != attempt.version:
        return receiver, ()
    difference = message.canary_max_difference
    proven = message.checksum == attempt.publish.checksum
    runs = replace(
        receiver,
        state=NodeState.IDLE if proven else NodeState.EXCLUDED,
        reason="" if proven else f"node {receiver.node_id} has other weights than were sent",
        version=version,
        base=version,
        canary_version=receiver.canary_version if difference is None else version,
        settled=True,
        route=replace(receiver.route, failures=0),
        attempt=None,
    )
    return runs, (NoteActive(difference),)


def doubt(receiver: NodeView) -> Step:
    """Some member of the receiver's attempt failed, or the sender did."""
    return replace(receiver, state=NodeState.DOUBTED) if receiver.state is NodeState.STAGING else receiver, ()


def release(receiver: NodeView, published: int) -> Step:
    """All members of the failed attempt have answered or are gone; `published`: publishes so far.

    The attempt counts, unless another member was on trial in it.
    """
    attempt, route = receiver.attempt, receiver.route
    if attempt is None or receiver.state is not NodeState.ANSWERED:
        return receiver, ()
    if attempt.probation is None:
        route = route.failed(attempt.version)
        if route.failures >= MAX_ATTEMPTS:
            if attempt.relayed or "relay" not in receiver.transports:
                return drop(receiver, f"version {attempt.version} failed {route.failures} times")
            route = route.to_relay(published)
    elif attempt.probation == receiver.identity:
        route = route.to_relay(published)
    state = NodeState.IDLE if receiver.settled else NodeState.JOINING
    return replace(receiver, state=state, route=route, attempt=None), ()


def tick(receiver: NodeView, timeout_s: float, now: float) -> Step:
    """Time passes; `timeout_s`: weights.timeout_s."""
    silent_s, attempt, state = now - receiver.heard, receiver.attempt, receiver.state
    if silent_s > max(timeout_s, IDLE_SILENCE_S):
        return drop(receiver, f"silent for {silent_s:.1f} s")
    if attempt is None:
        return receiver, ()
    # Nodes answer pings at once, also while weights flow. Pings are rarer before the attempt.
    silent = now - max(receiver.heard, attempt.started) > silence_bound(timeout_s)
    if state is NodeState.FLIPPING:
        if now > attempt.deadline + timeout_s:
            return drop(receiver, f"version {attempt.version} was never active")
        return receiver, (FailAttempt(f"node {receiver.node_id} is silent"),) if silent and not attempt.failed else ()
    if silent and state is not NodeState.ANSWERED:
        return drop(receiver, f"silent while version {attempt.version} was sent")
    if state is NodeState.STAGING and now > attempt.deadline:
        return replace(receiver, state=NodeState.DOUBTED), (
            FailAttempt(f"node {receiver.node_id} did not stage it in time"),
        )
    return receiver, ()


def drop(receiver: NodeView, why: str, ejected: bool = True) -> Step:
    """The node is no receiver any more: the connection has ended, or a new one replaces it, or it is `ejected`."""
    return replace(receiver, state=NodeState.GONE, attempt=None), (DropNode(why, ejected),)


def split(
    ready: list[NodeView], everyone: Iterable[NodeView], transport: str, published: int, version: int
) -> tuple[list[NodeView], list[NodeView], NodeView | None]:
    """(nodes for the group, nodes for the relay, the member of the group that is on trial) for `version`.

    The group takes nodes that were active before and can receive over `transport`. The relay takes newcomers, unless
    no node has weights yet, and nodes that the group does not reach. One of the latter at a time gets another trial.
    """
    waiting = {r.identity for r in ready}
    begun = any(r.version >= 0 or (r.attempt is not None and r.identity not in waiting) for r in everyone)
    together: list[NodeView] = []
    relayed: list[NodeView] = []
    probation: NodeView | None = None
    for receiver in ready:
        route = receiver.route
        if transport == "relay" or transport not in receiver.transports or (begun and not receiver.settled):
            relayed.append(receiver)
        elif not route.relayed:
            together.append(receiver)
        elif probation is None and route.failures_at(version) == 0 and route.returns_at <= published:
            probation = receiver
        else:
            relayed.append(receiver)
    if probation is not None:
        together.append(probation)
    return together, relayed, probation


STAGES = {"joining": "queued", "idle": "queued", "flipping": "flipping"}  # by state; excluded nodes get nothing


@dataclass(frozen=True)
class Undelivered:
    """A node without the version that is meant for it."""

    node_id: str
    version: int
    stage: str  # queued (an earlier broadcast is under way), receiving (not Staged yet), flipping (Staged, not Active)
    since: float  # when the attempt began, or when the version was published; perf_counter seconds


@dataclass(frozen=True)
class PublishStats:
    """The weight plane so far."""

    published: int = 0  # versions handed to `publish`
    version_sent: int = -1  # newest version that every live node staged
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


class Figures:
    """The PublishStats so far, `now`. The control thread changes them, any thread reads them."""

    def __init__(self, incarnation: int = 0) -> None:
        self._incarnation, self._changed = incarnation, threading.Condition()
        self.now = PublishStats()
        self._canary_version = -1  # newest version with a canary
        self._newest = self._traced = (-1, 0.0)  # newest target and newest one with a span: version, when it started

    def change(self, **changes: Any) -> None:
        with self._changed:
            kept = {"fatal": self.now.fatal} if self.now.crashed else {}  # the first crash stays the reason
            self.now = replace(self.now, **changes | kept)
            self._changed.notify_all()

    def offered(self, snapshot: Snapshot) -> None:
        """Count a version that was handed over for sending."""
        if snapshot.canary is not None:
            self._canary_version = snapshot.version
        self.change(published=self.now.published + 1)

    def describe(self, receivers: Collection[NodeView], targets: VersionSchedule) -> None:
        """Derive from the receivers how far the versions have come."""
        fleet = [r for r in receivers if not r.pool]  # no figure waits for an evaluation
        live = [r for r in fleet if r.state is not NodeState.EXCLUDED]
        excluded = [r.reason for r in fleet if r.state is NodeState.EXCLUDED]
        before, active = self.now, min((r.version for r in live), default=-1)
        # An excluded node leaves within a second. Its reason stays until some other node may generate.
        fatal = None if live else (excluded[0] if excluded else before.fatal)
        self.change(
            nodes=len(live),
            version_sent=max(active, before.version_sent),
            version_active=active,
            fatal=fatal,
            canary_owed=any(r.version >= self._canary_version > r.canary_version for r in live),
            undelivered=undelivered(receivers, targets),
            held=tuple(targets.holds),
        )
        self._trace(targets.current)

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
                self._traced, told = target, {"version": target[0], "incarnation": self._incarnation}
                SPANS.add(f"publish version {target[0]}", "publish", target[1], track="publish", **told)

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


def undelivered(receivers: Iterable[NodeView], targets: VersionSchedule) -> tuple[Undelivered, ...]:
    """The nodes that the version meant for them has not reached yet, the longest-waiting first."""
    found: list[Undelivered] = []
    for receiver in receivers:
        current = targets.evaluated if receiver.pool else targets.current
        attempt, stage = receiver.attempt, STAGES.get(receiver.state.value, "receiving")
        if attempt is not None:
            found.append(Undelivered(receiver.node_id, attempt.version, stage, attempt.started))
        elif stage == "queued" and current is not None and receiver.version != current.version:
            found.append(Undelivered(receiver.node_id, current.version, stage, current.started))
    return tuple(sorted(found, key=lambda one: one.since))
