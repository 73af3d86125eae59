"""The Redis backend with the face of DeliveryState, for the delivery state machine.

Real clients, a real server; the clock stands still until it is told to move.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from types import SimpleNamespace
from typing import Any

import msgspec

from broker.contract import LearnerReport, Lease, NodeReport, RunInfo
from broker.redis import moves as redis_moves
from broker.redis import reading
from broker.redis.async_client import AsyncRedisClient
from broker.redis.client import RedisClient
from broker.redis.keys import Keys
from common.redis_address import with_run
from tests.redis_server import RedisServer, make_run

SLICE_S = 4.0  # a longer silence of everybody gives leases new deadlines, which is not what the machine means
CLOCK = b"test:clock_ms"
READ_CLOCK = b"local ms = tonumber(call('GET', '%b'))\nlocal clock = {floor(ms / 1000), ms %% 1000 * 1000}" % CLOCK


@contextmanager
def clock_of_the_test() -> Any:
    """The moves read the time from a key; nothing else of them changes."""
    script = redis_moves.SCRIPT
    assert script.count(b"local clock = call('TIME')") == 1
    clocked = script.replace(b"local clock = call('TIME')", READ_CLOCK)
    before = redis_moves.SCRIPT, redis_moves.SHA
    redis_moves.SCRIPT, redis_moves.SHA = clocked, sha1(clocked, usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        redis_moves.SCRIPT, redis_moves.SHA = before


@dataclass
class Entry:
    """A task as Redis has it now; times in seconds of the test's clock."""

    serial: int
    state: str
    attempts: int
    failures: int
    nodes: list[str]
    token: str
    node: str
    leased_at: float
    deadline: float
    failed_by: list[str]


@dataclass
class Tasks:
    """What Redis holds now."""

    living: dict[int, Entry] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    passed_gone: int = 0
    next_serial: int = 0

    @property
    def leased(self) -> dict[str, Entry]:
        return {e.token: e for e in self.living.values() if e.state == "leased"}

    def freed_before(self, serial: int) -> int:
        return self.passed_gone + sum(s < serial for s in self.passed)


class RedisDelivery:
    """One run on `server`; every node has the one asynchronous client, the learner and the observer the other."""

    def __init__(self, server: RedisServer, run: RunInfo, clock: Callable[[], float], nodes: Sequence[str]) -> None:
        self._server, self._clock, self._node_ids = server, clock, nodes
        self._at_s = clock()
        self._runner = asyncio.Runner()
        address = with_run(server.address, run.name)
        self._set_clock()
        self._keys = Keys(run.name, make_run(server, run))
        self._client = RedisClient(address, deadline_s=10)
        self._node = AsyncRedisClient(address, deadline_s=10)

    def close(self) -> None:
        self._client.close()
        self._run(self._node.close())
        self._runner.close()

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)

    def _set_clock(self) -> None:
        self._server.ask("SET", CLOCK, str(round(self._at_s * 1000)))

    # ---------------------------------------------------------------- learner and observers

    def attach(self, report: LearnerReport) -> None:
        self._client.attach(report)

    def offer(self, tasks: list[Any]) -> int:
        return self._client.offer(tasks)

    def take(self, step: int, count: int, in_order: bool = False) -> Any:
        return self._client.take(step, count, 0.0, in_order)

    def regenerate(self, step: int, serials: list[int]) -> None:
        self._client.regenerate(step, serials)

    def filter(self, step: int, serials: list[int], most_replaced: int) -> None:
        self._client.filter(step, serials, most_replaced)

    def commit(self, step: int) -> None:
        self._client.commit(step)

    def status(self) -> Any:
        return self._client.status()

    def ledger(self) -> Any:
        return self._client.ledger()

    # ---------------------------------------------------------------- nodes

    def register(self, report: NodeReport) -> None:
        self._run(self._node.register(report))

    def lease(self, node: str, version: int, count: int) -> list[Lease]:
        return self._run(self._node.lease(node, version, count, 0.0))

    def heartbeat(self, report: NodeReport, tokens: list[str]) -> Any:
        return self._run(self._node.heartbeat(report, tokens))

    def complete(self, node: str, token: str, meta: Any, payload: bytes, payload_bytes: int) -> bool:
        assert len(payload) == payload_bytes
        return self._run(self._node.complete(node, token, meta, payload))

    def fail(self, node: str, token: str, reason: str) -> None:
        self._run(self._node.fail(node, token, reason))

    def release(self, node: str, tokens: list[str]) -> None:
        self._run(self._node.release(node, tokens))

    def leave(self, node: str) -> None:
        self._run(self._node.leave(node))

    # ---------------------------------------------------------------- time and what is there

    def expire(self) -> None:
        """The clock goes to the test's time, in steps, as it does for people who call now and then."""
        while self._at_s < self._clock():
            self._at_s = min(self._at_s + SLICE_S, self._clock())
            self._set_clock()
            self._client.status()  # sweeps

    @property
    def tasks(self) -> Tasks:
        of = self._keys.of
        state, tasks, leases, ready, passed = self._ask(
            ("HGETALL", self._keys.state),
            ("HGETALL", of("tasks")),
            ("ZRANGE", of("leases"), 0, -1, "WITHSCORES"),
            ("ZRANGE", of("ready"), 0, -1),
            ("ZRANGE", of("passed"), 0, -1),
        )
        deadlines = {token.decode(): float(ms) / 1000 for token, ms in reading.pairs(leases).items()}
        living: dict[int, Entry] = {}
        for serial, packed in reading.pairs(tasks).items():
            r = msgspec.msgpack.decode(packed, type=reading.Record)
            holder = r.nodes[-1] if r.state == "leased" else ""
            token = r.token if holder else ""
            deadline = deadlines.pop(token) if holder else 0.0
            living[int(serial)] = Entry(
                int(serial),
                r.state,
                r.attempts,
                r.failures,
                r.nodes,
                token,
                holder,
                r.leased_at / 1000,
                deadline,
                [n for n in (r.failed_by, "another" * r.others_failed) if n],
            )
        assert not deadlines, "leases of tasks that are not leased"
        scalars = reading.pairs(state)
        return Tasks(
            living,
            [int(s) for s in ready],
            [int(s) for s in passed],
            int(scalars.get(b"passed_gone", 0)),
            int(scalars[b"next"]),
        )

    @property
    def fleet(self) -> Any:
        leased = self.tasks.leased
        nodes: dict[str, Any] = {}
        for name, flat in zip(
            self._node_ids, self._ask(*(("HGETALL", self._keys.of("node:" + n)) for n in self._node_ids)), strict=True
        ):
            if flat:
                report = msgspec.json.decode(reading.pairs(flat)[b"report"], type=NodeReport)
                tokens = {token for token, e in leased.items() if e.node == name}
                nodes[name] = SimpleNamespace(report=report, tokens=tokens)
        return SimpleNamespace(nodes=nodes)

    def _ask(self, *commands: Any) -> list[Any]:
        link = self._client._link()  # pyright: ignore[reportPrivateUsage]
        return link.ask(list(commands))
