"""Which requests each role may send, and which credential may speak for a node id."""

from typing import get_args

from broker.delivery.state import DeliveryState
from broker.messaging import wire
from common.security.credentials import Identity

OBSERVING: frozenset[type[wire.Request]] = frozenset({wire.AskStatus, wire.AskLedger, wire.AskEvents})
PERMITTED: dict[str, frozenset[type[wire.Request]]] = {
    "learner": OBSERVING | {kind for kind in get_args(wire.AnyRequest) if issubclass(kind, wire.LearnerRequest)},
    "node": frozenset(
        {
            wire.AskStatus,
            wire.Register,
            wire.AskLease,
            wire.Cancel,
            wire.Heartbeat,
            wire.Complete,
            wire.Fail,
            wire.Release,
            wire.Leave,
        }
    ),
    "observer": OBSERVING,
    "broker": OBSERVING,  # another broker process of the run, which asks whether this one is alive
}


class Roles:
    """Refuses requests that their sender may not send.

    The first credential that names a node id owns it while that node is alive. Another credential may take the id over
    only by registering after the node died. So no node can read or end the leases of another one. Owners are part of
    the delivery state, so they survive a restart of the broker.
    """

    def __init__(self, state: DeliveryState) -> None:
        self._state = state

    def refusal(self, sender: Identity | None, request: wire.Request) -> str:
        """The reason for which `sender` may not send this request; '' when it may."""
        if sender is None:
            return "this key was revoked"
        kind = type(request)
        if kind not in PERMITTED[sender.role]:
            return f"credential {sender.name!r} has the role {sender.role}, which may not send {kind.__name__}"
        node_id = named_node(request)
        if node_id is None:
            return ""
        owner = self._state.owners.get(node_id)
        if owner == sender.public:
            return ""
        joins = isinstance(request, wire.Register | wire.Heartbeat)
        if owner is None or (joins and not self._state.fleet.alive(node_id)):
            self._state.own(node_id, sender.public)
            return ""
        return f"node id {node_id!r} belongs to another credential; every node needs an id of its own"


def named_node(request: wire.Request) -> str | None:
    """The node id that a request speaks for; None for requests that name no node."""
    if isinstance(request, wire.Register | wire.Heartbeat):
        return request.report.node_id
    if isinstance(request, wire.AskLease | wire.Complete | wire.Fail | wire.Release | wire.Leave):
        return request.node_id
    return None
