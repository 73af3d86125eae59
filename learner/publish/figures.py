"""The figures that the weight plane gives to the rest of the learner."""

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.span_buffer import SPANS
from learner.publish.attempt import Attempt
from learner.publish.receiver_state import Receiver, State
from learner.publish.snapshot import Snapshot, Targets

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

    def describe(self, receivers: Collection[Receiver], targets: Targets) -> None:
        """Derive from the receivers how far the versions have come."""
        fleet = [r for r in receivers if not r.pool]  # no figure waits for an evaluation
        live = [r for r in fleet if r.state is not State.EXCLUDED]
        excluded = [r.reason for r in fleet if r.state is State.EXCLUDED]
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


def undelivered(receivers: Iterable[Receiver], targets: Targets) -> tuple[Undelivered, ...]:
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
