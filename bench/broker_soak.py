"""100,000 groups through one broker: its memory all the way, and the latency of lease and complete under that load.

    python bench/broker_soak.py [--groups 100000] [--durability memory] [--large-every 50]

One node of bench/broker_scale.py and one learner work as fast as both can. Every `--large-every`-th group is one of
8 samples x 8,448 tokens, the others are small (8 x 264). The broker's store is in $TMPDIR: put that on a real disk.
"""

import tempfile
import time

import harness
import numpy as np
import psutil
from broker_embedded import GROUPS_PER_STEP, LEASES_AT_ONCE, Learner, broker_process
from broker_scale import Plan, quantiles, start_fleets, tell

from broker.client.connect import Access, connect

SETTLED = 0.2  # part of the groups after which memory has to be flat
AHEAD = 4 * GROUPS_PER_STEP  # tasks offered beyond the step that is taken


@harness.script(groups=100_000, large_every=50, durability="memory")
def main(options: harness.Options) -> harness.Figures:
    done = np.arange(0, options.groups, GROUPS_PER_STEP) + GROUPS_PER_STEP  # groups after each step
    mib = list[float]()
    with tempfile.TemporaryDirectory() as folder, broker_process(folder, options.durability) as (address, pids):
        broker = psutil.Process(pids[0])
        (node,) = start_fleets(Plan(address, 1, LEASES_AT_ONCE, 0.0, "tiny", options.large_every))
        tell([node], "measure")
        with connect(Access(address=address, role="learner")) as client:
            learner, began = Learner(client, GROUPS_PER_STEP), time.perf_counter()
            try:
                for groups in done.tolist():
                    learner.offer(groups + AHEAD - learner.offered)
                    while not learner.take(10, len):
                        pass
                    mib.append(broker.memory_info().rss / 2**20)
                seconds = time.perf_counter() - began
            finally:
                tell([node], "stop")
        times = harness.received(node)
    settled = int(SETTLED * len(done))
    slope, _ = np.polyfit(done[settled:], mib[settled:], 1)  # a straight line through the second part
    return {
        "rounds": 1,
        "groups": int(done[-1]),
        "durability": options.durability,
        "seconds": round(seconds, 1),
        "broker_mib": {"settled": round(mib[settled], 1), "last": round(mib[-1], 1)},
        "growth_bytes_per_group": round(float(slope) * 2**20, 1),
        "lease_ms": quantiles(times.lease_s),
        "complete_ms": quantiles(times.complete_s),
    }
