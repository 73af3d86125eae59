"""Answers requests from the delivery state at once or lets them wait, and serves those that wait; no sockets."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_never, cast

import msgspec

from broker import wire
from broker.contract import Lease, StoredGroup
from broker.delivery.deadlines import Deadlines
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import StoredPayload
from broker.journal.group_memory import GroupMemory
from broker.journal.store import PayloadLost
from broker.server.replies import Payload
from common.errors import BrokerError, StoreChanged

MAX_WAIT_S = 60.0
READ_S = 2.0
MOST_LEASES = 8  # parked requests of one node; a client that behaves has one, besides those that it cancels

Key = tuple[bytes, int]  # client, request id

R = TypeVar("R")
T = TypeVar("T")
Q = TypeVar("Q", wire.AskLease, wire.Take)


class NotYet(Exception):
    """The request waits for something to happen."""


class Reading(NotYet):
    """The groups of a take are read from the store; it waits for READ_S even if it did not ask to wait."""


class Answers:
    """Answers each request by its rule. pyright checks the arguments, and that a Request[R] is answered with an R."""

    def __init__(self, state: DeliveryState, memory: GroupMemory | None = None) -> None:
        self._state = state
        self._memory = memory
        self.learner = LearnerRules(state)
        self.nodes = NodeRules(state)

    def first(self, request: wire.AnyRequest, payload: Payload | None = None) -> wire.Reply:
        """The answer to a new request. Raises NotYet when it must wait, BrokerError when it is refused."""
        match request:
            case wire.LearnerRequest():
                self.learner.check_learner(request.incarnation, request.instance)
                self.learner.check_position(request.position)
                reply = self._to_learner(request)
                return msgspec.structs.replace(reply, position=self._state.position) if request.promised else reply
            case wire.NodeRequest():
                self._state.run.check_member(request.run, "node")
                return self._to_node(request, payload)
            case wire.Gather():
                return _answer(request, self.learner.gather(request.report, request.log, request.log_rank))
            case wire.Stop():
                return _answer(request, self.learner.stop())
            case wire.SetWeights():
                return _answer(request, self.learner.set_weights(request.request))
            case wire.AskStatus():
                return _answer(request, self._state.status())
            case wire.AskLedger():
                return _answer(request, self._state.tasks.page(request.first, request.unfinished))
            case wire.AskEvents():
                return _answer(request, self._state.event_log.after(request.after))
            case wire.AskLog():
                return _answer(request, self._state.log(request.role))
            case _:
                assert_never(request)

    def again(self, request: wire.AskLease | wire.Take) -> wire.Reply:
        """As `first`, for a request that waits. Only a new request is a sign of life."""
        if isinstance(request, wire.Take):
            self._state.learner.check(request.incarnation, request.instance)
            return msgspec.structs.replace(self._take(request), position=self._state.position)
        if not self._state.fleet.alive(request.node_id):
            return _answer(request, [])
        return self._lease(request, None)

    def _to_learner(self, request: wire.LearnerMessage) -> wire.Answer[Any]:
        rules = self.learner
        match request:
            case wire.Take():
                return self._take(request)
            case wire.Report():
                return _answer(request, rules.report(request.report, request.log, request.log_rank))
            case wire.Offer():
                return _answer(request, rules.offer(request.tasks, request.changes, request.first_change))
            case wire.Commit():
                return _answer(request, rules.commit(request.step))
            case wire.Filter():
                return _answer(request, rules.filter(request.step, request.serials, request.most_replaced))
            case wire.Regenerate():
                return _answer(request, rules.regenerate(request.step, request.serials))
            case wire.Evaluate():
                found = rules.evaluate(request.order, request.tasks, request.stored, request.shared)
                return _answer(request, found)
            case wire.Attach():
                return _answer(request, rules.attach(request.report))
            case _:
                assert_never(request)

    def _to_node(self, request: wire.NodeMessage, payload: Payload | None) -> wire.Answer[Any]:
        rules = self.nodes
        match request:
            case wire.Complete():
                assert payload is not None
                accepted = rules.complete(request.node_id, request.token, request.meta, payload, len(payload))
                return _answer(request, accepted)
            case wire.AskLease():
                return self._lease(request, request.version)
            case wire.Heartbeat():
                told = rules.heartbeat(request.report, request.tokens, request.log, request.spans)
                return _answer(request, told)
            case wire.CompleteEvaluation():
                accepted = rules.complete_evaluation(request.node_id, request.token, request.result)
                return _answer(request, accepted)
            case wire.Fail():
                failed = rules.fail(
                    request.node_id,
                    request.token,
                    request.reason,
                    tokens=request.tokens,
                    seconds=request.seconds,
                    transcript=request.transcript,
                )
                return _answer(request, failed)
            case wire.Release():
                return _answer(request, rules.release(request.node_id, request.tokens))
            case wire.Register():
                return _answer(request, rules.register(request.report))
            case wire.Leave():
                return _answer(request, rules.leave(request.node_id))
            case wire.Cancel():
                return _answer(request, None)  # the state knows nothing of requests that wait
            case wire.ReportService():
                state = self._state
                told = state.services.report(request.report, request.log, state.clock(), state.stopping)
                return _answer(request, told)
            case _:
                assert_never(request)

    def _take(self, request: wire.Take) -> wire.Answer[list[StoredGroup] | None]:
        """The groups come without their payloads, which Handlers.payloads reads."""
        held = set(request.held)
        if request.look:
            taken = self.learner.look(request.count, held)
            if self._memory is not None:
                self._memory.release(held)
        elif (taken := self.learner.take(request.step, request.count, request.in_order)) is None:
            raise NotYet
        elif self._memory is not None and not self._memory.has(request.step, [e for e in taken if e.token not in held]):
            raise Reading
        groups = [(e, e.meta) for e in taken if e.meta is not None]
        told = (StoredGroup(e.serial, e.nodes[-1], m, b"", e.task.source, e.token, e.token in held) for e, m in groups)
        return _answer(request, list(told))

    def _lease(self, request: wire.AskLease, version: int | None) -> wire.Answer[list[Lease]]:
        leases = self.nodes.lease(request.node_id, version, request.max_groups)
        if not leases:
            raise NotYet
        return _answer(request, leases)


def _answer(request: wire.Request[R], value: R) -> wire.Answer[R]:
    return wire.Answer(id=request.id, value=value)


def nothing(request: wire.AskLease | wire.Take) -> wire.Reply:
    """The answer to a request that has waited in vain."""
    return wire.Answer(id=request.id, value=[] if isinstance(request, wire.AskLease) else None)


@dataclass(slots=True)
class Parked(Generic[Q]):
    client: bytes
    request: Q

    @property
    def key(self) -> Key:
        return self.client, self.request.id


AnyParked = Parked[wire.AskLease] | Parked[wire.Take]


class LongPolls:
    """Parked requests in order of arrival, each with a deadline in monotonic seconds."""

    def __init__(self) -> None:
        self.leases: dict[Key, Parked[wire.AskLease]] = {}
        self.takes: dict[Key, Parked[wire.Take]] = {}
        self._by_node: dict[str, dict[Key, None]] = {}  # oldest first
        self.deadlines: Deadlines[Key] = Deadlines()

    def park(self, client: bytes, request: wire.AskLease | wire.Take, deadline: float) -> list[AnyParked]:
        """Keep a request; returns those that it replaces. A repetition of a parked one changes nothing.

        A take replaces every other take. A lease request replaces those that another process sent for the same node,
        and the node's oldest ones when there are too many.
        """
        key = (client, request.id)
        if key in self.leases or key in self.takes:
            return []
        if isinstance(request, wire.Take):
            replaced = self.drop_all(list(self.takes))
            self.takes[key] = Parked(client, request)
        else:
            parked = self.of_node(request.node_id)
            own = [k for k in parked if k[0] == client]
            others = [k for k in parked if k[0] != client] + own[: max(0, len(own) - MOST_LEASES + 1)]
            replaced = self.drop_all(others)
            self.leases[key] = Parked(client, request)
            self._by_node.setdefault(request.node_id, {})[key] = None
        self.deadlines.add(key, deadline)
        return replaced

    def drop_all(self, keys: Iterable[Key]) -> list[AnyParked]:
        """Remove and return those of these requests that are parked."""
        return [parked for parked in map(self.drop, keys) if parked is not None]

    def drop(self, key: Key) -> AnyParked | None:
        """Remove and return a parked request; None when it is not parked."""
        self.deadlines.discard(key)
        lease = self.leases.pop(key, None)
        if lease is None:
            return self.takes.pop(key, None)
        keys = self._by_node[lease.request.node_id]
        del keys[key]
        if not keys:
            del self._by_node[lease.request.node_id]
        return lease

    def of_node(self, node_id: str) -> list[Key]:
        return list(self._by_node.get(node_id, ()))

    def overdue(self, now: float) -> list[AnyParked]:
        """Remove and return the requests whose deadline is at or before `now`."""
        return self.drop_all(self.deadlines.passed(now, lambda key: now))


class Handlers:
    def __init__(self, state: DeliveryState, memory: GroupMemory | None = None) -> None:
        self._state = state
        self.answers = Answers(state, memory)
        self.parked = LongPolls()
        self._served_revision = -1

    def handle(
        self, client: bytes, request: wire.AnyRequest, payload: Payload | None
    ) -> tuple[wire.Reply | None, list[AnyParked]]:
        """The reply, None when the request is parked; and parked requests that their senders have given up."""
        try:
            reply = self.answers.first(request, payload)
        except NotYet as waiting:
            assert isinstance(request, wire.AskLease | wire.Take)
            wait_s = max(READ_S * isinstance(waiting, Reading), min(request.wait_s, MAX_WAIT_S))
            return None, self.parked.park(client, request, time.monotonic() + wait_s)
        except (BrokerError, StoreChanged) as error:
            changed = isinstance(error, StoreChanged)
            return wire.Refused(id=request.id, reason=str(error), store_changed=changed), []
        displaced: list[AnyParked] = []
        if isinstance(request, wire.AskLease | wire.Take):
            self.parked.drop((client, request.id))  # a repetition that was answered at once
        elif isinstance(request, wire.Cancel):
            displaced = self.parked.drop_all([(client, request.target)])
        elif isinstance(request, wire.Leave):
            displaced = self.parked.drop_all(self.parked.of_node(request.node_id))
        return reply, displaced

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
            return self.answers.again(parked.request)
        except NotYet:
            return None
        except BrokerError as error:
            return wire.Refused(id=parked.request.id, reason=str(error))

    def _lease_candidates(self) -> Iterable[Key]:
        """Parked lease requests that may be answerable now: all after a change for all, else those of changed nodes."""
        state = self._state
        changed = state.changed_nodes
        state.changed_nodes = set()
        for_all = self._served_revision != state.lease_revision
        self._served_revision = state.lease_revision
        own = (key for node_id in changed for key in self.parked.of_node(node_id))
        if not for_all:
            return own
        dead = (key for key in own if not state.fleet.alive(self.parked.leases[key].request.node_id))
        return itertools.chain(dead, self.parked.leases)

    def payloads(self, reply: wire.Reply) -> list[Payload] | None:
        """The payloads of a reply's groups that the learner lacks, as frames. Raises BrokerError for an unreadable one.

        None when the store has lost some: the step gives these groups up and has to take others.
        """
        found: list[Payload] = []
        lost = False
        for group in (group for group in _all_of(StoredGroup, reply) if not group.held):
            entry = self._state.tasks.living[group.serial]
            try:
                stored = cast(Payload | StoredPayload, entry.payload)
                found.append(stored.read() if isinstance(stored, StoredPayload) else stored)
            except PayloadLost:
                assert entry.step is not None
                self.answers.learner.regenerate(entry.step, [entry.serial])
                lost = True
        return None if lost else found

    def undo(self, reply: wire.Reply) -> None:
        """Take back the leases of a reply that never arrived."""
        for lease in _all_of(Lease, reply):
            entry = self._state.lease_of(lease.token)
            if entry is not None:
                self.answers.nodes.release(entry.node, [lease.token])


def _all_of(kind: type[T], reply: wire.Reply) -> list[T]:
    """The value of an answer that is a list of `kind`; else an empty list."""
    value = wire.value_of(reply)
    found = cast("list[T]", value) if isinstance(value, list) else []
    return found if found and isinstance(found[0], kind) else []
