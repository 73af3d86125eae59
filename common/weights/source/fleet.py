"""All nodes of the weight plane, the attempts under way to them, and what changed: a turn looks only at that.

With thousands of nodes the control thread may not look at all of them for each message. Work that must look at all
runs at a Pace, which bounds its share of the thread's time. Pings go out a few at a time.
"""

import itertools
import time
from collections.abc import Iterator

from common.weights.source.attempt import Attempt
from common.weights.source.nodes import IDLE_SILENCE_S, NodeState, NodeView
from common.weights.source.snapshot import Snapshot
from common.weights.transports.groups import silence_bound

SHARE = 0.02  # Each kind of work that looks at all nodes takes at most this share of the thread's time.
BUSY_PING_S, IDLE_PING_S = 0.25, 1.0  # between two pings to a node, of a few hundred nodes
MOST_PINGS = 1000  # a second; to more nodes they are rarer, but for PING_TRIES within the bound of a node's silence
PING_TRIES = 3
PING_LOOK_S = 0.025  # pings of so long go out together, because answers wake the thread


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
        self.attempts: dict[Attempt, None] = {}
        self.broadcast: Attempt | None = None  # the one of them that is no fetch
        self.waiting: dict[bytes, None] = {}  # nodes that may get a version now, for all that is known
        self.strangers: dict[bytes, None] = {}  # nodes that were not greeted
        self.changed = self.stirred = True  # since the figures were described, since `ready` was called
        self._touched: dict[Attempt, None] = {}
        self._meant: tuple[Snapshot, Snapshot | None] | None = None

    def add(self, node: NodeView) -> None:
        self.nodes[node.identity] = node
        self.strangers[node.identity] = None
        self.stir()

    def stir(self) -> None:
        """Something happened that may concern any node."""
        self.changed = self.stirred = True

    def take(self, identity: bytes, after: NodeView) -> None:
        before = self.nodes[identity]
        self.nodes[identity] = after
        if after.state is NodeState.GONE:
            del self.nodes[identity]
            if self.broadcast is not None:
                self.broadcast.lost |= identity in self.broadcast.members
        if after.state is not before.state or (after.address, after.welcomed) != (before.address, before.welcomed):
            self.stir()
            self.waiting[identity] = None
            self._touched |= {view.attempt: None for view in (before, after) if view.attempt is not None}

    def touch(self, attempt: Attempt) -> None:
        self._touched[attempt] = None

    def touched(self) -> list[Attempt]:
        """Attempts under way to which something happened since the last call."""
        touched, self._touched = self._touched, {}
        return [attempt for attempt in touched if attempt in self.attempts]

    def begin(self, attempt: Attempt) -> None:
        self.attempts[attempt] = None
        self.broadcast = self.broadcast if attempt.relayed else attempt

    def end(self, attempt: Attempt) -> None:
        """The attempt is over for all of its members."""
        del self.attempts[attempt]
        self.broadcast = None if attempt is self.broadcast else self.broadcast

    def members(self, attempt: Attempt) -> list[bytes]:
        """The nodes for which the attempt is not over."""
        views = (self.nodes.get(identity) for identity in attempt.members)
        return [view.identity for view in views if view is not None and view.attempt is attempt]

    def ready(self, current: Snapshot, evaluated: Snapshot | None) -> list[NodeView]:
        """The nodes that may get the version that is meant for the training fleet, or for the pool."""
        if self._meant != (current, evaluated):
            self._meant = current, evaluated
            self.waiting = dict.fromkeys(self.nodes)
        self.stirred = False
        waiting = [view for identity in self.waiting if (view := self.nodes.get(identity)) is not None]
        meant = [(view, evaluated if view.pool else current) for view in waiting]
        found = [view for view, version in meant if version is not None and view.awaits(version.version)]
        self.waiting = {view.identity: None for view in found}
        return found


class Pings:
    """Whose turn it is to be pinged: each node once in an interval, a few at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._bound_s = silence_bound(timeout_s)
        self._last = 0.0  # perf_counter seconds
        self._round: Iterator[bytes] = iter(())  # nodes that get one before any gets another

    def due(self, fleet: Fleet, now: float) -> list[bytes]:
        count = len(fleet.nodes)
        usual_s, bound_s = (BUSY_PING_S, self._bound_s) if fleet.attempts else (IDLE_PING_S, IDLE_SILENCE_S)
        interval_s = max(usual_s, min(count / MOST_PINGS, bound_s / PING_TRIES))
        passed_s = min(now - self._last, interval_s)
        due = int(count * passed_s / interval_s)
        if due == 0 or passed_s < PING_LOOK_S:
            return []
        self._last = now - passed_s + due * interval_s / count
        found = list(itertools.islice(self._round, due))
        if len(found) < due:
            self._round = iter(list(fleet.nodes))
            found += itertools.islice(self._round, due - len(found))
        return found
