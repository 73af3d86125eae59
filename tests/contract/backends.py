"""The broker under test: the delivery state in one process, behind ZeroMQ, and with each store behind it."""

import asyncio
import inspect
import secrets
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from broker.client.calls import NodeBroker
from broker.client.connection import AsyncBrokerClient, BrokerClient
from broker.contract import NodeReport, RunInfo
from broker.delivery.state import DeliveryState
from broker.journal.file_store import open_file_store
from broker.journal.journal import Journal
from broker.journal.recovery import recover
from broker.journal.redis_store import RedisStore
from broker.journal.store import Store
from common.rollouts import GroupMeta, Task
from common.waste import Waste, wasted_tokens
from tests.rigs import brokers
from tests.rigs.brokers import MemoryBroker, new_state, node_report, serving
from tests.rigs.redis_servers import leading, redis_server
from tests.rigs.waiting import LIMIT_S

META = GroupMeta(version_min=0, version_max=1, reward_mean=0.5, sampled_tokens=10, generation_s=2.5)
GROUPS_PER_STEP = 2
LEASE_S = 30.0
MEMORY_BYTES = 1 << 10


class Clock:
    """Monotonic seconds that a test may set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Backend:
    """One broker under test, its clients, and an event loop for the nodes."""

    def __init__(
        self, runner: asyncio.Runner, clock: Clock, learner: Callable[[], Any], node: Callable[[], Any]
    ) -> None:
        self._runner, self._clock = runner, clock
        self.new_learner = learner
        self.learner = learner()
        self.node: NodeBroker = node()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, LIMIT_S))

    def pass_time(self, seconds: float) -> None:
        """Set the broker's clock forward; it looks for lost leases after it has read a message."""
        self._clock.ahead_s += seconds
        self.learner.status()

    def begin(self, count: int) -> None:
        """Tasks 0, 1, ... are offered, and node n0 is there."""
        self.learner.offer(tasks(*range(count)))
        self.join()

    def fill(self, count: int) -> None:
        """As `begin`; the tasks in the window of version 0 are ready."""
        self.begin(count)
        for lease in self.lease(count):
            assert self.complete(lease)

    def join(self, node_id: str = "n0", pid: int = 1, version: int = 0, instance: str = "") -> None:
        self.run(self.node.register(node_report(node_id, pid, version, instance=instance)))

    def beat(self, report: NodeReport, *tokens: str) -> Any:
        """A heartbeat with the tokens of the leases that the node has."""
        return self.run(self.node.heartbeat(report, list(tokens)))

    def leave(self, node_id: str = "n0") -> None:
        self.run(self.node.leave(node_id))

    def lease(self, count: int, node_id: str = "n0", version: int = 0, wait_s: float = 0.0) -> list[Any]:
        return self.run(self.node.lease(node_id, version, count, wait_s))

    def lease_when(self, action: Callable[[], Any], version: int = 0) -> list[int]:
        """Tasks that a waiting lease of four gets when `action` is done."""

        async def scenario() -> list[Any]:
            waiting = asyncio.create_task(self.node.lease("n0", version, 4, LIMIT_S))
            await asyncio.sleep(0.1)
            if inspect.isawaitable(done := await asyncio.to_thread(action)):
                await done
            return await waiting

        return [lease.task.serial for lease in self.run(scenario())]

    def complete(self, lease: Any, node_id: str = "n0", payload: bytes | None = None) -> bool:
        data = payload if payload is not None else b"group %d" % lease.task.serial
        return self.run(self.node.complete(node_id, lease.token, META, data))

    def fail(self, node_id: str = "n0", reason: str = "bad machine", lease: Any = None) -> int:
        """Fail a lease, the oldest task unless one is given; its serial."""
        lease = lease or self.lease(1, node_id)[0]
        self.run(self.node.fail(node_id, lease.token, reason))
        return lease.task.serial

    def states(self) -> dict[int, str]:
        return {e.serial: e.state for e in self.learner.ledger()}

    def wasted(self, node_id: str | None = None) -> dict[str, Waste]:
        """By reason, of the run or of a node; without reasons under which nothing was lost."""
        status = self.learner.status()
        found = status.waste if node_id is None else {n.report.node_id: n.waste for n in status.nodes}[node_id]
        assert status.tokens_wasted_total == wasted_tokens(status.waste)
        return {reason: spent for reason, spent in found.items() if spent != Waste()}


def tasks(*serials: int) -> list[Task]:
    return [Task(serial=s, problem=b"{}", seed=s, group_size=4) for s in serials]


def run_info(**facts: Any) -> RunInfo:
    return brokers.run_info(groups_per_step=GROUPS_PER_STEP, max_attempts=2, config=b'{"a": 1}', **facts)


def memory(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    broker = MemoryBroker(run, clock := Clock())
    yield Backend(runner, clock, broker.learner, broker.node)


def zeromq(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    yield from served(runner, clock := Clock(), state=new_state(run, clock))


def zeromq_files(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    with tempfile.TemporaryDirectory() as folder:
        yield from durable(open_file_store(Path(folder, "store"), run.name), run, runner)


def zeromq_redis(run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    term = leading(redis_server(), f"test {secrets.token_hex(4)}")
    yield from durable(RedisStore(term), run, runner)


def durable(store: Store, run: RunInfo, runner: asyncio.Runner) -> Iterator[Backend]:
    """Acknowledged only after a sync; snapshots are taken all the time, and most large groups leave the memory."""
    run = msgspec.structs.replace(run, memory_bytes=MEMORY_BYTES)
    journal, clock = Journal(store, "fsync", segment_bytes=1 << 12), Clock()
    state = DeliveryState(run, clock, recorder=journal, retain_steps=2)
    recover(journal, state)
    yield from served(runner, clock, state=state, journal=journal)


def served(runner: asyncio.Runner, clock: Clock, **parts: Any) -> Iterator[Backend]:
    with serving(**parts) as server, ExitStack() as opened:

        def learner() -> BrokerClient:
            return opened.enter_context(BrokerClient(server.address, deadline_s=LIMIT_S))

        def node() -> AsyncBrokerClient:
            client = AsyncBrokerClient(server.address, deadline_s=LIMIT_S)
            opened.callback(lambda: runner.run(client.close()))
            return client

        yield Backend(runner, clock, learner, node)


BACKENDS = {"memory": memory, "zeromq": zeromq, "zeromq_files": zeromq_files, "zeromq_redis": zeromq_redis}
