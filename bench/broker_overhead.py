"""CPU that the broker adds to a group: lease, complete, take and commit, over producer, broker and consumer.

    python bench/broker_overhead.py [--groups 6000] [--payload 83000] [--transport tcp|ipc] [--repeat 3]

Three processes (one node, the broker, one learner) move pre-encoded groups; CPU time is read from each process's
own rusage around the loop. Raw ZeroMQ PUSH/PULL with the same bytes, in the same run, is the floor. One JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from broker.async_client import AsyncBrokerClient
from broker.client import BrokerClient
from broker.contract import LearnerReport, Lease, NodeReport
from broker.main import run_broker
from common.config import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, StalenessConfig, TasksConfig
from common.rollouts import GroupMeta, Task

GROUPS_PER_STEP = 16
STALENESS = 4
CONCURRENCY = 32
META = GroupMeta(version_min=3, version_max=4, reward_mean=0.5, sampled_tokens=8192)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def broker(run_dir: str, address: str) -> None:
    config = Config(
        run=RunConfig(name="bench", dir=run_dir, steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        learner=LearnerConfig(groups_per_step=GROUPS_PER_STEP),
        broker=BrokerConfig(address=address),
        staleness=StalenessConfig(max=STALENESS),
    )
    run_broker(config, msgspec.json.encode(config))


def node(address: str, groups: int, payload_bytes: int, out: Connection) -> None:
    asyncio.run(_node(address, groups, payload_bytes, out))


async def _node(address: str, groups: int, payload_bytes: int, out: Connection) -> None:
    payload = os.urandom(payload_bytes)
    async with AsyncBrokerClient(address) as client:
        await client.register(NodeReport("n0", os.getpid(), "h", "generating", 0))
        done = 0
        started = cpu_s()

        async def complete(lease: Lease) -> None:
            assert await client.complete("n0", lease.token, META, payload)

        while done < groups:
            version = done // GROUPS_PER_STEP  # the freshest that a learner could have published by now
            leases = await client.lease("n0", version, CONCURRENCY, 10)
            await asyncio.gather(*(complete(lease) for lease in leases))
            done += len(leases)
        out.send(cpu_s() - started)


def learner(address: str, groups: int, out: Connection) -> None:
    problem = json.dumps({"question": "384+519", "answer": "903"}).encode()
    with BrokerClient(address) as client:
        client.attach(LearnerReport(os.getpid(), 0, "training", 0))
        started, wall = cpu_s(), time.perf_counter()
        client.offer([Task(i, problem, i, 8) for i in range(groups)])
        for step in range(groups // GROUPS_PER_STEP):
            taken = None
            while taken is None:
                taken = client.take(step, GROUPS_PER_STEP, 10)
            client.commit(step)
        out.send((cpu_s() - started, time.perf_counter() - wall))


def push(address: str, groups: int, payload_bytes: int, out: Connection) -> None:
    payload = os.urandom(payload_bytes)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        started = cpu_s()
        for _ in range(groups):
            socket.send(payload)
    out.send(cpu_s() - started)


def pull(address: str, groups: int, out: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        out.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        socket.recv()
        started, wall = cpu_s(), time.perf_counter()
        for _ in range(groups - 1):
            socket.recv()
        out.send((cpu_s() - started, time.perf_counter() - wall))


def start(target: Any, *arguments: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(False)
    process = context.Process(target=target, args=(*arguments, send))
    process.start()
    return process, receive


def received(pipe: Connection) -> Any:
    assert pipe.poll(300), "no answer from a bench process"
    return pipe.recv()


def measure_broker(groups: int, payload_bytes: int, transport: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        address = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{folder}/socket"
        server = multiprocessing.get_context("spawn").Process(target=broker, args=(folder, address))
        server.start()
        try:
            found = Path(folder, "broker.json")
            while not found.exists():
                time.sleep(0.05)
            address = json.loads(found.read_text())["address"]
            times = psutil.Process(server.pid).cpu_times()
            n, n_out = start(node, address, groups, payload_bytes)
            c, c_out = start(learner, address, groups)
            consumer_s, wall_s = received(c_out)
            producer_s = received(n_out)
            after = psutil.Process(server.pid).cpu_times()
            n.join(10)
            c.join(10)
        finally:
            server.terminate()
            server.join(10)
    broker_s = after.user + after.system - times.user - times.system
    return {
        "groups_per_s": groups / wall_s,
        "producer_us": producer_s / groups * 1e6,
        "broker_us": broker_s / groups * 1e6,
        "consumer_us": consumer_s / groups * 1e6,
        "cpu_us_per_group": (producer_s + broker_s + consumer_s) / groups * 1e6,
    }


def measure_floor(groups: int, payload_bytes: int, transport: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        address = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/socket"
        c, c_out = start(pull, address, groups)
        n, n_out = start(push, received(c_out), groups, payload_bytes)
        consumer_s, wall_s = received(c_out)
        producer_s = received(n_out)
        n.join(10)
        c.join(10)
    return {"groups_per_s": groups / wall_s, "cpu_us_per_group": (producer_s + consumer_s) / groups * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6000)
    parser.add_argument("--payload", type=int, default=83_000, help="bytes of one encoded group")
    parser.add_argument("--transport", choices=("tcp", "ipc"), default="tcp")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    groups = options.groups // GROUPS_PER_STEP * GROUPS_PER_STEP
    runs = [
        (
            measure_broker(groups, options.payload, options.transport),
            measure_floor(groups, options.payload, options.transport),
        )
        for _ in range(options.repeat)
    ]
    broker_us = statistics.median(b["cpu_us_per_group"] for b, _ in runs)
    floor_us = statistics.median(f["cpu_us_per_group"] for _, f in runs)
    result = {
        "bench": "broker_overhead",
        "groups": groups,
        "payload_bytes": options.payload,
        "transport": options.transport,
        "cpu_us_per_group": round(broker_us, 1),
        "raw_zeromq_us_per_group": round(floor_us, 1),
        "ratio": round(broker_us / floor_us, 2),
        "runs": [
            {"broker": {k: round(v, 1) for k, v in b.items()}, "floor": {k: round(v, 1) for k, v in f.items()}}
            for b, f in runs
        ],
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "msgspec": msgspec.__version__},
        "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
