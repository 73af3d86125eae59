"""Answers requests from the delivery state at once or lets them wait, and serves those that wait; no sockets.

A request's tag is the name of the rule in the delivery state that answers it, and its own fields are the arguments.
"""

import itertools
import time
from collections.abc import Iterable
from typing import Any, Final, TypeVar, cast, get_args

import msgspec
import zmq

from broker.contract import Lease, StoredGroup
from broker.delivery.state import DeliveryState
from broker.journal.store import PayloadLost, StoredPayload
from broker.messaging import wire
from broker.server.long_polls import AnyParked, Key, ParkingLot
from common.errors import BrokerError, StoreChanged

MAX_WAIT_S = 60.0
NOT_YET: Final = object()  # the answer of a request that waits for something to happen

Payload = bytes | zmq.Frame

T = TypeVar("T")


class Handlers:
    """Answers requests from the state, or parks them."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state
        self.parked = ParkingLot()
        self._served_revision = -1

    def handle(
        self, client: bytes, request: wire.AnyRequest, payload: Payload | None
    ) -> tuple[wire.Reply | None, list[AnyParked]]:
        """The reply, None when the request is parked; and parked requests that their senders have given up."""
        try:
            value = answer(self._state, request, payload)
        except (BrokerError, StoreChanged) as error:
            changed = isinstance(error, StoreChanged)
            return wire.Refused(id=request.id, reason=str(error), store_changed=changed), []
        if value is NOT_YET:
            assert isinstance(request, wire.AskLease | wire.Take)
            return None, self.parked.park(client, request, time.monotonic() + min(request.wait_s, MAX_WAIT_S))
        displaced: list[AnyParked] = []
        if isinstance(request, wire.AskLease | wire.Take):
            self.parked.drop((client, request.id))  # a repetition that was answered at once
        elif isinstance(request, wire.Cancel):
            displaced = self.parked.drop_all([(client, request.target)])
        elif isinstance(request, wire.Leave):
            displaced = self.parked.drop_all(self.parked.of_node(request.node_id))
        return self._answer(request, value), displaced

    def serve_parked(self) -> list[tuple[AnyParked, wire.Reply]]:
        """Every parked request that can be answered now, with its reply."""
        takes = [(take, self._look_again(take)) for take in self.parked.takes.values()]
        served = [(take, reply) for take, reply in takes if reply is not None]
        for take, _ in served:
            self.parked.drop(take.key)
        return served + self._serve_leases()

    def _serve_leases(self) -> list[tuple[AnyParked, wire.Reply]]:
        """Serve the oldest request first, and stop when no task can be leased any more.

        When a node is refused, every node with the same or older weights would be refused too.
        """
        served: dict[Key, tuple[AnyParked, wire.Reply]] = {}
        refused_version = -1
        for key in self._lease_candidates():
            if key in served:
                continue
            lease = self.parked.leases[key]
            node = self._state.fleet.nodes.get(lease.request.node_id)
            in_pool = node is not None and bool(node.report.pool)
            evaluates = node is not None and self._state.evaluation.admits(node.version, in_pool)
            if node is not None and node.alive and node.version <= refused_version and not evaluates:
                continue
            reply = self._look_again(lease)
            if reply is not None:
                served[key] = (lease, reply)
            elif node is not None and not in_pool:
                refused_version = max(refused_version, node.version)
                if refused_version >= self._state.newest_version and not self._state.evaluation.pending:
                    break
        for key in served:
            self.parked.drop(key)
        return list(served.values())

    def _look_again(self, parked: AnyParked) -> wire.Reply | None:
        try:
            value = answer(self._state, parked.request, again=True)
        except BrokerError as error:
            return wire.Refused(id=parked.request.id, reason=str(error))
        return None if value is NOT_YET else self._answer(parked.request, value)

    def _answer(self, request: wire.AnyRequest, value: object) -> wire.Reply:
        told = isinstance(request, wire.LearnerRequest) and request.promised
        return wire.Answer(id=request.id, value=value, position=self._state.position if told else None)

    def _lease_candidates(self) -> Iterable[Key]:
        """Parked lease requests that may be answerable now: all after a change for all, else those of changed nodes."""
        state = self._state
        changed, state.changed_nodes = state.changed_nodes, set()
        for_all = self._served_revision != state.lease_revision
        self._served_revision = state.lease_revision
        own = (key for node_id in changed for key in self.parked.of_node(node_id))
        if not for_all:
            return own
        dead = (key for key in own if not state.fleet.alive(self.parked.leases[key].request.node_id))
        return itertools.chain(dead, self.parked.leases)

    def split(self, reply: wire.Reply) -> tuple[wire.Reply, list[Payload]]:
        """A reply without its payloads, and these as frames. Raises BrokerError when one cannot be read.

        When the store has lost some, the step gives these groups up and the take waits for others.
        """
        groups = _all_of(StoredGroup, reply)
        if not groups:
            return reply, []
        payloads: list[Payload] = []
        for group in groups:
            stored = cast(Payload | StoredPayload, group.payload)
            try:
                payloads.append(stored.read() if isinstance(stored, StoredPayload) else stored)
            except PayloadLost:
                step = self._state.tasks.living[group.serial].step
                assert step is not None
                self._state.regenerate(step, [group.serial])
        if len(payloads) < len(groups):
            return wire.Answer(id=reply.id, value=None), []
        bare = [StoredGroup(group.serial, group.node_id, group.meta) for group in groups]
        return msgspec.structs.replace(reply, value=bare), payloads

    def undo(self, reply: wire.Reply) -> None:
        """Take back the leases of a reply that never arrived."""
        for lease in _all_of(Lease, reply):
            entry = self._state.lease_of(lease.token)
            if entry is not None:
                self._state.release(entry.node, [lease.token])


def _all_of(kind: type[T], reply: wire.Reply) -> list[T]:
    """The value of an answer that is a list of `kind`; else an empty list."""
    value = wire.value_of(reply)
    found = cast("list[T]", value) if isinstance(value, list) else []
    return found if found and isinstance(found[0], kind) else []


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
            if not again:
                state.check_position(request.position)
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
