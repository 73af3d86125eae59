"""Ways to move groups from a node to a learner, each a server, a producer and a consumer in processes of their own.

`measure` runs one way once: CPU from each process's own accounting between a common start and its last group.
"""

import contextlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import broker_groups
import harness
import psutil
import zmq

from common.rollouts import encode_group
from tests.redis_server import RedisServer, free_port

PATIENCE_S = 120


class Load(NamedTuple):
    """`groups` groups of `size` (a key of broker_groups.COMPLETION_TOKENS)."""

    size: str
    groups: int


class Roles(Protocol):
    """Producer and consumer: generators that yield once, when they are ready, and end after the last group."""

    def produce(self, address: str, load: Load) -> Generator[None, None, Any]: ...

    def consume(self, address: str, load: Load) -> Generator[None, None, Any]: ...


class Way(Roles, Protocol):
    name: str

    def serve(self, folder: str) -> contextlib.AbstractContextManager[tuple[str, Sequence[int]]]:
        """Start what stands in the middle; gives its address and its process ids."""
        ...


class RawZeroMQ:
    """The floor: PUSH to PULL over tcp, bytes encoded beforehand, nothing decoded, nothing acknowledged."""

    name = "raw_zeromq"

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, Sequence[int]]]:
        yield f"tcp://127.0.0.1:{free_port()}", []

    def produce(self, address: str, load: Load) -> Iterator[None]:
        messages = self.messages(load.size)
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.connect(address)
            yield
            for message in itertools.islice(messages, load.groups):
                pusher.send(message, copy=False)

    def consume(self, address: str, load: Load) -> Iterator[None]:
        with zmq.Context() as context, context.socket(zmq.PULL) as puller:
            puller.bind(address)
            yield
            for _ in range(load.groups):
                self.use(puller.recv(copy=False))

    def messages(self, size: str) -> Iterator[bytes]:
        return itertools.cycle(encoded(size))

    def use(self, message: zmq.Frame) -> None:
        """Nothing is decoded."""


Measure = Callable[[Any, Load, str | None], dict[str, float]]


def measure(way: Way, load: Load, scratch: str | None = None) -> dict[str, float]:
    """Microseconds of CPU per group by process, and groups per second; raises RuntimeError when a process fails."""
    return play(way, load, scratch)[0]


def play(
    way: Way, load: Load, scratch: str | None = None, patience_s: float = PATIENCE_S
) -> tuple[dict[str, float], Any]:
    """The figures of `measure`, and the value that the producer returned."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder, way.serve(folder) as (address, pids):
        servers = [psutil.Process(number) for number in pids]
        with _started(way, "consume", address, load) as consumer, _started(way, "produce", address, load) as producer:
            for pipe in (consumer, producer):
                _received(pipe)
            before = sum(map(cpu_s, servers))
            for pipe in (consumer, producer):
                pipe.send("go")
            consumer_s, wall_s, _ = _received(consumer, patience_s)
            producer_s, _, produced = _received(producer)
            server_s = sum(map(cpu_s, servers)) - before
    each = {"producer_us": producer_s, "server_us": server_s, "consumer_us": consumer_s}
    figures = {name: seconds / load.groups * 1e6 for name, seconds in each.items()}
    figures = {"cpu_us_per_group": sum(figures.values()), **figures, "groups_per_s": load.groups / wall_s}
    return figures, produced


def compared(
    ways: Sequence[Way], rounds: int, load: Load, scratch: str | None = None, one: Measure | None = None
) -> dict[str, dict[str, Any]]:
    """Medians over the rounds by way; the ratio to the first way is the median of the rounds' ratios.

    Args:
        one: measures a way with this load in place of `measure`.
    """
    named = {way.name: way for way in ways}
    runs = harness.in_turns(list(named), range(rounds), lambda name, _: (one or measure)(named[name], load, scratch))
    floor = next(iter(runs))
    found: dict[str, dict[str, Any]] = {}
    for name, of_way in runs.items():
        ratios = [r["cpu_us_per_group"] / f["cpu_us_per_group"] for r, f in zip(of_way, runs[floor], strict=True)]
        found[name] = {
            **harness.medians(of_way),
            f"times_{floor}": round(statistics.median(ratios), 2),
            "rounds_us": [round(r["cpu_us_per_group"], 1) for r in of_way],
        }
    return found


def encoded(size: str) -> list[bytes]:
    source = broker_groups.structs(size)
    return [encode_group(next(source)[0]) for _ in range(broker_groups.DISTINCT_GROUPS)]


@contextlib.contextmanager
def redis_server(folder: str, **options: str) -> Iterator[tuple[str, int]]:
    """Address and process id of a private Redis server; `options` are lines of its configuration."""
    server = RedisServer(Path(folder), {name.replace("_", "-"): value for name, value in options.items()})
    try:
        yield server.address, server.process.pid
    finally:
        server.kill()


@contextlib.contextmanager
def _started(way: Way, role: str, address: str, load: Load) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_play, args=(way, role, address, load, theirs))
    process.start()
    try:
        yield ours
        process.join(PATIENCE_S)
    finally:
        if process.is_alive():
            process.kill()


def _play(way: Way, role: str, address: str, load: Load, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    roles = way.produce(address, load) if role == "produce" else way.consume(address, load)
    next(roles)
    pipe.send("ready")
    pipe.recv()
    used_s, began = time.process_time(), time.perf_counter()
    try:
        next(roles)
    except StopIteration as end:
        pipe.send((time.process_time() - used_s, time.perf_counter() - began, end.value))


def _received(pipe: Connection, patience_s: float = PATIENCE_S) -> Any:
    if not pipe.poll(patience_s):
        raise RuntimeError(f"a bench process said nothing for {patience_s} s")
    return pipe.recv()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
