"""Which requests each role may send, and which credential may speak for a node id."""

from typing import Any

from broker.delivery.state import DeliveryState
from broker.messaging import wire
from common.security.credentials import Identity

PERMITTED: dict[str, tuple[type[wire.Request[Any]], ...]] = {
    "learner": (wire.LearnerRequest, wire.ObserverRequest, wire.Gather, wire.Stop),
    "node": (wire.NodeRequest, wire.AskStatus),
    "observer": (wire.ObserverRequest,),
    "broker": (wire.ObserverRequest,),  # another broker process of the run, which asks whether this one is alive
}


def refusal(state: DeliveryState, sender: Identity | None, request: wire.AnyRequest) -> str:
    """The reason for which `sender` may not send this request; '' when it may.

    The first credential that names a node id owns it, so no node can read or end the leases of another one. Another
    credential takes the id over only by registering after the node died. A restart of the broker keeps the owners.
    """
    if sender is None:
        return "this key was revoked"
    if not isinstance(request, PERMITTED[sender.role]):
        kind = type(request).__name__
        return f"credential {sender.name!r} has the role {sender.role}, which may not send {kind}"
    node_id = request.node if isinstance(request, wire.NodeRequest) else None
    owner = state.owners.get(node_id or "")
    if node_id is None or owner == sender.public:
        return ""
    joins = isinstance(request, wire.NodeReportRequest)
    if owner is None or (joins and not state.fleet.alive(node_id)):
        state.own(node_id, sender.public)
        return ""
    return f"node id {node_id!r} belongs to another credential; every node needs an id of its own"
