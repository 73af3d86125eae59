"""CPU that broker.store: redis takes for a group, beside raw streams with the same bytes and the former backend.

    python bench/broker_redis.py [--appendfsync everysec no always] [--size 1k 8k] [--rounds 5] [--scratch DIR]
                                 [--former DIR]

Every way moves the same pre-encoded bytes through the same kind of server, from one producer to one consumer:

    raw_streams    XADD of 16 in a pipeline, XREADGROUP of 16, XACK and XDEL in a pipeline (the floor)
    slipstream     leases, heartbeats, groups, takes and commits of the delivery contract; broker and Redis together
    former         the backend of commit 8088f31, where clients talked to Redis; DIR is a checkout of that commit

All ways run in turn, round after round. Microseconds of CPU per group over every process. Writes
bench/results/broker_redis.json; with --only nothing is written.
"""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import harness
from broker_embedded import GROUPS_PER_STEP, Embedded, broker_process, wait_for_address
from broker_overhead import GROUPS
from broker_ways import PATIENCE_S, Load, Way, compared, encoded, measure, redis_program, redis_server
from redis import Redis

from common.rollouts import GroupMeta

BATCH = 16
WINDOW = 64  # groups that a producer is ahead
META = GroupMeta(0, 0, 0.5, 8192, 0, 1.0)


@contextlib.contextmanager
def private_server(folder: str, appendfsync: str) -> Iterator[tuple[str, int]]:
    """A server for one round; `appendfsync` no means no AOF at all."""
    aof = "no" if appendfsync == "no" else "yes"
    words = ["--appendonly", aof, "--appendfsync", appendfsync, "--auto-aof-rewrite-percentage", "0"]
    with redis_server(folder, *words, "--maxmemory-policy", "noeviction") as found:
        yield found


class RawStreams:
    """Nothing but a stream and a consumer group, in pipelines of redis-py."""

    name = "raw_streams"

    def __init__(self, appendfsync: str) -> None:
        self._appendfsync = appendfsync

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        with private_server(folder, self._appendfsync) as (address, pid):
            with Redis.from_url(address) as client:
                client.xgroup_create("groups", "g", id="0", mkstream=True)
            yield address, [pid]

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
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        run = Path(folder) / "run"
        with (
            private_server(folder, self._appendfsync) as (address, redis_pid),
            broker_process(str(run), self._durability, redis=address) as pid,
        ):
            yield wait_for_address(run), [redis_pid, pid]

    def source(self, load: Load) -> Callable[[int], tuple[GroupMeta, bytes]]:
        payloads = itertools.cycle(encoded(load.size))
        return lambda serial: (META, next(payloads))

    def use(self, payload: bytes) -> object:
        return len(payload)


class Former:
    """The backend of an earlier commit, measured by that commit's own script."""

    name = "former"

    def __init__(self, checkout: str, appendfsync: str) -> None:
        self._checkout, self._appendfsync = Path(checkout).resolve(), appendfsync

    def measure(self, load: Load, scratch: str | None) -> dict[str, float]:
        scale = load.groups / GROUPS[load.size]
        command = [
            *(sys.executable, "bench/broker_redis.py", "--only", "slipstream", "--rounds", "1", "--size", load.size),
            *("--appendfsync", self._appendfsync, "--scale", str(scale), *(["--scratch", scratch] if scratch else [])),
        ]
        environment = {**os.environ, "PYTHONPATH": str(self._checkout)}
        output = subprocess.check_output(command, cwd=self._checkout, env=environment, timeout=3 * PATIENCE_S)
        figures = harness.last_json(output.decode())
        return {key: value for key, value in figures.items() if isinstance(value, float)}


def main() -> None:
    parser = harness.parser(__doc__, size=list(GROUPS), rounds=5, scale=1.0)
    parser.add_argument("--appendfsync", nargs="+", choices=("no", "everysec", "always"), default=["everysec"])
    parser.add_argument("--scratch", help="folder for the server's AOF; put it on a real disk")
    parser.add_argument("--former", help="checkout of commit 8088f31, to compare with its Redis backend")
    parser.add_argument("--only", nargs="+", help="names of the ways to run; nothing is written")
    options = parser.parse_args()
    results: dict[str, object] = {}
    for size in options.size:
        load = Load(size, int(GROUPS[size] * options.scale) // GROUPS_PER_STEP * GROUPS_PER_STEP)
        for fsync in options.appendfsync:
            ways: dict[str, Way | Former] = {way.name: way for way in (RawStreams(fsync), Slipstream(fsync))}
            if options.former:
                ways["former"] = Former(options.former, fsync)

            def one(name: str, ways: dict[str, Way | Former] = ways, load: Load = load) -> dict[str, float]:
                way = ways[name]
                scratch = options.scratch
                return way.measure(load, scratch) if isinstance(way, Former) else measure(way, load, scratch)

            chosen = [name for name in ways if not options.only or name in options.only]
            measured = compared(chosen, options.rounds, one)
            results[f"{size}_{fsync}"] = {"groups": load.groups, "ways": measured}
    if options.only:
        return
    if options.former:
        revision = ["git", "-C", options.former, "rev-parse", "--short", "HEAD"]
        options.former = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    packages = ("redis", "msgspec", "numpy")
    version = subprocess.run([redis_program(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    harness.save("broker_redis", options, {"rounds": options.rounds, "server": version, "results": results}, packages)


if __name__ == "__main__":
    main()
