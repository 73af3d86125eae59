"""Ways to move groups from a node to a learner, each a server, a producer and a consumer in processes of their own.

`Way.measure` runs one once: CPU from each process's own accounting between a common start and its last group.
"""

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import broker_groups
import harness
import psutil
import zmq
from harness import cpu_s, received, spawned

from bench.figures import ratios
from common.rollouts import encode_group
from tests.rigs.redis_servers import RedisServer, free_port

Served = contextlib.AbstractContextManager[tuple[str, list[int]]]  # a server's address and process ids


class Load(NamedTuple):
    """`groups` groups of `size` (a key of broker_groups.COMPLETION_TOKENS)."""

    size: str
    groups: int


class Way:
    """Producer and consumer are generators that yield once, when they are ready, and end after the last group."""

    name: str
    fewer = 1  # it moves so many times fewer groups, because it is slow

    def serve(self, folder: str) -> Served:
        """Start what stands in the middle."""
        raise NotImplementedError

    def produce(self, address: str, load: Load) -> Iterator[None]:
        raise NotImplementedError

    def consume(self, address: str, load: Load) -> Iterator[None]:
        raise NotImplementedError

    def measure(self, load: Load) -> dict[str, float]:
        """Microseconds of CPU per group by process, and groups per second; raises EOFError when a process fails."""
        load = load._replace(groups=load.groups // self.fewer)
        with tempfile.TemporaryDirectory() as folder, self.serve(folder) as (address, pids):
            servers = [psutil.Process(number) for number in pids]
            consumer, producer = pipes = [spawned(_play, role, address, load) for role in (self.consume, self.produce)]
            for pipe in pipes:
                received(pipe)
            before = sum(map(cpu_s, servers))
            for pipe in pipes:
                pipe.send("go")
            consumer_s, wall_s = received(consumer)
            producer_s, _ = received(producer)
            server_s = sum(map(cpu_s, servers)) - before
        each = {"producer_us": producer_s, "server_us": server_s, "consumer_us": consumer_s}
        figures = {name: seconds / load.groups * 1e6 for name, seconds in each.items()}
        return {"cpu_us_per_group": sum(figures.values()), **figures, "groups_per_s": load.groups / wall_s}


class RawZeroMQ(Way):
    """The floor: PUSH to PULL over tcp, bytes encoded beforehand, nothing decoded, nothing acknowledged."""

    name = "raw_zeromq"

    def serve(self, folder: str) -> Served:
        return contextlib.nullcontext((f"tcp://127.0.0.1:{free_port()}", []))

    def produce(self, address: str, load: Load) -> Iterator[None]:
        messages = self.messages(load.size)
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.connect(address)
            yield
            for message in itertools.islice(messages, load.groups):
                pusher.send(message, copy=False)

    def consume(self, address: str, load: Load) -> Iterator[None]:
        with zmq.Context() as context, context.socket(zmq.PULL) as puller:
            self.listen(puller, address)
            yield
            for _ in range(load.groups):
                self.use(puller.recv(copy=False))

    def listen(self, puller: zmq.Socket[bytes], address: str) -> None:
        puller.bind(address)

    def messages(self, size: str) -> Iterator[bytes]:
        return itertools.cycle(encoded(size))

    def use(self, message: zmq.Frame) -> None:
        """Nothing is decoded."""


class RelayedZeroMQ(RawZeroMQ):
    """The floor of whatever stands in the middle: the same through ZeroMQ's own proxy, in a process of its own."""

    name = "relayed_zeromq"

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, list[int]]]:
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        process = received(spawned(_relay, *addresses))
        try:
            yield " ".join(addresses), [process]
        finally:
            psutil.Process(process).kill()

    def produce(self, address: str, load: Load) -> Iterator[None]:
        return super().produce(address.split()[0], load)

    def listen(self, puller: zmq.Socket[bytes], address: str) -> None:
        puller.connect(address.split()[1])


def _relay(front: str, back: str, pipe: Connection) -> None:
    """Pass everything on, for ever."""
    with zmq.Context() as context, context.socket(zmq.PULL) as puller, context.socket(zmq.PUSH) as pusher:
        puller.bind(front)
        pusher.bind(back)
        pipe.send(os.getpid())
        zmq.proxy(puller, pusher)


def compared(ways: Sequence[Way], rounds: int, load: Load) -> dict[str, Any]:
    """Medians over the rounds by way; the ratio to the first way is the median of the rounds' ratios."""
    named = {way.name: way for way in ways}
    runs = harness.in_turns(list(named), range(rounds), lambda name, _: named[name].measure(load))
    floor = next(iter(runs))
    floor_us, found = [r["cpu_us_per_group"] for r in runs[floor]], dict[str, dict[str, Any]]()
    for name, of_way in runs.items():
        us = [r["cpu_us_per_group"] for r in of_way]
        times = round(statistics.median(ratios(us, floor_us)), 2)
        found[name] = {**harness.medians(of_way), f"times_{floor}": times, "rounds_us": [round(x, 1) for x in us]}
    return {"groups": load.groups, "ways": found}


def encoded(size: str) -> list[bytes]:
    source = broker_groups.structs(size)
    return [encode_group(next(source)[0]) for _ in range(broker_groups.DISTINCT_GROUPS)]


@contextlib.contextmanager
def redis_server(folder: str, **options: str) -> Iterator[tuple[str, list[int]]]:
    """Address and process ids of a private Redis server; `options` are lines of its configuration."""
    server = RedisServer(Path(folder), {name.replace("_", "-"): value for name, value in options.items()})
    try:
        yield server.address, [server.process.pid]
    finally:
        server.kill()


def _play(role: Callable[[str, Load], Iterator[None]], address: str, load: Load, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    steps = role(address, load)
    next(steps)
    pipe.send("ready")
    pipe.recv()
    used_s, began = time.process_time(), time.perf_counter()
    next(steps, None)
    pipe.send((time.process_time() - used_s, time.perf_counter() - began))
