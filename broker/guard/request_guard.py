"""What stands between the broker's socket and its handlers: who sends, may they, and what becomes of a refusal."""

from pathlib import Path
from typing import Any

import zmq

from broker.delivery.state import DeliveryState
from broker.guard import flood_guard
from broker.guard.authorization import Roles
from broker.guard.flood_guard import FloodGuard
from broker.guard.observer_rate_limit import Pace, answer_bytes
from broker.guard.rejected_messages import Denied, Later, Refusals
from broker.messaging.wire import AnyRequest, AskEvents, AskLedger, AskStatus
from common.security.credentials import Identity, load_server
from common.security.curve import CurveServer, KeyRing

OBSERVING = (AskStatus, AskLedger, AskEvents)
ROLES = ("learner", "observer", "node", "broker")


class Gate:
    """Without credentials every sender may send everything; the address is then a loopback one.

    Args:
        context: of the broker's socket.
        state: asked which nodes live, told what was refused.
        credentials: key folder, or None.
        quarantine: where refused messages are kept; None: nowhere.

    Raises:
        UsageError: the broker's keys or the list of allowed ones cannot be read.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        state: DeliveryState,
        credentials: str | None = None,
        quarantine: Path | None = None,
    ) -> None:
        self.refusals = Refusals(state, quarantine)
        self.curve: CurveServer | None = None
        self._roles = Roles(state.node_alive, state.owners)
        self._state = state
        self._pace = Pace()
        self._floods: FloodGuard | None = None
        if credentials is not None:
            self.curve = CurveServer(context, load_server(credentials), KeyRing(credentials, ROLES))

    def watch(self, router: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
        """From now on cut off who sends messages without an end; right after the socket was bound."""
        self._floods = FloodGuard(router, max(flood_guard.UNEXPLAINED_BYTES, 2 * max_message_bytes))

    def receive(self, router: "zmq.Socket[bytes]") -> tuple[bytes, Identity | None]:
        """The first frame of the next message: its connection, and whose it is. Raises zmq.Again."""
        alert = self._floods is not None and self._floods.alert
        if self.curve is None and not alert:
            return router.recv(zmq.NOBLOCK), None
        frame = router.recv(zmq.NOBLOCK, copy=False)
        if alert and self._floods is not None:
            self._floods.heard(frame)
        return frame.bytes, self.curve.sender(frame) if self.curve is not None else None

    def check(self, sender: Identity | None, request: AnyRequest) -> None:
        """Raise Denied when `sender` may not make this request, Later when not now.

        The learner is never told to wait: what others ask must not hold it up.
        """
        reason = self._roles.refusal(sender, request) if self.curve is not None else ""
        if reason:
            raise Denied(reason, request.id)
        if isinstance(request, OBSERVING) and (sender is None or sender.role != "learner"):
            cost = answer_bytes(request, self._state)
            if cost and not self._pace.spend(cost):
                raise Later("the broker has told observers as much as it may for the moment", request.id)

    def tick(self) -> None:
        """About once a second: see whether keys were added or revoked, and whether memory is short."""
        if self._floods is not None:
            self._floods.tick(self._state.tasks.bytes_held)
        if self.curve is not None:
            self.curve.ring.refresh()

    def close(self) -> None:
        """After the socket was closed, before the context is."""
        if self._floods is not None:
            self._floods.close()
        if self.curve is not None:
            self.curve.close()
