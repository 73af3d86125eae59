"""Peers' ways to carry groups, reduced to what carries them, as ways of bench/broker_ways.py.

Both start from lists of numbers, as their samplers have them, and end with the same numpy arrays as ours.
"""

import contextlib
import pickle
import time
from collections.abc import Iterator, Sequence

import broker_groups
import msgspec
import zmq
from broker_groups import ListGroup, ListSample
from broker_ways import Load, free_port, redis_server

STREAM = "groups"
WINDOW = 64  # groups under way


class RedisPickledLists:
    """PipelineRL's way: a Redis stream (no AOF), one XADD and one XREAD a group, pickled lists."""

    name = "redis_pickled_lists"

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        with redis_server(folder, "--appendonly", "no") as (address, pid):
            yield address, [pid]

    def produce(self, address: str, load: Load) -> Iterator[None]:
        import redis

        source = broker_groups.lists(load.size)
        next(source)
        with redis.Redis.from_url(address) as client:
            yield
            for index in range(load.groups):
                group = next(source)
                data = pickle.dumps({"serial": index, "samples": [msgspec.structs.asdict(s) for s in group.samples]})
                client.xadd(STREAM, {"index": index, "data": data}, maxlen=1_000_000, approximate=True)
                if index % WINDOW == 0:  # else the stream grows without bound: nothing in this way limits it
                    while client.xlen(STREAM) > WINDOW:
                        time.sleep(0.001)

    def consume(self, address: str, load: Load) -> Iterator[None]:
        import redis

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


class MsgspecListsZeroMQ:
    """prime-rl's way: msgspec structs with lists of numbers, PUSH to PULL over tcp."""

    name = "msgspec_lists_zeromq"

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        yield f"tcp://127.0.0.1:{free_port()}", []

    def produce(self, address: str, load: Load) -> Iterator[None]:
        source, encoder = broker_groups.lists(load.size), msgspec.msgpack.Encoder()
        next(source)
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.connect(address)
            yield
            for _ in range(load.groups):
                pusher.send(encoder.encode(next(source)), copy=False)

    def consume(self, address: str, load: Load) -> Iterator[None]:
        decoder = msgspec.msgpack.Decoder(ListGroup)
        with zmq.Context() as context, context.socket(zmq.PULL) as puller:
            puller.bind(address)
            yield
            for _ in range(load.groups):
                group = decoder.decode(puller.recv(copy=False).buffer)
                broker_groups.arrays_of_lists(group.samples)
