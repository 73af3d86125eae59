"""CPU that the broker takes for a group, beside raw ZeroMQ with the same bytes, and beside the ways of peers.

    python bench/broker_overhead.py [--size 1k 8k] [--rounds 5] [--scale 1.0]

From structs at the node to numpy arrays at the learner: microseconds of CPU per group over every process, and groups
per second. Raw ZeroMQ is the floor; it has no process in the middle, so it runs once more through ZeroMQ's own proxy.
All ways of a size run in turn, round after round, so that a slower machine slows all of them.
`--scale` multiplies the number of groups. The broker's store is in $TMPDIR: put that on a real disk.
"""

import itertools
import pickle
import time
from collections.abc import Iterator

import broker_groups
import harness
import msgspec
import redis
import zmq
from broker_embedded import GROUPS_PER_STEP, Embedded
from broker_groups import ListGroup, ListSample
from broker_ways import Load, RawZeroMQ, RelayedZeroMQ, Served, Way, compared, redis_server

GROUPS = {"1k": 4000, "8k": 800}
DURABILITIES = ("memory", "fsync", "everysec")
STREAM = "groups"
WINDOW = 64  # groups under way
DECODER = msgspec.msgpack.Decoder(ListGroup)


class RedisPickledLists(Way):
    """PipelineRL's way: a Redis stream (no AOF), one XADD and one XREAD a group, pickled lists."""

    name, fewer = "redis_pickled_lists", 10

    def serve(self, folder: str) -> Served:
        return redis_server(folder)

    def produce(self, address: str, load: Load) -> Iterator[None]:
        groups = itertools.islice(broker_groups.lists(load.size), load.groups)
        with redis.Redis.from_url(address) as client:
            yield
            for index, group in enumerate(groups):
                data = pickle.dumps({"serial": index, "samples": [msgspec.structs.asdict(s) for s in group.samples]})
                client.xadd(STREAM, {"index": index, "data": data}, maxlen=1_000_000, approximate=True)
                if index % WINDOW == 0:  # else the stream grows without bound: nothing in this way limits it
                    while client.xlen(STREAM) > WINDOW:
                        time.sleep(0.001)

    def consume(self, address: str, load: Load) -> Iterator[None]:
        with redis.Redis.from_url(address) as client:
            yield
            last = "0"
            for _ in range(load.groups):
                entries = None
                while not entries:
                    entries = client.xread({STREAM: last}, count=1, block=100)
                found = entries[STREAM.encode()][0] if isinstance(entries, dict) else entries[0][1]
                last, fields = found[0]
                group = pickle.loads(fields[b"data"])  # noqa: S301 - the measured way; the data is this script's own
                broker_groups.arrays_of_lists([ListSample(**s) for s in group["samples"]])
                client.xdel(STREAM, last)


class MsgspecListsZeroMQ(RawZeroMQ):
    """prime-rl's way: msgspec structs with lists of numbers, PUSH to PULL over tcp."""

    name, fewer = "msgspec_lists_zeromq", 10

    def messages(self, size: str) -> Iterator[bytes]:
        return map(msgspec.msgpack.Encoder().encode, broker_groups.lists(size))

    def use(self, message: zmq.Frame) -> None:
        broker_groups.arrays_of_lists(DECODER.decode(message.buffer).samples)


def scaled(size: str, scale: float) -> Load:
    """Whole steps."""
    return Load(size, int(GROUPS[size] * scale) // GROUPS_PER_STEP * GROUPS_PER_STEP)


@harness.script(size=list(GROUPS), rounds=5, scale=1.0)
def main(options: harness.Options) -> harness.Figures:
    ways: list[Way] = [
        RawZeroMQ(),
        RelayedZeroMQ(),
        *map(Embedded, DURABILITIES),
        RedisPickledLists(),
        MsgspecListsZeroMQ(),
    ]
    sizes = {size: compared(ways, options.rounds, scaled(size, options.scale)) for size in options.size}
    return {"rounds": options.rounds, "sizes": sizes}
