"""CPU that the broker takes for a group, beside raw ZeroMQ with the same bytes (the floor) and the ways of peers.

    python bench/broker_overhead.py [--size 1k 8k] [--rounds 5] [--scale 1.0] [--only WAY ...]

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


def main() -> None:
    ways: list[Way] = [RawZeroMQ(), *map(Embedded, DURABILITIES), RedisPickledLists(), MsgspecListsZeroMQ()]
    parser = harness.parser(__doc__, size=list(GROUPS), rounds=5, scale=1.0)
    names = [way.name for way in ways]
    parser.add_argument("--only", nargs="+", choices=names, help="the ways to run; implies --dry")
    options = parser.parse_args()
    if options.only:
        ways, options.dry = [way for way in ways if way.name in options.only], True
    sizes: dict[str, object] = {}
    for size in options.size:
        load = Load(size, int(GROUPS[size] * options.scale) // GROUPS_PER_STEP * GROUPS_PER_STEP)
        measured = compared(ways, options.rounds, load)
        sizes[size] = {"groups": load.groups, "ways": measured}
    packages = ("pyzmq", "msgspec", "redis", "numpy")
    harness.save("broker_overhead", options, {"rounds": options.rounds, "sizes": sizes}, packages)


if __name__ == "__main__":
    main()
