"""The embedded broker as a way of bench/broker_ways.py: leases, heartbeats, acknowledgements and commits included."""

import asyncio
import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import broker_groups
import msgspec
from broker_ways import Load, Served, Way
from harness import PATIENCE_S

from broker.client.calls import LearnerBroker
from broker.client.connect import Access, connect, connect_node
from broker.contract import LearnerReport, Lease, NodeReport
from broker.main import run_broker
from common.config.schema import Config
from common.process.lifecycle import keep_freed_memory
from common.rollouts import GroupMeta, Task, decode_group, encode_group
from tests.rigs.waiting import until

GROUPS_PER_STEP = 16
STALENESS = 4
LEASES_AT_ONCE = 16
NEW_WEIGHTS_S = 0.02  # a node that waits for a lease looks this often whether it has newer weights
HEARTBEAT_S = 2.0  # the default of broker.heartbeat_s
PROBLEM = json.dumps({"question": "384+519", "answer": "903"}).encode()
META = GroupMeta(version_min=3, version_max=4, reward_mean=0.5, sampled_tokens=8192)


class Embedded(Way):
    """A broker with `broker.durability`, one node and one learner."""

    def __init__(self, durability: str, name: str = "") -> None:
        self.name = name or f"slipstream_{durability}"
        self._durability = durability
        self._published = multiprocessing.get_context("spawn").Value("q", 0)  # the learner's version, as nodes have it

    def serve(self, folder: str) -> Served:
        return broker_process(folder, self._durability)

    def produce(self, address: str, load: Load) -> Iterator[None]:
        keep_freed_memory()  # as a node does
        made = self.source(load)
        yield
        asyncio.run(self._work(address, load.groups, made))

    def consume(self, address: str, load: Load) -> Iterator[None]:
        keep_freed_memory()  # as a learner does
        self._published.value = 0
        with connect(Access(address=address, role="learner")) as client:
            client.attach(LearnerReport(os.getpid(), 0, "training", 0))
            learner = Learner(client, GROUPS_PER_STEP)
            yield
            learner.offer(load.groups)
            for step in range(load.groups // GROUPS_PER_STEP):
                while not learner.take(10, self.use):
                    pass
                self._published.value = step + 1

    def source(self, load: Load) -> Callable[[int], tuple[GroupMeta, bytes]]:
        """Encodes a group for each task, as a node does."""
        groups = broker_groups.structs(load.size)

        def made(serial: int) -> tuple[GroupMeta, bytes]:
            group, meta = next(groups)
            return meta, encode_group(msgspec.structs.replace(group, serial=serial))

        return made

    def use(self, payload: bytes) -> object:
        """The arrays that a learner computes with."""
        return broker_groups.arrays_of_structs(decode_group(payload))

    async def _work(self, address: str, groups: int, made: Callable[[int], tuple[GroupMeta, bytes]]) -> None:
        """A node that hands in `made(serial)` for every task, until it has handed in `groups`."""
        report = NodeReport("n0", os.getpid(), "host", "generating", 0)
        leased: set[str] = set()
        async with connect_node(Access(address=address, role="node")) as client:

            async def hand_in(lease: Lease) -> None:
                assert await client.complete("n0", lease.token, *made(lease.task.serial))
                leased.discard(lease.token)

            async def beat() -> None:
                while True:
                    current = msgspec.structs.replace(report, policy_version=self._published.value)
                    await client.heartbeat(current, sorted(leased))
                    await asyncio.sleep(HEARTBEAT_S)

            await client.register(report)
            beating = asyncio.create_task(beat())
            done = 0
            while done < groups:
                leases = await client.lease("n0", self._published.value, LEASES_AT_ONCE, NEW_WEIGHTS_S)
                leased.update(lease.token for lease in leases)
                await asyncio.gather(*(hand_in(lease) for lease in leases))
                done += len(leases)
            beating.cancel()


class Learner:
    """Offers tasks; takes and commits groups, a step at a time."""

    def __init__(self, client: LearnerBroker, groups_per_step: int) -> None:
        self._client, self._size = client, groups_per_step
        self.offered = self.step = 0

    def offer(self, count: int) -> None:
        if count > 0:
            serials = range(self.offered, self.offered + count)
            self._client.offer([Task(serial, PROBLEM, serial, broker_groups.SAMPLES) for serial in serials])
            self.offered += count

    def take(self, wait_s: float, use: Callable[[bytes], object]) -> bool:
        """Whether a step's groups were there in time; `use` gets the bytes of each."""
        taken = self._client.take(self.step, self._size, wait_s)
        if taken is None:
            return False
        for stored in taken:
            use(stored.payload)
        self._client.commit(self.step)
        self.step += 1
        return True


@contextlib.contextmanager
def broker_process(
    folder: str, durability: str, groups_per_step: int = GROUPS_PER_STEP, redis: str | None = None, **bounds: int
) -> Iterator[tuple[str, list[int]]]:
    """Address and process ids of a broker with run folder `folder`, which ends with the context.

    `bounds` are further keys of `broker`.
    """
    store = {} if redis is None else {"store": "redis", "redis": redis}
    document = {
        "run": {"name": "bench", "dir": folder, "steps": 1},
        "model": {"path": "none"},
        "tasks": {"environment": "none", "dataset": "none"},
        "learner": {"groups_per_step": groups_per_step},
        "broker": {"durability": durability, **store, **bounds},
        "staleness": {"max": STALENESS},
    }
    config = msgspec.convert(document, Config)
    words = (config, msgspec.json.encode(config))
    process = multiprocessing.get_context("spawn").Process(target=run_broker, args=words)
    process.start()
    try:
        listens = Path(folder) / "broker.json"
        until(listens.exists, "the broker's address", PATIENCE_S)
        assert process.pid is not None
        yield json.loads(listens.read_text())["address"], [process.pid]
    finally:
        process.terminate()
        process.join(PATIENCE_S)
