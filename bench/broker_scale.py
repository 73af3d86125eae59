"""One broker under 1, 100 and 1,000 simulated nodes: latency of lease and complete, CPU per group, memory per node.

    python bench/broker_scale.py [--nodes 1 100 1000] [--seconds 20] [--think 5] [--leases 1000]

Every node is a real client with a connection, an identity and heartbeats of its own. Only the rollout is a pause, drawn
evenly from half to one and a half times `--think` seconds. The same number of groups is under way whatever the number
of nodes (`--leases`, dealt out evenly). So every run asks the broker for the same groups per second. The CPU per group
includes heartbeats.
*Without waiting* leaves out the CPU of the same nodes when they only wait and beat, which is measured before.
Heartbeats are a price per node and second, not per group.
"""

import asyncio
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import broker_groups
import harness
import numpy as np
import psutil
from broker_embedded import HEARTBEAT_S, Learner, broker_process
from harness import cpu_s, received, spawned

from broker.client.connect import Access, connect
from broker.client.connection import AsyncBrokerClient
from broker.contract import Lease, NodeReport
from common.rollouts import encode_group

NODE_PROCESSES = 4
GROUPS_PER_STEP = 100
SETTLE_S = 3.0
LEASE_WAIT_S = 30.0
LEASE_AT_ONCE = 4  # as a node asks


class Plan(NamedTuple):
    """The work of nodes, which are numbered from `first` on."""

    address: str
    nodes: int
    leases: int  # one node has at the same time
    think_s: float
    size: str
    large_every: int = 0  # every so many groups one has the size 8k; 0: none
    first: int = 0


class Times(NamedTuple):
    """Seconds of every call of a node."""

    lease_s: list[float]
    complete_s: list[float]


