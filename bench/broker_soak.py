"""100,000 groups through one broker: its memory all the way, and the latency of lease and complete under that load.

    python bench/broker_soak.py [--groups 100000] [--durability memory] [--large-every 50]

One node keeps 32 groups under way and a learner takes and commits as fast as both can; every `--large-every`-th group
is one of 8 samples x 8,192 tokens, the others are small (8 x 264). Writes bench/results/broker_soak.json.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import broker_groups
import harness
import psutil
from broker_embedded import GROUPS_PER_STEP, broker_process, run_learner, run_node, wait_for_address
from broker_scale import quantiles

from broker.connect import Access, connect
from broker.contract import LearnerReport
from common.rollouts import GroupMeta, encode_group

SAMPLES_OF_MEMORY = 50
OFFERED_AHEAD = 20 * GROUPS_PER_STEP
SETTLED = 0.2  # part of the groups after which memory has to be flat


def node(address: str, groups: int, large_every: int, published: "Synchronized[int]", pipe: Connection) -> None:
    """Hand in `groups` groups; sends the seconds of every lease and every complete."""
    (small, meta), (large, _) = (next(broker_groups.structs(size)) for size in ("tiny", "8k"))
    payloads = (encode_group(small), encode_group(large))

    def made(serial: int) -> tuple[GroupMeta, bytes]:
        return meta, payloads[serial % large_every == 0]

    pipe.send(asyncio.run(run_node(address, groups, published, made)))


def learner(address: str, groups: int, published: "Synchronized[int]", pipe: Connection) -> None:
    """Take and commit all, then say so."""
    with connect(Access(address=address, role="learner")) as client:
        client.attach(LearnerReport(os.getpid(), 0, "training", 0))
        run_learner(client, groups, published, OFFERED_AHEAD, len)
    pipe.send("done")


class MemoryWatch(threading.Thread):
    """Resident memory of the broker against the groups that it has committed, about once a second."""

    def __init__(self, pid: int, address: str) -> None:
        super().__init__(daemon=True)
        self._process, self._address = psutil.Process(pid), address
        self._ended = threading.Event()
        self.seen: list[tuple[int, float]] = []  # groups, MiB

    def run(self) -> None:
        with connect(Access(address=self._address, role="observer")) as client:
            while not self._ended.wait(0.5):
                committed = client.status().groups_committed
                self.seen.append((committed, self._process.memory_info().rss / 2**20))

    def end(self) -> None:
        self._ended.set()
        self.join(30)


def growth_bytes_per_group(seen: list[tuple[int, float]]) -> float:
    """Slope of a straight line through the second part of the samples."""
    import numpy as np

    settled = [x for x in seen if x[0] >= SETTLED * seen[-1][0]]
    slope, _ = np.polyfit([x[0] for x in settled], [x[1] for x in settled], 1)
    return float(slope) * 2**20


def measure(options: argparse.Namespace) -> dict[str, object]:
    groups = options.groups // GROUPS_PER_STEP * GROUPS_PER_STEP
    context = multiprocessing.get_context("spawn")
    published = context.Value("q", 0)  # the learner's version, as the node has it
    node_pipe, node_end = context.Pipe()
    learner_pipe, learner_end = context.Pipe()
    with (
        tempfile.TemporaryDirectory(dir=options.scratch) as folder,
        broker_process(folder, options.durability) as pid,
    ):
        address = wait_for_address(Path(folder))
        watch = MemoryWatch(pid, address)
        players = [
            context.Process(target=learner, args=(address, groups, published, learner_end)),
            context.Process(target=node, args=(address, groups, options.large_every, published, node_end)),
        ]
        started = time.perf_counter()
        for player in players:
            player.start()
        watch.start()
        assert node_pipe.poll(options.limit), f"not done after {options.limit} s"
        lease_s, complete_s = node_pipe.recv()
        assert learner_pipe.poll(60)
        wall_s = time.perf_counter() - started
        watch.end()
        for player in players:
            player.join(60)
    seen = watch.seen
    every = max(1, len(seen) // SAMPLES_OF_MEMORY)
    settled = [round(mib, 1) for done, mib in seen if done >= SETTLED * groups]
    return {
        "groups": groups,
        "durability": options.durability,
        "large_every": options.large_every,
        "seconds": round(wall_s, 1),
        "groups_per_s": round(groups / wall_s),
        "broker_mib": {
            "settled": round(settled[0], 1),
            "highest": round(max(settled), 1),
            "last": round(settled[-1], 1),
        },
        "growth_bytes_per_group": round(growth_bytes_per_group(seen), 1),
        "lease_ms": quantiles(sorted(1e3 * s for s in lease_s)),
        "complete_ms": quantiles(sorted(1e3 * s for s in complete_s)),
        "memory": [{"groups": done, "mib": round(mib, 1)} for done, mib in seen[::every]],
    }


def main() -> None:
    parser = harness.parser(__doc__, groups=100_000, large_every=50, durability="memory", limit=900.0)
    parser.add_argument("--scratch", help="folder for the broker's store; put it on a real disk")
    options = parser.parse_args()
    harness.save("broker_soak", options, {"rounds": 1, **measure(options)}, ("pyzmq", "msgspec"))


if __name__ == "__main__":
    main()
