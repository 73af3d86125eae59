"""A broker whose window is larger than its memory: groups a second, latencies, memory; and what a snapshot costs.

    python bench/broker_window.py [--window 1024] [--memory-mib 128] [--steps 24] [--train 0.5]

One node of bench/broker_scale.py hands in groups of 8 samples x 8,448 tokens as fast as it can. First it fills the
window. Then the learner takes steps, trains each for `--train` seconds, and commits. The broker's store is in $TMPDIR.

- memory: the broker's memory has room for the whole window.
- store: it has room for `--memory-mib`, and the store has the rest.
- wait: `broker.max_bytes` is that much, so the node waits.

A snapshot is made of so many leased tasks (`--tasks`). *Loop* is the broker's loop, *thread* the one that writes.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import broker_groups
import harness
import psutil
from broker_embedded import PROBLEM, Learner, broker_process
from broker_scale import Plan, quantiles, start_fleets, tell

from broker.client.connect import Access, connect
from broker.contract import NodeReport, RunInfo
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.journal.journal import SEGMENT_BYTES
from broker.journal.records import PendingSnapshot
from common.rollouts import Task, encode_group

LEASES = 32
MIB = 1 << 20


@contextmanager
def peak_mib(process: psutil.Process) -> Iterator[list[float]]:
    """The most resident memory while this is open, from the kernel."""
    found: list[float] = []
    yield found
    with open(f"/proc/{process.pid}/status") as status:
        found += [int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")]


def measure(way: str, options: harness.Options) -> dict[str, object]:
    window, step, memory = options.window, options.groups_per_step, options.memory_mib * MIB
    group, _ = next(broker_groups.structs("8k"))
    size = len(encode_group(group))
    bounds = {
        "memory": {"memory_bytes": 2 * window * size},
        "store": {"memory_bytes": memory},
        "wait": {"memory_bytes": memory, "max_bytes": memory, "max_message_bytes": memory},
    }[way]
    with (
        tempfile.TemporaryDirectory() as folder,
        broker_process(folder, "fsync", step, **bounds) as (address, pids),
    ):
        broker = psutil.Process(pids[0])
        with peak_mib(broker) as peak, connect(Access(address=address, role="learner")) as client:
            (node,) = start_fleets(Plan(address, 1, LEASES, 0.0, "8k"))
            learner, began = Learner(client, step), time.perf_counter()
            tell([node], "measure")
            try:
                learner.offer(window)
                ready = -1
                while (found := client.status()).groups_ready < window and (found.groups_ready != ready or not ready):
                    ready = found.groups_ready
                    time.sleep(0.5)
                fill_s, ready = time.perf_counter() - began, client.status().groups_ready
                takes, cpu_s, began = list[float](), harness.cpu_s(broker), time.perf_counter()
                for _ in range(options.steps):
                    asked = time.perf_counter()
                    while not learner.take(10, len):
                        pass
                    takes.append(time.perf_counter() - asked)
                    learner.offer(step)
                    time.sleep(options.train)
                seconds, cpu_s = time.perf_counter() - began, harness.cpu_s(broker) - cpu_s
            finally:
                tell([node], "stop")
            times = harness.received(node)
    groups = options.steps * step
    return {
        "way": way,
        "window_mib": round(window * size / MIB),
        "filled_groups": ready,
        "fill_mib_per_s": round(ready * size / MIB / fill_s, 1),
        "groups_per_s": round(groups / seconds, 1),
        "mib_per_s": round(groups * size / MIB / seconds, 1),
        "take_ms": quantiles(takes),
        "lease_ms": quantiles(times.lease_s),
        "complete_ms": quantiles(times.complete_s),
        "broker_cpu_us_per_group": round(1e6 * cpu_s / groups, 1),
        "broker_peak_mib": round(peak[0], 1),
    }


def snapshot(tasks: int) -> dict[str, float]:
    """Milliseconds for a snapshot of leased tasks."""
    numbers = itertools.count()
    state = DeliveryState(RunInfo("r", "", 1, 0, 3, 60.0, 1), lambda: 0.0, lambda: f"{next(numbers):016x}")
    LearnerRules(state).offer([Task(serial, PROBLEM, serial, broker_groups.SAMPLES) for serial in range(tasks)])
    NodeRules(state).register(NodeReport("n0", 1, "host", "generating", 1 << 20))
    NodeRules(state).lease("n0", 1 << 20, tasks)
    made, loop_s = harness.timed(lambda: PendingSnapshot(state, 1))
    body, thread_s = harness.timed(lambda: made.snapshot(0))
    return {
        "tasks": tasks,
        "loop_ms": round(1e3 * loop_s, 2),
        "thread_ms": round(1e3 * thread_s, 2),
        "mib": round(len(body) / MIB, 2),
        "us_per_task": round(1e6 * (loop_s + thread_s) / tasks, 2),
        # At 1 GB/s, if bytes closed a segment; and if records do, three a group.
        "cores_by_bytes": round(1e9 / SEGMENT_BYTES * (loop_s + thread_s), 3),
        "us_per_group_by_records": round(3 * 1e6 * (loop_s + thread_s) / tasks, 2),
    }


@harness.script(
    window=1024, memory_mib=128, groups_per_step=64, steps=24, train=0.5, tasks=[1000, 10_000, 100_000],
    ways=["memory", "store", "wait"],
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    return {
        "rounds": 1,
        "snapshots": [snapshot(tasks) for tasks in options.tasks],
        "runs": [measure(way, options) for way in options.ways],
    }
