"""CPU that the broker takes for a group, beside raw ZeroMQ with the same bytes (the floor) and the ways of peers.

    python bench/broker_overhead.py [--size 1k 8k] [--rounds 5] [--scale 1.0]

From structs at the node to numpy arrays at the learner: microseconds of CPU per group over every process, and groups
per second. All ways of a size run in turn, round after round, so that a slower machine slows all of them.
`--scale` multiplies the number of groups. The broker's store is in $TMPDIR: put that on a real disk. Writes
bench/results/broker_overhead.json.
"""

import harness
from broker_embedded import GROUPS_PER_STEP, Embedded
from broker_peers import MsgspecListsZeroMQ, RedisPickledLists
from broker_ways import Load, RawZeroMQ, Way, compared

GROUPS = {"1k": 4000, "8k": 800}
DURABILITIES = ("memory", "fsync", "everysec")


@harness.script(size=list(GROUPS), rounds=5, scale=1.0)
def main(options: harness.Options) -> harness.Figures:
    ways: list[Way] = [RawZeroMQ(), *map(Embedded, DURABILITIES), RedisPickledLists(), MsgspecListsZeroMQ()]
    sizes: dict[str, object] = {}
    for size in options.size:
        load = Load(size, int(GROUPS[size] * options.scale) // GROUPS_PER_STEP * GROUPS_PER_STEP)
        measured = compared(ways, options.rounds, load)
        sizes[size] = {"groups": load.groups, "ways": measured}
    return {"rounds": options.rounds, "sizes": sizes}
