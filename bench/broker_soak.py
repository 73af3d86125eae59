"""100,000 groups through one broker: its memory all the way, and the latency of lease and complete under that load.

    python bench/broker_soak.py [--groups 100000] [--durability memory] [--large-every 50]

One node and one learner work as fast as both can. Every `--large-every`-th group is one of 8 samples x 8,192 tokens,
the others are small (8 x 264). The broker's store is in $TMPDIR: put that on a real disk.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import broker_groups
import harness
import numpy as np
import psutil
from broker_embedded import GROUPS_PER_STEP, Embedded
from broker_scale import quantiles
from broker_ways import Load, play

from broker.connect import Access, connect
from common.rollouts import GroupMeta, encode_group

SETTLED = 0.2  # part of the groups after which memory has to be flat


class Soak(Embedded):
    """The broker, whose memory is watched: `seen` has the groups that it has committed, and MiB."""

    ahead = 20 * GROUPS_PER_STEP

    def __init__(self, durability: str, large_every: int) -> None:
        super().__init__(durability)
        self._large_every = large_every
        self.seen: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, list[int]]]:
        ended = threading.Event()
        with super().serve(folder) as (address, pids):
            watch = threading.Thread(target=self._watch, args=(address, psutil.Process(pids[0]), ended))
            watch.start()
            try:
                yield address, pids
            finally:
                ended.set()
                watch.join()

    def _watch(self, address: str, broker: psutil.Process, ended: threading.Event) -> None:
        with connect(Access(address=address, role="observer")) as client:
            while not ended.wait(0.5):
                self.seen.append((client.status().groups_committed, broker.memory_info().rss / 2**20))

    def source(self, load: Load) -> Callable[[int], tuple[GroupMeta, bytes]]:
        (small, meta), (large, _) = (next(broker_groups.structs(size)) for size in ("tiny", "8k"))
        payloads = (encode_group(small), encode_group(large))
        return lambda serial: (meta, payloads[serial % self._large_every == 0])

    def use(self, payload: bytes) -> object:
        return len(payload)


def growth_bytes_per_group(seen: list[tuple[int, float]]) -> float:
    """Slope of a straight line through the second part of the samples."""
    settled = [x for x in seen if x[0] >= SETTLED * seen[-1][0]]
    slope, _ = np.polyfit([x[0] for x in settled], [x[1] for x in settled], 1)
    return float(slope) * 2**20


def measure(options: harness.Options) -> dict[str, object]:
    groups = options.groups // GROUPS_PER_STEP * GROUPS_PER_STEP
    way = Soak(options.durability, options.large_every)
    figures, times = play(way, Load("tiny", groups), options.limit)
    seen = way.seen
    settled = [round(mib, 1) for done, mib in seen if done >= SETTLED * groups]
    if len(settled) < 2:
        raise SystemExit(f"--groups {options.groups}: the broker was done before its memory was seen twice; take more")
    return {
        "groups": groups,
        "durability": options.durability,
        "large_every": options.large_every,
        "seconds": round(groups / figures["groups_per_s"], 1),
        "groups_per_s": round(figures["groups_per_s"]),
        "broker_mib": {"settled": settled[0], "highest": max(settled), "last": settled[-1]},
        "growth_bytes_per_group": round(growth_bytes_per_group(seen), 1),
        "lease_ms": quantiles(times.lease_s),
        "complete_ms": quantiles(times.complete_s),
    }


@harness.script(groups=100_000, large_every=50, durability="memory", limit=900.0)
def main(options: harness.Options) -> harness.Figures:
    return {"rounds": 1, **measure(options)}
