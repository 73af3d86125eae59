"""Requests that wait for something to happen: leases for tasks, takes for ready groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from broker.delivery.deadlines import Deadlines
from broker.wire import AskLease, Take

Key = tuple[bytes, int]  # client, request id
MOST_LEASES = 8  # parked requests of one node; a client that behaves has one, besides those that it cancels

Q = TypeVar("Q", AskLease, Take)


@dataclass(slots=True)
class Parked(Generic[Q]):
    client: bytes
    request: Q

    @property
    def key(self) -> Key:
        return self.client, self.request.id


AnyParked = Parked[AskLease] | Parked[Take]


class LongPolls:
    """Parked requests in order of arrival, each with a deadline in monotonic seconds."""

    def __init__(self) -> None:
        self.leases: dict[Key, Parked[AskLease]] = {}
        self.takes: dict[Key, Parked[Take]] = {}
        self._by_node: dict[str, dict[Key, None]] = {}  # oldest first
        self.deadlines: Deadlines[Key] = Deadlines()

    def park(self, client: bytes, request: AskLease | Take, deadline: float) -> list[AnyParked]:
        """Keep a request; returns those that it replaces. A repetition of a parked one changes nothing.

        A take replaces every other take. A lease request replaces those that another process sent for the same node,
        and the node's oldest ones when there are too many.
        """
        key = (client, request.id)
        if key in self.leases or key in self.takes:
            return []
        if isinstance(request, Take):
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
