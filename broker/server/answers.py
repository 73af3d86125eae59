"""The answer to each request, from the delivery state: no sockets and no waiting.

A request's tag is the name of the rule in the delivery state that answers it, and its own fields are the arguments.
"""

from typing import Any, Final, cast, get_args

import zmq

from broker.contract import StoredGroup
from broker.delivery.state import DeliveryState
from broker.messaging import wire

NOT_YET: Final = object()  # the answer of a request that waits for something to happen

Payload = bytes | zmq.Frame


def rule(kind: type[wire.Request[Any]]) -> tuple[str, tuple[str, ...]]:
    """The rule's name in DeliveryState, and the names of its arguments."""
    of_sender = wire.LearnerRequest.__struct_fields__
    return str(kind.__struct_config__.tag), tuple(name for name in kind.__struct_fields__ if name not in of_sender)


_RULES = {kind: rule(kind) for kind in get_args(wire.AnyRequest)}


def answer(state: DeliveryState, request: wire.AnyRequest, payload: Payload | None = None, again: bool = False) -> Any:
    """The request's answer, or NOT_YET; `again`: it waits, and this is another look.

    The groups of a take have their payloads as they are stored. Raises BrokerError when the request is refused.
    """
    match request:
        case wire.AskLease():
            if again and not state.fleet.alive(request.node_id):
                return []
            return state.lease(request.node_id, None if again else request.version, request.max_groups) or NOT_YET
        case wire.Complete():
            assert payload is not None
            return state.complete(request.node_id, request.token, request.meta, payload, len(payload))
        case wire.Cancel():
            return None  # the state knows nothing of requests that wait
        case wire.LearnerRequest():  # only a new request is a sign of life
            check = state.learner.check if again else state.check_learner
            check(request.incarnation, request.instance)
            if isinstance(request, wire.Take):
                return _take(state, request)
        case _:
            pass
    name, arguments = _RULES[type(request)]
    return getattr(state, name)(*[getattr(request, argument) for argument in arguments])


def nothing(request: wire.AnyRequest) -> Any:
    """The answer of a request that has waited in vain."""
    return [] if isinstance(request, wire.AskLease) else None


def _take(state: DeliveryState, request: wire.Take) -> Any:
    taken = state.take(request.step, request.count, request.in_order)
    if taken is None:
        return NOT_YET
    return [StoredGroup(e.serial, e.nodes[-1], e.meta, cast(bytes, e.payload)) for e in taken if e.meta is not None]
