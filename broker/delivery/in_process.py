"""The reference backend: the delivery contract in one process, without sockets or threads.

The contract suite runs against it as well as against the server; simulations use it with their own clock.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import cast

from broker.contract import (
    Attached,
    BrokerEvent,
    BrokerStatus,
    HeartbeatReply,
    LearnerReport,
    Lease,
    LedgerEntry,
    NodeReport,
    RunInfo,
    StoredGroup,
)
from broker.delivery.event_log import EventLog
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import Entry
from common.rollouts import GroupMeta, Task

POLL_S = 0.005


class MemoryBroker:
    """A shared state; `learner()` and `node()` return clients of it."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = DeliveryState(run, clock, lambda: secrets.token_hex(8), EventLog())
        self.state.address = "memory"

    def learner(self) -> "MemoryLearner":
        """Make a client for a learner or an observer."""
        return MemoryLearner(self.state)

    def node(self) -> "MemoryNode":
        """Make a client for a node."""
        return MemoryNode(self.state)


class MemoryLearner:
    """A LearnerBroker and ObserverBroker over a state in this process."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state
        self._incarnation: int | None = None
        self._instance = ""

    def attach(self, report: LearnerReport) -> Attached:
        """See LearnerBroker."""
        attached = self._state.attach(report)
        self._incarnation, self._instance = report.incarnation, report.instance
        return attached

    def offer(self, tasks: list[Task]) -> int:
        """See LearnerBroker."""
        return self._checked().offer(tasks)

    def take(self, step: int, count: int, wait_s: float, in_order: bool = False) -> list[StoredGroup] | None:
        """See LearnerBroker."""
        deadline = time.monotonic() + wait_s
        while True:
            taken = self._checked().take(step, count, in_order)
            if taken is not None:
                return [_stored(entry) for entry in taken]
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def regenerate(self, step: int, serials: list[int]) -> None:
        """See LearnerBroker."""
        self._checked().regenerate(step, serials)

    def filter(self, step: int, serials: list[int], most_replaced: int) -> None:
        """See LearnerBroker."""
        self._checked().filter(step, serials, most_replaced)

    def commit(self, step: int) -> None:
        """See LearnerBroker."""
        self._checked().commit(step)

    def report(self, report: LearnerReport) -> None:
        """See LearnerBroker."""
        self._state.report(report)

    def status(self) -> BrokerStatus:
        """See ObserverBroker."""
        self._state.expire()
        return self._state.status()

    def ledger(self) -> list[LedgerEntry]:
        """See ObserverBroker."""
        self._state.expire()
        return self._state.ledger()

    def events(self, after: int) -> list[BrokerEvent]:
        """See ObserverBroker."""
        return self._state.events(after)

    def _checked(self) -> DeliveryState:
        self._state.expire()
        self._state.check_learner(self._incarnation, self._instance)
        return self._state


class MemoryNode:
    """A NodeBroker over a state in this process."""

    def __init__(self, state: DeliveryState) -> None:
        self._state = state

    async def register(self, report: NodeReport) -> RunInfo:
        """See NodeBroker."""
        return self._current().register(report)

    async def lease(self, node_id: str, version: int, max_groups: int, wait_s: float) -> list[Lease]:
        """See NodeBroker."""
        deadline = time.monotonic() + wait_s
        leases = self._current().lease(node_id, version, max_groups)
        while not leases and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            leases = self._current().lease(node_id, None, max_groups)
        return leases

    async def heartbeat(self, report: NodeReport, tokens: list[str]) -> HeartbeatReply:
        """See NodeBroker."""
        return self._current().heartbeat(report, tokens)

    async def complete(self, node_id: str, token: str, meta: GroupMeta, payload: bytes) -> bool:
        """See NodeBroker."""
        return self._current().complete(node_id, token, meta, payload, len(payload))

    async def fail(self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """See NodeBroker."""
        self._current().fail(node_id, token, reason, tokens, seconds)

    async def release(self, node_id: str, tokens: list[str]) -> None:
        """See NodeBroker."""
        self._current().release(node_id, tokens)

    async def leave(self, node_id: str) -> None:
        """See NodeBroker."""
        self._current().leave(node_id)

    def _current(self) -> DeliveryState:
        self._state.expire()
        return self._state


def _stored(entry: Entry) -> StoredGroup:
    assert entry.meta is not None
    return StoredGroup(entry.serial, entry.nodes[-1], entry.meta, cast(bytes, entry.payload))