class Fleet:
    """The nodes of one process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.measured = Times([], [])
        self.measuring = False
        (group, self._meta), (large, _) = (next(broker_groups.structs(size)) for size in (plan.size, "8k"))
        self._payload, self._large = encode_group(group), encode_group(large)
        self._random = random.Random(plan.first)

    async def run(self, pipe: Connection) -> None:
        """Say when all have joined, then work until told to stop."""
        plan = self._plan
        clients = {f"n{plan.first + i}": AsyncBrokerClient(plan.address, deadline_s=60) for i in range(plan.nodes)}
        reports = {name: NodeReport(name, os.getpid(), "host", "generating", 1 << 20) for name in clients}
        for name, client in clients.items():
            await client.register(reports[name])
        work = [asyncio.create_task(self._beat(client, reports[name])) for name, client in clients.items()]
        work += [asyncio.create_task(self._work(client, name)) for name, client in clients.items()]
        pipe.send("joined")
        while await asyncio.to_thread(pipe.recv) != "stop":
            self.measuring = True
        for task in work:
            task.cancel()
        ends = await asyncio.gather(*work, return_exceptions=True)
        for client in clients.values():
            await client.close()
        for failure in filter(lambda end: isinstance(end, Exception), ends):
            raise failure

    async def _beat(self, client: AsyncBrokerClient, report: NodeReport) -> None:
        await asyncio.sleep(self._random.uniform(0, HEARTBEAT_S))
        while True:
            await client.heartbeat(report, [])
            await asyncio.sleep(HEARTBEAT_S)

    async def _work(self, client: AsyncBrokerClient, name: str) -> None:
        """Ask for as many tasks as fit, a few at a time, and start them, as a node does."""
        room = asyncio.Semaphore(self._plan.leases)
        async with asyncio.TaskGroup() as groups:
            while True:
                await room.acquire()
                wanted = 1
                while wanted < LEASE_AT_ONCE and not room.locked():
                    await room.acquire()
                    wanted += 1
                started = time.perf_counter()
                leases = await client.lease(name, 1 << 20, wanted, LEASE_WAIT_S)
                if self.measuring:
                    self.measured.lease_s.append(time.perf_counter() - started)
                for lease in leases:
                    groups.create_task(self._roll_out(client, name, lease, room))
                for _ in range(wanted - len(leases)):
                    room.release()

    async def _roll_out(self, client: AsyncBrokerClient, name: str, lease: Lease, room: asyncio.Semaphore) -> None:
        await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._plan.think_s)
        large_every = self._plan.large_every
        payload = self._large if large_every and lease.task.serial % large_every == 0 else self._payload
        started = time.perf_counter()
        assert await client.complete(name, lease.token, self._meta, payload)
        if self.measuring:
            self.measured.complete_s.append(time.perf_counter() - started)
        room.release()


def play(plan: Plan, pipe: Connection) -> None:
    fleet = Fleet(plan)
    asyncio.run(fleet.run(pipe))
    pipe.send(fleet.measured)


def work(learner: Learner, seconds: float) -> int:
    """Take and commit for so long, and offer as much ahead of the nodes; returns how many groups."""
    end, first = time.monotonic() + seconds, learner.step
    while (left_s := end - time.monotonic()) > 0:
        if learner.take(left_s, len):
            learner.offer(GROUPS_PER_STEP)
    return (learner.step - first) * GROUPS_PER_STEP


def measure(nodes: int, options: harness.Options) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder, broker_process(folder, "memory", GROUPS_PER_STEP) as (address, pids):
        broker = psutil.Process(pids[0])
        rss_before = broker.memory_info().rss
        fleets = start_fleets(Plan(address, nodes, options.leases // nodes, options.think, options.size))
        with connect(Access(address=address, role="learner")) as client:
            learner = Learner(client, GROUPS_PER_STEP)
            try:
                before_s = cpu_s(broker)
                time.sleep(options.seconds / 2)
                idle_s = cpu_s(broker) - before_s
                rss_nodes = broker.memory_info().rss
                learner.offer(2 * options.leases)
                work(learner, options.think * 1.5 + SETTLE_S)
                tell(fleets, "measure")
                before_s = cpu_s(broker)
                groups = work(learner, options.seconds)
                busy_s = cpu_s(broker) - before_s
            finally:
                tell(fleets, "stop")
        measured = list(map(received, fleets))
    idle_share = idle_s / (options.seconds / 2)
    return {
        "nodes": nodes,
        "groups_per_s": round(groups / options.seconds, 1),
        "broker_cpu_us_per_group": round(1e6 * busy_s / groups, 1),
        "broker_cpu_us_per_group_without_waiting": round(1e6 * (busy_s - idle_share * options.seconds) / groups, 1),
        "broker_cpu_us_per_node_per_s": round(1e6 * idle_share / nodes, 1),
        "lease_ms": quantiles([s for m in measured for s in m.lease_s]),
        "complete_ms": quantiles([s for m in measured for s in m.complete_s]),
        "broker_kib_per_node": round((rss_nodes - rss_before) / nodes / 1024, 1),
    }


def start_fleets(plan: Plan) -> list[Connection]:
    """Pipes to processes whose nodes have joined; each ends after it has sent what it measured."""
    processes, fleets = min(plan.nodes, NODE_PROCESSES), list[Connection]()
    for i in range(processes):
        first, last = plan.nodes * i // processes, plan.nodes * (i + 1) // processes
        fleets.append(spawned(play, plan._replace(first=first, nodes=last - first)))
    for pipe in fleets:
        assert received(pipe) == "joined"
    return fleets


def tell(fleets: list[Connection], word: str) -> None:
    for pipe in fleets:
        pipe.send(word)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    found = dict(zip(("p50", "p99", "max"), np.quantile(seconds, (0.5, 0.99, 1.0)).tolist(), strict=True))
    return {name: round(1e3 * value, 2) for name, value in found.items()}


@harness.script(nodes=[1, 100, 1000], leases=1000, think=5.0, seconds=20.0, size="1k")
def main(options: harness.Options) -> harness.Figures:
    return {
        "rounds": 1,
        "think_s": options.think,
        "groups_under_way": options.leases,
        "heartbeat_s": HEARTBEAT_S,
        "group": options.size,
        "runs": [measure(nodes, options) for nodes in options.nodes],
    }
