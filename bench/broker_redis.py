"""What broker.store: redis costs a group, beside pipelined raw streams with the same bytes and the former backend.

    python bench/broker_redis.py [--appendfsync everysec no always] [--size 1k 8k] [--rounds 5] [--scratch DIR]
                                 [--former DIR]

Every way moves the same pre-encoded bytes through the same kind of server, from one producer to one consumer:

    raw_streams    XADD of 16 in a pipeline, XREADGROUP of 16, XACK and XDEL in a pipeline (the floor)
    slipstream     leases, heartbeats, groups, takes and commits of the delivery contract; broker and Redis together
    former         the backend of commit 8088f31, where clients talked to Redis; DIR is a checkout of that commit

All ways run in turn, round after round. Microseconds of CPU per group over every process. Writes
bench/results/broker_redis.json; with --only nothing is written.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import broker_groups
import harness
import msgspec
from broker_embedded import (
    GROUPS_PER_STEP,
    HEARTBEAT_S,
    LEASES_AT_ONCE,
    NEW_WEIGHTS_S,
    PROBLEM,
    broker_process,
    wait_for_address,
)
from broker_peers import wait_for_redis
from broker_ways import PATIENCE_S, Load, Way, free_port, measure

from broker.connect import Access, connect, connect_node
from broker.contract import LearnerReport, Lease, NodeReport
from common.rollouts import GroupMeta, Task, encode_group

GROUPS = {"1k": 4000, "8k": 800}
BATCH = 16
WINDOW = 64  # groups that a producer is ahead


class OnRedis:
    """A private server; `appendfsync` no means no AOF at all."""

    name = ""

    def __init__(self, appendfsync: str) -> None:
        self._appendfsync = appendfsync

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        port = free_port()
        command = [server_program(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        aof = "no" if self._appendfsync == "no" else "yes"
        command += ["--appendonly", aof, "--appendfsync", self._appendfsync, "--auto-aof-rewrite-percentage", "0"]
        process = subprocess.Popen([*command, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL)
        try:
            address = f"redis://127.0.0.1:{port}/0"
            wait_for_redis(address)
            self.prepare(address)
            yield address, [process.pid]
        finally:
            process.kill()
            process.wait(PATIENCE_S)

    def prepare(self, address: str) -> None:
        """Before the processes start."""


class RawStreams(OnRedis):
    """Nothing but a stream and a consumer group, in pipelines of redis-py."""

    name = "raw_streams"

    def prepare(self, address: str) -> None:
        with plain(address) as client:
            client.xgroup_create("groups", "g", id="0", mkstream=True)

    def produce(self, address: str, load: Load) -> Iterator[None]:
        payloads, ahead = encoded(load.size), 0
        with plain(address) as client:
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
        with plain(address) as client:
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


class Slipstream(OnRedis):
    """A broker with broker.store: redis, one node and one learner."""

    name = "slipstream"

    def __init__(self, appendfsync: str) -> None:
        super().__init__(appendfsync)
        self._published = multiprocessing.get_context("spawn").Value("q", 0)  # the learner's version, as nodes have it

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        durability = "fsync" if self._appendfsync == "always" else "everysec"
        with super().serve(folder) as (address, pids):
            run = Path(folder) / "run"
            with broker_process(str(run), durability, redis=address) as pid:
                yield wait_for_address(run), [*pids, pid]

    def produce(self, address: str, load: Load) -> Iterator[None]:
        payloads = encoded(load.size)
        yield
        asyncio.run(node(address, load, payloads, self._published))

    def consume(self, address: str, load: Load) -> Iterator[None]:
        steps = load.groups // GROUPS_PER_STEP
        self._published.value = 0
        with connect(Access(address=address, role="learner")) as client:
            client.attach(LearnerReport(os.getpid(), 0, "training", 0))
            yield
            client.offer([Task(i, PROBLEM, i, broker_groups.SAMPLES) for i in range(steps * GROUPS_PER_STEP)])
            for step in range(steps):
                while client.take(step, GROUPS_PER_STEP, 10) is None:
                    pass
                client.commit(step)
                self._published.value = step + 1


async def node(address: str, load: Load, payloads: list[bytes], published: "Synchronized[int]") -> None:
    """Lease, hand in, beat."""
    report = NodeReport("n0", os.getpid(), "host", "generating", 0)
    meta = GroupMeta(0, 0, 0.5, 8192, 0, 1.0)
    async with connect_node(Access(address=address, role="node")) as client:

        async def hand_in(lease: Lease) -> None:
            assert await client.complete("n0", lease.token, meta, payloads[lease.task.serial % len(payloads)])

        async def beat() -> None:
            while True:
                await client.heartbeat(msgspec.structs.replace(report, policy_version=published.value), [])
                await asyncio.sleep(HEARTBEAT_S)

        await client.register(report)
        beating = asyncio.create_task(beat())
        done = 0
        while done < load.groups:
            leases = await client.lease("n0", published.value, LEASES_AT_ONCE, NEW_WEIGHTS_S)
            await asyncio.gather(*(hand_in(lease) for lease in leases))
            done += len(leases)
        beating.cancel()


class Former:
    """The backend of an earlier commit, measured by that commit's own script."""

    name = "former"

    def __init__(self, checkout: str, appendfsync: str) -> None:
        self._checkout, self._appendfsync = Path(checkout).resolve(), appendfsync

    def measure(self, load: Load, scratch: str | None) -> dict[str, float]:
        command = [sys.executable, "bench/broker_redis.py", "--only", "slipstream", "--rounds", "1"]
        command += [
            "--size",
            load.size,
            "--appendfsync",
            self._appendfsync,
            "--scale",
            str(load.groups / GROUPS[load.size]),
        ]
        command += ["--scratch", scratch] if scratch else []
        environment = {**os.environ, "PYTHONPATH": str(self._checkout)}
        done = subprocess.run(
            command,
            cwd=self._checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 3,
            check=True,
        )
        figures = json.loads(done.stdout.splitlines()[-1])
        return {key: value for key, value in figures.items() if isinstance(value, float)}


