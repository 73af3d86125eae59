"""The embedded broker as a way of bench/broker_ways.py: leases, heartbeats, acknowledgements and commits included."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

import broker_groups
import msgspec
from broker_ways import PATIENCE_S, Load

from broker.connect import Access, connect, connect_node
from broker.contract import LearnerReport, Lease, NodeReport
from broker.main import run_broker
from broker.messaging.client_methods import LearnerBroker
from common.config.schema import Config
from common.process.malloc_tuning import keep_freed_memory
from common.rollouts import GroupMeta, Task, decode_group, encode_group
from tests.waiting import until

GROUPS_PER_STEP = 16
STALENESS = 4
LEASES_AT_ONCE = 16
NEW_WEIGHTS_S = 0.02  # a node that waits for a lease looks this often whether it has newer weights
HEARTBEAT_S = 2.0  # the default of broker.heartbeat_s
PROBLEM = json.dumps({"question": "384+519", "answer": "903"}).encode()


class Embedded:
    """A broker with `broker.durability`, one node and one learner."""

    ahead = 0  # tasks offered beyond the step that is taken; 0: all

    def __init__(self, durability: str, name: str = "") -> None:
        self.name = name or f"slipstream_{durability}"
        self._durability = durability
        self._published = multiprocessing.get_context("spawn").Value("q", 0)  # the learner's version, as nodes have it

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        with broker_process(folder, self._durability) as pid:
            yield wait_for_address(Path(folder)), [pid]

    def produce(self, address: str, load: Load) -> Generator[None, None, "Times"]:
        keep_freed_memory()  # as a node does
        made = self.source(load)
        yield
        return asyncio.run(run_node(address, load.groups, self._published, made))

    def consume(self, address: str, load: Load) -> Iterator[None]:
        keep_freed_memory()  # as a learner does
        self._published.value = 0
        with connect(Access(address=address, role="learner")) as client:
            client.attach(LearnerReport(os.getpid(), 0, "training", 0))
            yield
            run_learner(client, load.groups, self._published, self.ahead or load.groups, self.use)

    def source(self, load: Load) -> Callable[[int], tuple[GroupMeta, bytes]]:
        """Encodes a group for each task, as a node does."""
        groups = broker_groups.structs(load.size)
        next(groups)  # the groups are made now

        def made(serial: int) -> tuple[GroupMeta, bytes]:
            group, meta = next(groups)
            return meta, encode_group(msgspec.structs.replace(group, serial=serial))

        return made

    def use(self, payload: bytes) -> object:
        """The arrays that a learner computes with."""
        return broker_groups.arrays_of_structs(decode_group(payload))


class Times(NamedTuple):
    """Seconds of every call of a node."""

    lease_s: list[float]
    complete_s: list[float]


async def run_node(
    address: str, groups: int, published: "Synchronized[int]", made: Callable[[int], tuple[GroupMeta, bytes]]
) -> Times:
    """A node that hands in `made(serial)` for every task, until it has handed in `groups`."""
    report = NodeReport("n0", os.getpid(), "host", "generating", 0)
    leased: set[str] = set()
    times = Times([], [])
    async with connect_node(Access(address=address, role="node")) as client:

        async def hand_in(lease: Lease) -> None:
            meta, payload = made(lease.task.serial)
            started = time.perf_counter()
            assert await client.complete("n0", lease.token, meta, payload)
            times.complete_s.append(time.perf_counter() - started)
            leased.discard(lease.token)

        async def beat() -> None:
            while True:
                current = msgspec.structs.replace(report, policy_version=published.value)
                await client.heartbeat(current, sorted(leased))
                await asyncio.sleep(HEARTBEAT_S)

        await client.register(report)
        beating = asyncio.create_task(beat())
        done = 0
        while done < groups:
            started = time.perf_counter()
            leases = await client.lease("n0", published.value, LEASES_AT_ONCE, NEW_WEIGHTS_S)
            times.lease_s.append(time.perf_counter() - started)
            leased.update(lease.token for lease in leases)
            await asyncio.gather(*(hand_in(lease) for lease in leases))
            done += len(leases)
        beating.cancel()
    return times


def run_learner(
    client: LearnerBroker, groups: int, published: "Synchronized[int]", ahead: int, use: Callable[[bytes], object]
) -> None:
    """Take and commit `groups` groups; at most `ahead` tasks are offered beyond the step that is taken."""
    offered = 0
    for step in range(groups // GROUPS_PER_STEP):
        wanted = min(groups, (step + 1) * GROUPS_PER_STEP + ahead)
        if wanted > offered:
            client.offer([Task(i, PROBLEM, i, broker_groups.SAMPLES) for i in range(offered, wanted)])
            offered = wanted
        taken = None
        while taken is None:
            taken = client.take(step, GROUPS_PER_STEP, 10)
        for stored in taken:
            use(stored.payload)
        client.commit(step)
        published.value = step + 1


@contextlib.contextmanager
def broker_process(
    folder: str, durability: str, groups_per_step: int = GROUPS_PER_STEP, redis: str | None = None
) -> Iterator[int]:
    """The process id of a broker with run folder `folder` and a free port, which ends with the context."""
    store = {} if redis is None else {"store": "redis", "redis": redis}
    document = {
        "run": {"name": "bench", "dir": folder, "steps": 1},
        "model": {"path": "none"},
        "tasks": {"environment": "none", "dataset": "none"},
        "learner": {"groups_per_step": groups_per_step},
        "broker": {"durability": durability, **store},
        "staleness": {"max": STALENESS},
    }
    process = multiprocessing.get_context("spawn").Process(target=serve_broker, args=(document,))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.terminate()
        process.join(PATIENCE_S)


def serve_broker(document: dict[str, object]) -> None:
    config = msgspec.convert(document, Config)
    run_broker(config, msgspec.json.encode(config))


def wait_for_address(folder: Path) -> str:
    """Where the broker of a run folder listens."""
    until((folder / "broker.json").exists, "the broker's address", PATIENCE_S)
    return json.loads((folder / "broker.json").read_text())["address"]
