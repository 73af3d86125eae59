"""CPU of a broker for the heartbeats of nodes that send as many spans as it allows, against nodes that send none.

    python bench/trace_cost.py [--nodes 100 1000] [--seconds 10] [--rounds 3]

Every node is a real client that only beats. Writes bench/results/trace_cost.json.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

import harness
import msgspec
import psutil
from broker_embedded import HEARTBEAT_S, broker_process
from harness import cpu_s, received, spawned

from broker.contract import NodeReport
from broker.messaging.async_client import AsyncBrokerClient
from common.process.run_dir import RunDir
from common.spans import Span, SpanBatch
from launch.observe.trace_files import read_batches

NODE_PROCESSES = 2
SPAN = Span("engine", "engine", 1795487271.5471458, 0.07064199447631836, "episodes/123.4", {"turn": 1})
SPAN_BYTES = len(msgspec.json.encode(SPAN))


def play(address: str, first: int, nodes: int, pipe: Connection) -> None:
    """Nodes `first`, ... of one process; says when each has joined, and at the end how often they beat since asked."""
    beats: list[str] = []

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(beat(address, f"n{first + number}", pipe, beats)) for number in range(nodes)]
            await asyncio.to_thread(pipe.recv)
            beats.clear()
            pipe.send(await asyncio.to_thread(pipe.recv) and len(beats))
            for task in work:
                task.cancel()

    asyncio.run(run())


async def beat(address: str, name: str, pipe: Connection, beats: list[str]) -> None:
    report, allowed = NodeReport(name, os.getpid(), "host", "generating", 1), 0
    async with AsyncBrokerClient(address, deadline_s=60) as client:
        await client.register(report)
        pipe.send("joined")
        await asyncio.sleep(random.uniform(0, HEARTBEAT_S))
        while True:
            count = min(allowed, 128 << 10) // SPAN_BYTES
            spans = SpanBatch(who=name, host="host", spans=[SPAN] * count) if count else None
            allowed += (await client.heartbeat(report, [], None, spans)).span_bytes - count * SPAN_BYTES
            beats.append(name)
            await asyncio.sleep(HEARTBEAT_S)


def measure(nodes: int, trace_mib: int, seconds: float) -> dict[str, float]:
    """CPU of the broker per heartbeat, and the spans in its trace."""
    telemetry = {"trace_mib": trace_mib}
    with tempfile.TemporaryDirectory() as folder:
        with broker_process(folder, "memory", telemetry=telemetry) as (address, pids):
            counts = [nodes * i // NODE_PROCESSES for i in range(NODE_PROCESSES + 1)]
            parts = [(a, b - a) for a, b in itertools.pairwise(counts) if b > a]
            pipes = [spawned(play, address, first, count) for first, count in parts]
            for pipe, (_, count) in zip(pipes, parts, strict=True):
                for _ in range(count):
                    assert received(pipe) == "joined"
            time.sleep(3 * HEARTBEAT_S)
            broker = psutil.Process(pids[0])
            for pipe in pipes:
                pipe.send("measure")
            before_s = cpu_s(broker)
            time.sleep(seconds)
            busy_s = cpu_s(broker) - before_s
            for pipe in pipes:
                pipe.send("stop")
            beats = sum(received(pipe) for pipe in pipes)
        spans = sum(len(batch.spans) for batch in read_batches(RunDir(folder)))
    return {"busy_share": busy_s / seconds, "cpu_us_per_heartbeat": 1e6 * busy_s / beats, "spans": spans}


def main() -> None:
    options: argparse.Namespace = harness.parser(__doc__, nodes=[100, 1000], seconds=10.0, rounds=3).parse_args()
    runs = []
    for nodes in options.nodes:
        taken = [{mib: measure(nodes, mib, options.seconds) for mib in (0, 64)} for _ in range(options.rounds)]
        row: dict[str, float] = {"nodes": nodes}
        for mib, name in ((0, "without"), (64, "with")):
            for figure, digits in (("busy_share", 4), ("cpu_us_per_heartbeat", 1), ("spans", 0)):
                row[f"{figure}_{name}"] = round(statistics.median(one[mib][figure] for one in taken), digits)
        runs.append(row)
    figures = {"rounds": options.rounds, "heartbeat_s": HEARTBEAT_S, "span_bytes": SPAN_BYTES, "runs": runs}
    harness.save("trace_cost", options, figures, ("pyzmq", "msgspec"))


if __name__ == "__main__":
    main()
