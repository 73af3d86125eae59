"""What each role may ask of the broker, and which node ids a credential may speak for."""

from collections.abc import Callable

from broker.delivery.node_ownership import NodeOwners
from broker.messaging import wire
from common.security.credentials import Identity

OBSERVING: frozenset[type[wire.Request]] = frozenset({wire.AskStatus, wire.AskLedger, wire.AskEvents})
PERMITTED: dict[str, frozenset[type[wire.Request]]] = {
    "learner": OBSERVING | {wire.Attach, wire.Offer, wire.Take, wire.Regenerate, wire.Filter, wire.Commit, wire.Report},
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
    """Says no to requests that their sender may not make.

    The first credential that names a node id speaks for it as long as that node is alive, and others may only take
    it by registering when it is not. So a node can neither learn of another's leases nor end them. Who speaks for which
    id is part of the broker's state: it holds for the next broker of the run too.
    """

    def __init__(self, node_alive: Callable[[str], bool], owners: NodeOwners) -> None:
        self._node_alive, self._owners = node_alive, owners

    def refusal(self, sender: Identity | None, request: wire.Request) -> str:
        """Why `sender` may not make this request; '' when it may."""
        if sender is None:
            return "this key was revoked"
        kind = type(request)
        if kind not in PERMITTED[sender.role]:
            return f"credential {sender.name!r} has the role {sender.role}, which may not send {kind.__name__}"
        node_id = named_node(request)
        if node_id is None:
            return ""
        owner = self._owners.get(node_id)
        if owner == sender.public:
            return ""
        joins = isinstance(request, wire.Register | wire.Heartbeat)
        if owner is None or (joins and not self._node_alive(node_id)):
            self._owners.bind(node_id, sender.public, self._node_alive)
            return ""
        return f"node id {node_id!r} belongs to another credential; every node needs an id of its own"


def named_node(request: wire.Request) -> str | None:
    """The node id that a request speaks for."""
    if isinstance(request, wire.Register | wire.Heartbeat):
        return request.report.node_id
    if isinstance(request, wire.AskLease | wire.Complete | wire.Fail | wire.Release | wire.Leave):
        return request.node_id
    return None
