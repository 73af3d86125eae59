"""Checks every request between the broker's socket and its handlers: sender, role, rate, and the broker's memory."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from broker.delivery.state import DeliveryState
from broker.guard import flood_guard
from broker.guard.flood_guard import FloodGuard
from broker.guard.rejected_messages import Denied, Later, Refusals
from broker.messaging import wire
from common.security.credentials import Identity, belongs_to, load_server
from common.security.curve import CurveGate, KeyRing

ROLES = ("learner", "observer", "node", "broker")
BYTES_A_SECOND = 256 << 20  # replies to all observers together
BURST_BYTES = 512 << 20
LEDGER_ENTRY_BYTES, NODE_BYTES, EVENTS_BYTES = 128, 1024, 1 << 20
PERMITTED: dict[str, tuple[type[wire.Request[Any]], ...]] = {
    "learner": (wire.LearnerRequest, wire.ObserverRequest, wire.Gather, wire.Stop),
    "node": (wire.NodeRequest, wire.AskStatus),
    "observer": (wire.ObserverRequest,),
    "broker": (wire.ObserverRequest,),  # another broker process of the run, which asks whether this one is alive
}


def refusal(sender: Identity | None, request: wire.AnyRequest) -> str:
    """The reason for which `sender` may not send this request; '' when it may.

    A node id begins with the name of its credential, so no node can take, read or end the leases of another one.
    """
    if sender is None:
        return "this key was revoked"
    if not isinstance(request, PERMITTED[sender.role]):
        return f"credential {sender.name!r} has the role {sender.role}, which may not send {type(request).__name__}"
    node_id = request.node if isinstance(request, wire.NodeRequest) else None
    if node_id is None or belongs_to(node_id, sender.name):
        return ""
    return f"credential {sender.name!r} may use the node ids {sender.name} and {sender.name}:ANYTHING, not {node_id!r}"


class Gate:
    """The checks of one broker. Without credentials every sender may send everything, on a loopback address.

    `context` is that of the broker's socket, `credentials` a key folder, `quarantine` a folder for refused messages.
    Raises UsageError when the broker's keys or the list of allowed ones cannot be read.
    """

    def __init__(
        self, context: zmq.Context[Any], state: DeliveryState, credentials: str | None, quarantine: Path | None
    ) -> None:
        self.refusals = Refusals(state, quarantine)
        self.curve: CurveGate | None = None
        self._ring: KeyRing | None = None
        self._state = state
        self._pace = Pace()
        self._floods: FloodGuard | None = None
        if credentials is not None:
            keys = load_server(credentials)
            self._ring = KeyRing(credentials, ROLES)
            self.curve = CurveGate(context, keys, self._ring)

    def watch(self, router: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
        """Begin to cut connections that send endless messages. Call it right after the socket was bound."""
        self._floods = FloodGuard(router, max(flood_guard.UNEXPLAINED_BYTES, 2 * max_message_bytes))

    def receive(self, router: "zmq.Socket[bytes]") -> tuple[bytes, Identity | None]:
        """Read the first frame of the next message: its connection and its sender. Raises zmq.Again."""
        alert = self._floods is not None and self._floods.alert
        if self._ring is None and not alert:
            return router.recv(zmq.NOBLOCK), None
        frame = router.recv(zmq.NOBLOCK, copy=False)
        if alert and self._floods is not None:
            self._floods.heard(frame)
        return frame.bytes, self._ring.sender(frame) if self._ring is not None else None

    def check(self, sender: Identity | None, request: wire.AnyRequest) -> None:
        """Raise Denied when `sender` may not send this request, Later when it must wait.

        The learner never waits, so that observers cannot delay training.
        """
        reason = refusal(sender, request) if self.curve is not None else ""
        if reason:
            raise Denied(reason, request.id)
        limited = isinstance(request, wire.ObserverRequest) and (sender is None or sender.role != "learner")
        if limited and not self._pace.spend(reply_bytes(request, self._state)):
            raise Later("the broker limits the replies to observers; it answers as soon as it may", request.id)

    def tick(self) -> None:
        """Run about once a second: read added and revoked keys, and check the broker's memory."""
        if self._floods is not None:
            self._floods.tick(self._state.tasks.bytes_held)
        if self._ring is not None:
            self._ring.refresh()

    def close(self) -> None:
        """Call it after the socket was closed and before the context is."""
        if self._floods is not None:
            self._floods.close()
        if self.curve is not None:
            self.curve.close()


class Pace:
    """Limits the replies to observers, because replies that are not read fill the broker's memory.

    A token bucket: the budget grows with time up to BURST_BYTES.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._at = float(BURST_BYTES), clock()

    def spend(self, cost_bytes: int) -> bool:
        """Take `cost_bytes` from the budget; returns False, and takes nothing, when it is too small."""
        now = self._clock()
        self._left = min(float(BURST_BYTES), self._left + (now - self._at) * BYTES_A_SECOND)
        self._at = now
        if cost_bytes > self._left and self._left < BURST_BYTES:
            return False
        self._left -= cost_bytes  # negative after a reply larger than the whole budget
        return True


def reply_bytes(request: wire.AnyRequest, state: DeliveryState) -> int:
    """Estimated size of the reply."""
    if isinstance(request, wire.AskLedger):
        return LEDGER_ENTRY_BYTES * state.tasks.next_serial
    if isinstance(request, wire.AskStatus):
        return NODE_BYTES * len(state.fleet.nodes) + len(state.run.config)
    return EVENTS_BYTES