def server_program() -> str:
    """SLIPSTREAM_REDIS_SERVER, else redis-server of this environment, else of the machine."""
    if named := os.environ.get("SLIPSTREAM_REDIS_SERVER"):
        return named
    own = Path(sys.executable).with_name("redis-server")
    found = str(own) if own.exists() else shutil.which("redis-server")
    if found is None:
        raise RuntimeError("redis-server is missing; install Redis 6.2 or later")
    return found


def plain(address: str):
    """A client of redis-py."""
    import redis

    return redis.Redis.from_url(address.partition("?")[0])


def encoded(size: str) -> list[bytes]:
    """Groups as bytes, as every way sends them."""
    source = broker_groups.structs(size)
    return [encode_group(next(source)[0]) for _ in range(broker_groups.DISTINCT_GROUPS)]


def figures(way: Way | Former, load: Load, scratch: str | None) -> dict[str, float]:
    return way.measure(load, scratch) if isinstance(way, Former) else measure(way, load, scratch)


def run_all(ways: Sequence[Way | Former], load: Load, rounds: int, scratch: str | None) -> dict[str, dict[str, object]]:
    """Medians per way, and the median over the rounds of the ratio to the first way."""
    named = {way.name: way for way in ways}
    runs = harness.in_turns(list(named), rounds, lambda name: figures(named[name], load, scratch))
    first = runs[ways[0].name]
    result: dict[str, dict[str, object]] = {}
    for name, of_way in runs.items():
        ratios = [r["cpu_us_per_group"] / f["cpu_us_per_group"] for r, f in zip(of_way, first, strict=True)]
        result[name] = {key: round(statistics.median(r[key] for r in of_way), 1) for key in of_way[0]}
        result[name][f"times_{ways[0].name}"] = round(statistics.median(ratios), 2)
        result[name]["rounds_us"] = [round(r["cpu_us_per_group"], 1) for r in of_way]
    return result


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--appendfsync", nargs="+", choices=("no", "everysec", "always"), default=["everysec"])
    parser.add_argument("--size", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of groups")
    parser.add_argument("--scratch", help="folder for the server's AOF; put it on a real disk")
    parser.add_argument("--former", help="checkout of commit 8088f31, to compare with its Redis backend")
    parser.add_argument("--only", nargs="+", help="names of the ways to run; nothing is written")
    options = parser.parse_args()
    results: dict[str, object] = {}
    for size in options.size:
        load = Load(size, int(GROUPS[size] * options.scale) // GROUPS_PER_STEP * GROUPS_PER_STEP)
        for fsync in options.appendfsync:
            ways: list[Way | Former] = [RawStreams(fsync), Slipstream(fsync)]
            if options.former:
                ways.append(Former(options.former, fsync))
            chosen = [way for way in ways if not options.only or way.name in options.only]
            measured = run_all(chosen, load, options.rounds, options.scratch)
            results[f"{size}_{fsync}"] = {"groups": load.groups, "ways": measured}
    if options.only:
        return
    if options.former:
        revision = ["git", "-C", options.former, "rev-parse", "--short", "HEAD"]
        options.former = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    packages = ("redis", "msgspec", "numpy")
    version = subprocess.run([server_program(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    harness.save("broker_redis", options, {"rounds": options.rounds, "server": version, "results": results}, packages)


if __name__ == "__main__":
    main()
