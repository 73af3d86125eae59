"""What the broker costs a group, beside raw ZeroMQ with the same bytes (the floor) and beside the ways of peers.

    python bench/broker_overhead.py [--durability memory fsync everysec] [--size 1k 8k] [--rounds 5] [--only NAME ...]

From structs at the node to numpy arrays at the learner: microseconds of CPU per group over every process, and groups
per second. All ways of a size run in turn, round after round, so a ratio holds when the machine's speed drifts.
Writes bench/results/broker_overhead.json.
"""

import statistics

import harness
from broker_embedded import GROUPS_PER_STEP, Embedded
from broker_peers import MsgspecListsZeroMQ, RedisPickledLists
from broker_ways import Load, RawZeroMQ, Way, measure

GROUPS = {"1k": 4000, "8k": 800}
DURABILITIES = ("memory", "fsync", "everysec")
PEERS_FEWER = 10  # slow ways move fewer groups
FLOOR = RawZeroMQ.name


def measure_size(ways: list[Way], load: Load, rounds: int, scratch: str | None) -> dict[str, dict[str, object]]:
    """Per way: the median of every figure, and the CPU of each round."""
    named = {way.name: way for way in ways}

    def one(name: str) -> dict[str, float]:
        peer = isinstance(named[name], RedisPickledLists | MsgspecListsZeroMQ)
        return measure(named[name], load._replace(groups=load.groups // PEERS_FEWER) if peer else load, scratch)

    runs = harness.in_turns(list(named), rounds, one)
    return {name: summary(of_way, runs.get(FLOOR)) for name, of_way in runs.items()}


def summary(runs: list[dict[str, float]], floor: list[dict[str, float]] | None) -> dict[str, object]:
    """Medians over the rounds; the ratio to the floor is the median of the rounds' ratios."""
    result: dict[str, object] = {name: round(statistics.median(r[name] for r in runs), 1) for name in runs[0]}
    if floor is not None:
        pairs = zip(runs, floor, strict=True)
        ratio = statistics.median(r["cpu_us_per_group"] / f["cpu_us_per_group"] for r, f in pairs)
        result["times_raw_zeromq"] = round(ratio, 2)
    result["rounds_us"] = [round(r["cpu_us_per_group"], 1) for r in runs]
    return result


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--durability", nargs="+", choices=DURABILITIES, default=list(DURABILITIES))
    parser.add_argument("--size", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of groups")
    parser.add_argument("--scratch", help="folder for the broker's store; put it on a real disk")
    embedded = {durability: Embedded(durability) for durability in DURABILITIES}
    floor, peers = RawZeroMQ(), [RedisPickledLists(), MsgspecListsZeroMQ()]
    named: dict[str, Way] = {way.name: way for way in (floor, *embedded.values(), *peers)}
    parser.add_argument("--only", nargs="+", choices=tuple(named), help="the ways to run; implies --dry")
    options = parser.parse_args()
    ways: list[Way] = [floor, *(embedded[d] for d in options.durability), *peers]
    if options.only:
        ways, options.dry = [named[name] for name in options.only], True
    sizes: dict[str, object] = {}
    for size in options.size:
        groups = int(GROUPS[size] * options.scale) // GROUPS_PER_STEP * GROUPS_PER_STEP
        sizes[size] = {
            "groups": groups,
            "ways": measure_size(ways, Load(size, groups), options.rounds, options.scratch),
        }
    harness.save(
        "broker_overhead", options, {"rounds": options.rounds, "sizes": sizes}, ("pyzmq", "msgspec", "redis", "numpy")
    )


if __name__ == "__main__":
    main()
