"""From decoded requests to replies: one method per message, no sockets."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import zmq

from broker.delivery.state import DeliveryState
from broker.journal.store import PayloadLost, StoredPayload
from broker.messaging import wire
from broker.server.long_polls import Key, ParkedLease, ParkedTake, ParkingLot
from common.errors import BrokerError

MAX_WAIT_S = 60.0
MAX_REASON_CHARS = 2000

Parked = ParkedLease | ParkedTake
Payload = bytes | zmq.Frame


class Handlers:
    """Answers requests from the state, or parks them."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state
        self.parked = ParkingLot()
        self._served_revision = -1
        self._displaced: list[Parked] = []
        self._handlers: dict[type[wire.Request], Callable[[bytes, Any, Payload | None], wire.Reply | None]] = {
            wire.Attach: self._attach,
            wire.Offer: self._offer,
            wire.Take: self._take,
            wire.Regenerate: self._regenerate,
            wire.Filter: self._filter,
            wire.Commit: self._commit,
            wire.Report: self._report,
            wire.Register: self._register,
            wire.AskLease: self._lease,
            wire.Cancel: self._cancel,
            wire.Heartbeat: self._heartbeat,
            wire.Complete: self._complete,
            wire.Fail: self._fail,
            wire.Release: self._release,
            wire.Leave: self._leave,
            wire.AskStatus: self._status,
            wire.AskLedger: self._ledger,
            wire.AskEvents: self._events,
        }

    def handle(
        self, client: bytes, request: wire.AnyRequest, payload: Payload | None
    ) -> tuple[wire.Reply | None, list[Parked]]:
        """The reply, None when the request is parked; and parked requests that this one displaced."""
        self._displaced = []
        try:
            if isinstance(request, wire.LearnerRequest):
                self._state.check_learner(request.incarnation, request.instance)
            reply = self._handlers[type(request)](client, request, payload)
        except BrokerError as error:
            reply = wire.Refused(id=request.id, reason=str(error))
        return reply, self._displaced

    def serve_parked(self) -> list[tuple[bytes, wire.Reply]]:
        """(client, reply) for every parked request that can be answered now."""
        served: list[tuple[bytes, wire.Reply]] = []
        for key, take in list(self.parked.takes.items()):
            reply = self._guarded(take.request, self._try_take)
            if reply is not None:
                self.parked.drop(key)
                served.append((take.client, reply))
        return served + self._serve_leases()

    def _serve_leases(self) -> list[tuple[bytes, wire.Reply]]:
        """Serve the oldest request first, and stop when no task can be leased any more.

        When a node is refused, every node with the same or older weights would be refused too. So a task that becomes
        free needs a look at only a few of a thousand waiting nodes.
        """
        served: dict[Key, tuple[bytes, wire.Reply]] = {}
        refused_version = -1
        for key in self._lease_candidates():
            if key in served:
                continue
            lease = self.parked.leases[key]
            node = self._state.fleet.nodes.get(lease.request.node_id)
            if node is not None and node.alive and node.version <= refused_version:
                continue
            reply = self._guarded(lease.request, self._try_parked_lease)
            if reply is not None:
                served[key] = (lease.client, reply)
            elif node is not None:
                refused_version = max(refused_version, node.version)
                if refused_version >= self._state.newest_version:
                    break
        for key in served:
            self.parked.drop(key)
        return list(served.values())

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

    def payloads(self, reply: wire.Reply) -> list[Payload]:
        """The payload frames that go with a reply. Raises BrokerError when one cannot be read."""
        if not isinstance(reply, wire.Taken) or not reply.groups:
            return []
        found = [self._state.tasks.living[group.serial].payload for group in reply.groups]
        return [p.read() if isinstance(p, StoredPayload) else cast(Payload, p) for p in found]

    def give_up_lost(self, reply: wire.Taken) -> wire.Reply:
        """The answer to a take whose groups the store has lost: the step gives these up and waits for others."""
        for group in reply.groups or ():
            entry = self._state.tasks.living[group.serial]
            try:
                if isinstance(entry.payload, StoredPayload):
                    entry.payload.read()
            except PayloadLost:
                assert entry.step is not None
                self._state.regenerate(entry.step, [group.serial])
        return wire.Taken(id=reply.id, groups=None)

    def undo_leases(self, reply: wire.Leased) -> None:
        """Leases whose holder never heard of them."""
        for lease in reply.leases:
            entry = self._state.tasks.leased.get(lease.token)
            if entry is not None:
                self._state.release(entry.node, [lease.token])

    def _guarded(self, request: wire.AnyRequest, handler: Callable[[Any], wire.Reply | None]) -> wire.Reply | None:
        try:
            return handler(request)
        except BrokerError as error:
            return wire.Refused(id=request.id, reason=str(error))

    # ---------------------------------------------------------------- learner

    def _attach(self, client: bytes, request: wire.Attach, payload: Payload | None) -> wire.Reply:
        told = self._state.attach(request.report)
        return wire.Attached(
            id=request.id, next_serial=told.next_serial, store_id=told.store_id, committed_step=told.committed_step
        )

    def _offer(self, client: bytes, request: wire.Offer, payload: Payload | None) -> wire.Reply:
        return wire.Offered(id=request.id, new=self._state.offer(request.tasks))

    def _take(self, client: bytes, request: wire.Take, payload: Payload | None) -> wire.Reply | None:
        reply = self._try_take(request)
        if reply is None:
            self._displaced += self.parked.park_take(client, request, _deadline(request.wait_s))
        return reply

    def _try_take(self, request: wire.Take) -> wire.Reply | None:
        self._state.learner.check(request.incarnation, request.instance)
        taken = self._state.take(request.step, request.count, request.in_order)
        if taken is None:
            return None
        groups = [wire.TakenGroup(e.serial, e.nodes[-1], e.meta) for e in taken if e.meta is not None]
        return wire.Taken(id=request.id, groups=groups)

    def _regenerate(self, client: bytes, request: wire.Regenerate, payload: Payload | None) -> wire.Reply:
        self._state.regenerate(request.step, request.serials)
        return wire.Done(id=request.id)

    def _filter(self, client: bytes, request: wire.Filter, payload: Payload | None) -> wire.Reply:
        self._state.filter(request.step, request.serials, request.most_replaced)
        return wire.Done(id=request.id)

    def _commit(self, client: bytes, request: wire.Commit, payload: Payload | None) -> wire.Reply:
        self._state.commit(request.step)
        return wire.Done(id=request.id)

    def _report(self, client: bytes, request: wire.Report, payload: Payload | None) -> wire.Reply:
        self._state.report(request.report)
        return wire.Done(id=request.id)

    # ---------------------------------------------------------------- nodes

    def _register(self, client: bytes, request: wire.Register, payload: Payload | None) -> wire.Reply:
        return wire.Registered(id=request.id, run=self._state.register(request.report))

    def _lease(self, client: bytes, request: wire.AskLease, payload: Payload | None) -> wire.Reply | None:
        leases = self._state.lease(request.node_id, request.version, request.max_groups)
        if leases:
            self.parked.drop((client, request.id))
            return wire.Leased(id=request.id, leases=leases)
        self._displaced += self.parked.park_lease(client, request, _deadline(request.wait_s))
        return None

    def _try_parked_lease(self, request: wire.AskLease) -> wire.Reply | None:
        if not self._state.fleet.alive(request.node_id):
            return wire.Leased(id=request.id, leases=[])
        leases = self._state.lease(request.node_id, None, request.max_groups)
        return wire.Leased(id=request.id, leases=leases) if leases else None

    def _cancel(self, client: bytes, request: wire.Cancel, payload: Payload | None) -> wire.Reply:
        parked = self.parked.drop((client, request.target))
        if parked is not None:
            self._displaced.append(parked)
        return wire.Done(id=request.id)

    def _heartbeat(self, client: bytes, request: wire.Heartbeat, payload: Payload | None) -> wire.Reply:
        return wire.Beaten(id=request.id, reply=self._state.heartbeat(request.report, request.tokens))

    def _complete(self, client: bytes, request: wire.Complete, payload: Payload | None) -> wire.Reply:
        assert payload is not None
        size = len(payload)
        accepted = self._state.complete(request.node_id, request.token, request.meta, payload, size)
        return wire.Completed(id=request.id, accepted=accepted)

    def _fail(self, client: bytes, request: wire.Fail, payload: Payload | None) -> wire.Reply:
        reason = request.reason[:MAX_REASON_CHARS]
        self._state.fail(request.node_id, request.token, reason, request.tokens, request.seconds)
        return wire.Done(id=request.id)

    def _release(self, client: bytes, request: wire.Release, payload: Payload | None) -> wire.Reply:
        self._state.release(request.node_id, request.tokens)
        return wire.Done(id=request.id)

    def _leave(self, client: bytes, request: wire.Leave, payload: Payload | None) -> wire.Reply:
        for key in self.parked.of_node(request.node_id):
            parked = self.parked.drop(key)
            if parked is not None:
                self._displaced.append(parked)
        self._state.leave(request.node_id)
        return wire.Done(id=request.id)

    # ---------------------------------------------------------------- observers

    def _status(self, client: bytes, request: wire.AskStatus, payload: Payload | None) -> wire.Reply:
        return wire.StatusReply(id=request.id, status=self._state.status())

    def _ledger(self, client: bytes, request: wire.AskLedger, payload: Payload | None) -> wire.Reply:
        return wire.LedgerReply(id=request.id, entries=self._state.ledger())

    def _events(self, client: bytes, request: wire.AskEvents, payload: Payload | None) -> wire.Reply:
        return wire.EventsReply(id=request.id, events=self._state.events(request.after))


def _deadline(wait_s: float) -> float:
    return time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)
