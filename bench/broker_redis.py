"""CPU that broker.store: redis takes for a group, beside raw streams with the same bytes.

    python bench/broker_redis.py [--appendfsync everysec no always] [--size 1k 8k] [--rounds 5]

Every way moves the same pre-encoded bytes through the same kind of server, from one producer to one consumer:

    raw_streams    XADD of 16 in a pipeline, XREADGROUP of 16, XACK and XDEL in a pipeline (the floor)
    slipstream     leases, heartbeats, groups, takes and commits of the delivery contract; broker and Redis together

All ways run in turn, round after round. Microseconds of CPU per group over every process. The server's
AOF is in $TMPDIR: put that on a real disk.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import harness
from broker_embedded import META, Embedded, broker_process
from broker_overhead import GROUPS, scaled
from broker_ways import Load, Served, Way, compared, encoded, redis_server
from redis import Redis

from common.rollouts import GroupMeta
from tests.rigs.redis_servers import server_binary

BATCH = 16
WINDOW = 64  # groups that a producer is ahead


def private_server(folder: str, appendfsync: str) -> Served:
    """A server for one round; `appendfsync` no means no AOF at all."""
    aof = "no" if appendfsync == "no" else "yes"
    return redis_server(folder, appendonly=aof, appendfsync=appendfsync, auto_aof_rewrite_percentage="0")


class RawStreams(Way):
    """Nothing but a stream and a consumer group, in pipelines of redis-py."""

    name = "raw_streams"

    def __init__(self, appendfsync: str) -> None:
        self._appendfsync = appendfsync

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, list[int]]]:
        with private_server(folder, self._appendfsync) as (address, pids):
            with Redis.from_url(address) as client:
                client.xgroup_create("groups", "g", id="0", mkstream=True)
            yield address, pids

    def produce(self, address: str, load: Load) -> Iterator[None]:
        payloads, ahead = encoded(load.size), 0
        with Redis.from_url(address) as client:
            yield
            for start in range(0, load.groups, BATCH):
                while ahead >= WINDOW:
                    client.blpop("room", 1)
                    ahead -= BATCH
                with client.pipeline(transaction=False) as pipeline:
                    for i in range(start, start + BATCH):
                        pipeline.xadd("groups", {"i": i, "d": payloads[i % len(payloads)]})
                    pipeline.execute()
                ahead += BATCH

    def consume(self, address: str, load: Load) -> Iterator[None]:
        with Redis.from_url(address) as client:
            yield
            done = 0
            while done < load.groups:
                found = client.xreadgroup("g", "c", {"groups": ">"}, count=BATCH, block=1000)
                if not found:
                    continue
                entries = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
                names = [name for name, _ in entries]
                with client.pipeline(transaction=False) as pipeline:
                    pipeline.xack("groups", "g", *names)
                    pipeline.xdel("groups", *names)
                    if (done + len(names)) // BATCH > done // BATCH:
                        pipeline.rpush("room", 1)
                    pipeline.execute()
                done += len(names)


class Slipstream(Embedded):
    """A broker with broker.store: redis."""

    def __init__(self, appendfsync: str) -> None:
        super().__init__("fsync" if appendfsync == "always" else "everysec", "slipstream")
        self._appendfsync = appendfsync

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, list[int]]]:
        with (
            private_server(folder, self._appendfsync) as (redis, redis_pids),
            broker_process(f"{folder}/run", self._durability, redis=redis) as (address, pids),
        ):
            yield address, [*redis_pids, *pids]

    def source(self, load: Load) -> Callable[[int], tuple[GroupMeta, bytes]]:
        payloads = itertools.cycle(encoded(load.size))
        return lambda serial: (META, next(payloads))

    def use(self, payload: bytes) -> object:
        return len(payload)


@harness.script(size=list(GROUPS), rounds=5, scale=1.0, appendfsync=["everysec"])
def main(options: harness.Options) -> harness.Figures:
    results = {
        f"{size}_{fsync}": compared([RawStreams(fsync), Slipstream(fsync)], options.rounds, scaled(size, options.scale))
        for size in options.size
        for fsync in options.appendfsync
    }
    version = harness.command(server_binary(), "--version").strip()
    return {"rounds": options.rounds, "server": version, "results": results}
