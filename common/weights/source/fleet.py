"""All nodes of the weight plane, the attempts under way to them, and what changed: a turn looks only at that.

With thousands of nodes the control thread may not look at all of them for each message. Work that must look at all
runs at a Pace, which bounds its share of the thread's time. Pings go out a few at a time.
"""

import time
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec

from common.weights.source.attempt import Attempt
from common.weights.source.nodes import IDLE_SILENCE_S, Action, NodeState, NodeView, Step
from common.weights.source.snapshot import Snapshot
from common.weights.transports.groups import silence_bound
from common.weights.wire.messages import StoreEntries

SHARE = 0.02  # of the thread's CPU time, for each kind of work that looks at all nodes
BUSY_PING_S, IDLE_PING_S = 0.25, 1.0  # between two pings to a node, of a few hundred nodes
MOST_PINGS = 1000  # a second; to more nodes they are rarer, but for PING_TRIES within the bound of a node's silence
PING_TRIES = 3
PING_LOOK_S = 0.025  # pings of so long go out together, because answers wake the thread

P = ParamSpec("P")


class Pace:
    """Lets work run so seldom that it takes at most SHARE of the thread's time. Used by one thread."""

    def __init__(self) -> None:
        self.next = 0.0  # when it may run again, perf_counter seconds
        self._began = 0.0

    def due(self) -> bool:
        return time.perf_counter() >= self.next

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.next = time.perf_counter() + (time.thread_time() - self._began) / SHARE


class Fleet:
    """Used by the control thread. `nodes` and `attempts` are for reading."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, NodeView] = {}  # by connection
        self.attempts: dict[Attempt, None] = {}  # in the order in which they began
        self.broadcast: Attempt | None = None  # the one of them that is no fetch
        self.waiting: dict[bytes, None] = {}  # nodes that may get a version now, for all that is known
        self.changed = True  # since this was set to False
        self.stirred = True  # since `ready` was called
        self._strangers: dict[bytes, None] = {}
        self._touched: dict[Attempt, None] = {}
        self._meant: tuple[Snapshot, Snapshot | None] | None = None

    def add(self, node: NodeView) -> None:
        """A node joined."""
        self.nodes[node.identity] = node
        self._strangers[node.identity] = None
        self.stir()

    def strangers(self) -> list[bytes]:
        """The nodes that joined since the last call."""
        found = [identity for identity in self._strangers if identity in self.nodes]
        self._strangers = {}
        return found

    def stir(self) -> None:
        """Something happened that may concern any node."""
        self.changed = self.stirred = True

    def meet(self, new: StoreEntries, sender: bytes = b"") -> None:
        """Entries of a group's store are for all of its members; `sender`: who set them, b'' the learner."""
        if self.broadcast is not None:
            self.broadcast.take_entries(new, sender)

    def take(
        self, identity: bytes, event: Callable[Concatenate[NodeView, P], Step], *args: P.args, **options: P.kwargs
    ) -> tuple[NodeView, NodeView, tuple[Action, ...]] | None:
        """Let a node take the step of an event: (before, after, actions); None when it changes nothing."""
        before = self.nodes.get(identity)
        if before is None:
            return None
        after, actions = event(before, *args, **options)
        if after is before and not actions:
            return None
        if after.state is NodeState.GONE:
            del self.nodes[identity]
        else:
            self.nodes[identity] = after
        if actions or after.state is not before.state or after.address != before.address:
            self.stir()
            self.waiting[identity] = None
            for attempt in (before.attempt, after.attempt):
                if attempt is not None:
                    self.touch(attempt)
        return before, after, actions

    def touch(self, attempt: Attempt) -> None:
        """Something happened to an attempt."""
        self._touched[attempt] = None

    def touched(self) -> list[Attempt]:
        """Attempts under way to which something happened since the last call."""
        touched, self._touched = self._touched, {}
        return [attempt for attempt in touched if attempt in self.attempts]

    def begin(self, attempt: Attempt) -> None:
        self.attempts[attempt] = None
        if not attempt.relayed:
            self.broadcast = attempt

    def end(self, attempt: Attempt) -> None:
        """The attempt is over for all of its members."""
        del self.attempts[attempt]
        if attempt is self.broadcast:
            self.broadcast = None

    def members(self, attempt: Attempt) -> list[bytes]:
        """The nodes for which the attempt is not over."""
        views = (self.nodes.get(identity) for identity in attempt.members)
        return [view.identity for view in views if view is not None and view.attempt is attempt]

    def aim(self, current: Snapshot, evaluated: Snapshot | None) -> None:
        """These versions are meant for the training fleet and for the pool."""
        if self._meant != (current, evaluated):
            self._meant = current, evaluated
            self.waiting = dict.fromkeys(self.nodes)

    def ready(self) -> list[NodeView]:
        """The nodes that may get the version that is meant for them."""
        self.stirred = False
        assert self._meant is not None
        current, evaluated = self._meant
        found: list[NodeView] = []
        for identity in self.waiting:
            node = self.nodes.get(identity)
            meant = evaluated if node is not None and node.pool else current
            if node is not None and meant is not None and node.awaits(meant.version):
                found.append(node)
        self.waiting = {node.identity: None for node in found}
        return found


class Pings:
    """Whose turn it is to be pinged: each node once in an interval, a few at a time."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: weights.timeout_s."""
        self._timeout_s = timeout_s
        self._last = 0.0  # perf_counter seconds
        self._round: Iterator[bytes] = iter(())  # nodes that get one before any gets another

    def due(self, fleet: Fleet, now: float) -> list[bytes]:
        count = len(fleet.nodes)
        usual_s, bound_s = BUSY_PING_S, silence_bound(self._timeout_s)
        if not fleet.attempts:
            usual_s, bound_s = IDLE_PING_S, IDLE_SILENCE_S
        interval_s = max(usual_s, min(count / MOST_PINGS, bound_s / PING_TRIES))
        passed_s = min(now - self._last, interval_s)
        due = int(count * passed_s / interval_s)
        if due == 0 or passed_s < PING_LOOK_S:
            return []
        self._last = now - passed_s + due * interval_s / count
        found: list[bytes] = []
        while len(found) < due:
            identity = next(self._round, None)
            if identity is None:
                self._round = iter(list(fleet.nodes))
            elif identity in fleet.nodes:
                found.append(identity)
        return found
