"""Ways to move groups from a node to a learner, each a server, a producer and a consumer in processes of their own.

`measure` runs one way once: CPU from each process's own accounting between a common start and its last group.
"""

import contextlib
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import broker_groups
import psutil
import zmq

from common.rollouts import encode_group

PATIENCE_S = 120


class Load(NamedTuple):
    """`groups` groups of `size` (a key of broker_groups.COMPLETION_TOKENS)."""

    size: str
    groups: int


class Roles(Protocol):
    """Producer and consumer: generators that yield once, when they are ready, and end after the last group."""

    def produce(self, address: str, load: Load) -> Iterator[None]: ...

    def consume(self, address: str, load: Load) -> Iterator[None]: ...


class Way(Roles, Protocol):
    name: str

    def serve(self, folder: str) -> contextlib.AbstractContextManager[tuple[str, int | Sequence[int] | None]]:
        """Start what stands in the middle; gives its address and its process id, None when there is none."""
        ...


class RawZeroMQ:
    """The floor: PUSH to PULL over tcp, bytes encoded beforehand, nothing decoded, nothing acknowledged."""

    name = "raw_zeromq"

    @contextlib.contextmanager
    def serve(self, folder: str) -> Iterator[tuple[str, int | None]]:
        yield f"tcp://127.0.0.1:{free_port()}", None

    def produce(self, address: str, load: Load) -> Iterator[None]:
        source = broker_groups.structs(load.size)
        payloads = [encode_group(next(source)[0]) for _ in range(broker_groups.DISTINCT_GROUPS)]
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.connect(address)
            yield
            for i in range(load.groups):
                pusher.send(payloads[i % len(payloads)], copy=False)

    def consume(self, address: str, load: Load) -> Iterator[None]:
        with zmq.Context() as context, context.socket(zmq.PULL) as puller:
            puller.bind(address)
            yield
            for _ in range(load.groups):
                puller.recv(copy=False)


def measure(way: Way, load: Load, scratch: str | None = None) -> dict[str, float]:
    """Microseconds of CPU per group by process, and groups per second; raises RuntimeError when a process fails."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder, way.serve(folder) as (address, pid):
        pids = [] if pid is None else [pid] if isinstance(pid, int) else pid
        servers = [psutil.Process(number) for number in pids]
        with _started(way, "consume", address, load) as consumer, _started(way, "produce", address, load) as producer:
            for pipe in (consumer, producer):
                _received(pipe)
            before = sum(map(_cpu_s, servers))
            for pipe in (consumer, producer):
                pipe.send("go")
            consumer_s, wall_s = _received(consumer)
            producer_s, _ = _received(producer)
            server_s = sum(map(_cpu_s, servers)) - before
    each = {"producer_us": producer_s, "server_us": server_s, "consumer_us": consumer_s}
    figures = {name: seconds / load.groups * 1e6 for name, seconds in each.items()}
    return {"cpu_us_per_group": sum(figures.values()), **figures, "groups_per_s": load.groups / wall_s}


def free_port() -> int:
    """A tcp port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_cpu_s() -> float:
    """User and system seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


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
    cpu_s, wall = own_cpu_s(), time.perf_counter()
    for _ in roles:
        raise RuntimeError(f"{way.name}: {role} yielded twice")
    pipe.send((own_cpu_s() - cpu_s, time.perf_counter() - wall))


def _received(pipe: Connection) -> tuple[float, float]:
    if not pipe.poll(PATIENCE_S):
        raise RuntimeError(f"a bench process said nothing for {PATIENCE_S} s")
    return pipe.recv()


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system
