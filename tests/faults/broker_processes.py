"""Processes that the broker fault tests start and kill: a broker, a node and a learner, all with the real clients.

Usage: python broker_processes.py broker RUN_DIR LEASE_S | node ADDRESS ID THINK_S | learner ADDRESS RUN_DIR STEPS
"""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from broker.async_client import AsyncBrokerClient
from broker.client import BrokerClient
from broker.contract import LearnerReport, Lease, NodeReport
from broker.main import run_broker
from common.config import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, StalenessConfig, TasksConfig
from common.rollouts import GroupMeta, Task

GROUPS_PER_STEP = 4
SLOTS = 3  # groups that a node works on at once


def config(run_dir: str, lease_s: float) -> Config:
    return Config(
        run=RunConfig(name="faults", dir=run_dir, steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none", max_attempts=50),
        learner=LearnerConfig(groups_per_step=GROUPS_PER_STEP),
        broker=BrokerConfig(lease_s=lease_s),
        staleness=StalenessConfig(max=1),
    )


def broker(run_dir: str, lease_s: str) -> int:
    job = config(run_dir, float(lease_s))
    return run_broker(job, msgspec.json.encode(job))


async def node(address: str, node_id: str, think_s: str) -> None:
    """Lease, think, complete; the payload names the lease, so that the learner's groups can be told apart."""
    held: dict[str, Lease] = {}
    version = 0

    def report() -> NodeReport:
        return NodeReport(node_id, os.getpid(), "h", "generating", version)

    async with AsyncBrokerClient(address, deadline_s=10) as client:
        run = await client.register(report())

        async def beat() -> None:
            while True:
                await client.heartbeat(report(), list(held))
                await asyncio.sleep(run.lease_s / 5)

        async def work(lease: Lease) -> None:
            await asyncio.sleep(float(think_s))
            meta = GroupMeta(version, version, 0.5, 1)
            payload = json.dumps([lease.task.serial, lease.token]).encode()
            await client.complete(node_id, lease.token, meta, payload)
            del held[lease.token]

        async with asyncio.TaskGroup() as group:
            group.create_task(beat())
            while True:
                version += 1  # as if new weights came all the time; admission is tested elsewhere
                if len(held) == SLOTS:
                    await asyncio.sleep(0.01)
                    continue
                for lease in await client.lease(node_id, version, SLOTS - len(held), 0.2):
                    held[lease.token] = lease
                    group.create_task(work(lease))


def learner(address: str, run_dir: str, steps: str) -> None:
    """Take and commit every third step; write down what each step got before the commit is said."""
    with BrokerClient(address, deadline_s=10) as client:
        log = Path(run_dir) / "learner.jsonl"
        durable = Path(run_dir) / "checkpoint"
        first = int(durable.read_text()) if durable.exists() else 0
        serial = client.attach(LearnerReport(os.getpid(), first, "starting", first, step=first)).next_serial
        total = (int(steps) + 3) * GROUPS_PER_STEP
        client.offer([Task(n, b"{}", n, 1) for n in range(serial, total)])
        for step in range(first, int(steps)):
            groups = None
            while groups is None:
                groups = client.take(step, GROUPS_PER_STEP, 1.0)
            with log.open("a") as file:
                file.write(json.dumps({"step": step, "payloads": [g.payload.decode() for g in groups]}) + "\n")
            time.sleep(0.02)
            if step % 3 == 2:
                durable.with_suffix(".part").write_text(str(step + 1))
                durable.with_suffix(".part").replace(durable)
                client.commit(step)
        client.report(LearnerReport(os.getpid(), first, "done", int(steps), step=int(steps)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    role, *arguments = sys.argv[1:]
    if role == "broker":
        sys.exit(broker(*arguments))
    elif role == "node":
        asyncio.run(node(*arguments))
    else:
        learner(*arguments)
