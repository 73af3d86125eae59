"""The weight plane between processes of one GPU: python bench/gpu_weights.py [--short] [--output FILE.json].

A learner and two nodes share the device. NCCL takes them for three hosts, so its bytes cross sockets of the loopback
device. The model is Qwen3-8B's shape in bfloat16 with random values. Parts, each beside its floor:

- copies, digests, ipc: rates of the device's and the host's own means, which bound everything below;
- bare: torch.distributed's broadcast between the same processes, by backend, nodes and bytes of a bucket;
- export: how long a learner stands still while a version is exported from Megatron and copied; `snapshots` without
  Megatron;
- publish: the product's publisher and nodes, from `publish` until the last node has staged the version and runs it;
- flips: loading a staged version, from host memory as it is, from the same memory pinned, and from the device, against
  a bare copy of as many bytes; and the proof after it;
- vllm: the same bytes by what vLLM's nccl and ipc transfers consist of (its packed_tensor.py). They load every piece
  as it comes, and neither stage nor verify a version.

A version takes `broadcast_s` from the announcement to the last node's Staged, and `gb_s` is its bytes over that.
`over_bare` is the same time over that of a bare broadcast of as many bytes in the same buckets. Nodes load the version
only where `loads` says so. Results are written after every part. A part that fails or comes too late is named in
`failed`, and the next begins with new processes. Parts that the time did not allow are in `not_reached`.

Without CUDA it runs with a tiny model on the CPU, without NCCL.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import harness
import weights_roles as roles
from random_qwen3 import Model, write_folder
from weights_model import Specs

from launch.plan.layout import hf_tensors
from tests.rigs import processes

NODES = 2
MIB = 1 << 20
BUCKETS = (16, 64, 256)  # MiB
ANSWER_S = 60.0  # for what has no limit of its own
LATE_S = 10.0  # after the end of the time
VOCABULARY = 151936
CHANGED = 0.02  # share of the elements that differ from version to version
WARM_UP = {"host": 2, "device": 1}  # versions until all buffers are there
TIMEOUT_S = 30.0  # weights.timeout_s


class Ask(NamedTuple):
    """`method` of process `number`, with its arguments."""

    number: int
    method: str
    arguments: dict[str, Any] = {}


class Crew:
    """The processes; they start when they are needed. One that fails or is late costs all of them their lives."""

    def __init__(self, count: int, end: float) -> None:
        """`end`: no answer is awaited for much longer, monotonic seconds."""
        self._count = count
        self.end = end
        self._members: list[tuple[BaseProcess, Connection]] = []

    def ask(self, *asked: Ask, limit_s: float = ANSWER_S) -> list[Any]:
        """The answers, in order; all work at once. Raises RuntimeError with what was said, or when one is late."""
        if not self._members:
            self._members = [self._start(number) for number in range(self._count)]
        for one in asked:
            self._members[one.number][1].send((one.method, one.arguments))
        end = min(time.monotonic() + limit_s, self.end + LATE_S)
        try:
            return [self._answer(one, end) for one in asked]
        except BaseException:
            self.close()
            raise

    def all(self, method: str, limit_s: float = ANSWER_S) -> list[Any]:
        return self.ask(*(Ask(number, method) for number in range(self._count)), limit_s=limit_s)

    def _start(self, number: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = processes.context().Pipe()
        process = processes.start(roles.serve, number, theirs)
        theirs.close()
        return process, ours

    def _answer(self, one: Ask, end: float) -> Any:
        pipe = self._members[one.number][1]
        if not pipe.poll(max(0.0, end - time.monotonic())):
            raise RuntimeError(f"process {one.number} is late with {one.method}")
        try:
            error, answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"process {one.number} died in {one.method}") from None
        if error:
            raise RuntimeError(f"process {one.number}, {one.method}: {error}")
        return answer

    def close(self) -> None:
        for process, pipe in self._members:
            process.kill()
            pipe.close()
        self._members = []


@dataclass
class Parts:
    """Runs parts one after another, until the crew's time is over, and writes the result after each."""

    args: harness.Options
    crew: Crew
    figures: harness.Figures

    def run(self, name: str, work: Callable[[], Any], expected_s: float) -> None:
        """Put what `work` returns under `name`; a list is put behind what is there."""
        figures, began = self.figures, time.monotonic()
        if began + expected_s > self.crew.end:
            figures["not_reached"].append(name)
            return
        try:
            found = work()
            figures[name] = [*figures.get(name, []), *found] if isinstance(found, list) else found
            print(f"{name}: {json.dumps(found)}", flush=True)
        except Exception as error:  # whatever it is, the next part may be fine
            figures["failed"].append({"part": name, "error": f"{type(error).__name__}: {error}"})
            print(f"{name} failed: {error}", flush=True)
            self.crew.close()
        figures["seconds"].append({"part": name, "s": round(time.monotonic() - began, 1)})
        harness.keep(self.args, figures)


@dataclass(frozen=True)
class Way:
    """How versions of a model of `layers` layers reach `nodes` nodes; `tied`: without lm_head."""

    transport: str
    nodes: int
    layers: int
    tied: bool = False
    bucket_mib: int = 64
    buffers: str = "host"
    encoding: str = "full"
    loads: bool = False
    rounds: int = 1

    @property
    def told(self) -> dict[str, Any]:
        names = ("transport", "encoding", "buffers", "bucket_mib", "nodes", "loads")
        return {name: getattr(self, name) for name in names}


class Bench:
    """The parts."""

    def __init__(self, end: float, short: bool) -> None:
        self.crew = Crew(1 + NODES, end)
        self.device, *_ = self.crew.all("ready", limit_s=120.0)
        self.cuda = self.device["name"] != "cpu"
        self.divisor = 8 if not self.cuda else 4 if short else 1
        self.bare: dict[tuple[str, int, int], float] = {}  # s a byte, by backend, nodes and bytes of a bucket

    def model(self, layers: int, tied: bool) -> Model:
        return Model("8B", layers, VOCABULARY // self.divisor, self.divisor, tied)

    def shape(self, layers: int, tied: bool) -> Specs:
        return [*hf_tensors(self.model(layers, tied).architecture)]

    def rates(self, method: str, size: int, **arguments: Any) -> dict[str, Any]:
        """GB/s by name of what the learner alone does with `size` bytes."""
        (found,) = self.crew.ask(Ask(0, method, {"size": size, **arguments}))
        self.crew.all("clear")
        return {"bytes": size, "gb_s": {name: rate(size, seconds) for name, seconds in found.items()}}

    def ipc(self, size: int, rounds: int) -> dict[str, Any]:
        """A copy of another process's memory through a handle of CUDA IPC."""
        (handle,) = self.crew.ask(Ask(0, "lend", {"size": size}))
        (seconds,) = self.crew.ask(Ask(1, "borrow", {"handle": handle, "rounds": rounds}))
        self.crew.all("clear")
        return {"bytes": size, "gb_s": rate(size, seconds)}

    def plain(self, backend: str, nodes: int, cells: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
        """Broadcasts of (bytes, MiB of a bucket) through torch.distributed."""
        sizes = [(size, bucket * MIB) for size, bucket in cells]
        told = {"backend": backend, "port": harness.free_port(), "world": nodes + 1, "cells": sizes, "rounds": rounds}
        asked = [Ask(rank, "bare", {**told, "rank": rank}) for rank in range(nodes + 1)]
        found = self.crew.ask(*asked, limit_s=30.0)
        self.crew.all("clear")
        rows: list[dict[str, Any]] = []
        for (size, bucket), *members in zip(cells, *found, strict=True):
            seconds = [max(one) for one in zip(*members, strict=True)]
            self.bare[backend, nodes, bucket] = statistics.median(seconds) / size
            rows.append({"backend": backend, "nodes": nodes, "bucket_mib": bucket, "bytes": size})
            rows[-1] |= {"s": round(statistics.median(seconds), 4), "gb_s": rate(size, seconds)}
        return rows

    def vllm_nccl(self, layers: int, tied: bool, rounds: int) -> list[dict[str, Any]]:
        """The same bytes through what vLLM's nccl transfer sends and receives with, to one node."""
        size, _ = self.crew.ask(*(Ask(n, "make", {"shape": self.shape(layers, tied)}) for n in (0, 1)))
        told = {"port": harness.free_port(), "world": 2, "rounds": rounds}
        found = self.crew.ask(*(Ask(n, "packed", {**told, "rank": n}) for n in (0, 1)))
        self.crew.all("clear")
        seconds = [max(one) for one in zip(*found, strict=True)]
        return [{"way": "nccl", "bytes": size, "s": rounded({"s": seconds})["s"], "gb_s": rate(size, seconds)}]

    def vllm_ipc(self, layers: int, tied: bool, rounds: int) -> list[dict[str, Any]]:
        """The same through its ipc transfer: with a buffer, which must have room for any tensor, and without one."""
        size, _ = self.crew.ask(*(Ask(n, "make", {"shape": self.shape(layers, tied)}) for n in (0, 1)))
        rows: list[dict[str, Any]] = []
        for way, buffer in {"ipc, packed": 2048 * MIB, "ipc": 0}.items():
            seconds = [harness.timed(lambda b=buffer: self._pieces(b))[1] for _ in range(rounds + 1)][1:]
            rows.append({"way": way, "bytes": size, "s": rounded({"s": seconds})["s"], "gb_s": rate(size, seconds)})
        self.crew.all("clear")
        return rows

    def _pieces(self, buffer_bytes: int) -> None:
        self.crew.ask(Ask(0, "give", {"buffer_bytes": buffer_bytes}))
        while (piece := self.crew.ask(Ask(0, "next_piece"))[0]) is not None:
            self.crew.ask(Ask(1, "load", {"piece": piece}))

    def snapshots(self, layers: int, tied: bool, rounds: int) -> dict[str, Any]:
        (size,) = self.crew.ask(Ask(0, "make", {"shape": self.shape(layers, tied)}))
        (found,) = self.crew.ask(Ask(0, "snapshots", {"rounds": rounds}), limit_s=90.0)
        self.crew.all("clear")
        return {"bytes": size, "s": rounded(found)}

    def export(self, layers: int, tied: bool, rounds: int) -> dict[str, Any]:
        """As `snapshots`, of what the learner exports from Megatron."""
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), self.model(layers, tied))
            (found,) = self.crew.ask(Ask(0, "export", {"folder": folder, "rounds": rounds}), limit_s=90.0)
        self.crew.all("clear")
        return {"bytes": found.pop("bytes"), "s": rounded(found)}

    def publish(self, way: Way) -> list[dict[str, Any]]:
        """Versions through the product; the medians of all but the first ones."""
        named, members = self.shape(way.layers, way.tied), range(1, way.nodes + 1)
        self.crew.ask(*(Ask(n, "make", {"shape": named}) for n in (0, *members) if way.loads or n == 0))
        weights = {"transport": way.transport, "encoding": way.encoding, "buffers": way.buffers}
        told = {"bucket_bytes": way.bucket_mib * MIB, "timeout_s": TIMEOUT_S, **weights}
        (address,) = self.crew.ask(Ask(0, "listen", told))
        follow = {"address": address, "transport": way.transport, "loads": way.loads}
        self.crew.ask(*(Ask(n, "follow", {"name": f"node-{n}", **follow}) for n in members))
        found: list[dict[str, float]] = []
        for version in range(1, WARM_UP[way.buffers] + way.rounds + 1):
            arguments = {"version": version, "changed": CHANGED, "nodes": way.nodes, "limit_s": 60.0}
            found += self.crew.ask(Ask(0, "publish", arguments), limit_s=70.0)
        seen = self.crew.ask(*(Ask(n, "seen", {"transport": way.transport}) for n in members))
        self.crew.all("clear")
        kept = found[-way.rounds :]
        row = way.told | {"bytes": int(kept[-1]["bytes"]), "rounds": way.rounds, **harness.medians(kept, 4)}
        row |= harness.medians([one for node in seen for one in node[-way.rounds :]], 4)
        return [row | {"gb_s": rate(row["bytes"], [row["broadcast_s"]])} | self._over(way, row)]

    def _over(self, way: Way, row: dict[str, Any]) -> dict[str, float]:
        bare = self.bare.get((way.transport, way.nodes, way.bucket_mib))
        return {} if bare is None else {"over_bare": round(row["broadcast_s"] / (bare * row["bytes"]), 2)}

    def flips(self, layers: int, tied: bool, rounds: int) -> dict[str, Any]:
        (size,) = self.crew.ask(Ask(1, "make", {"shape": self.shape(layers, tied)}))
        arguments = {"buckets": [bucket * MIB for bucket in BUCKETS], "rounds": rounds}
        (found,) = self.crew.ask(Ask(1, "flips", arguments), limit_s=90.0)
        self.crew.all("clear")
        made: dict[str, Any] = {"bytes": size, "register_s": found.pop("register_s", None), "s": {}, "gb_s": {}}
        for where, ways in found.items():
            for what, seconds in ways.items():
                made["s"][f"{where}: {what}"] = round(statistics.median(seconds), 4)
                made["gb_s"][f"{where}: {what}"] = rate(size, seconds)
        return made


def rate(size: int, seconds: Iterable[float]) -> float:
    """GB/s, of the median."""
    return round(size / statistics.median(seconds) / 1e9, 3)


def rounded(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(one, 4) for one in seconds] for name, seconds in found.items()}


def plan(bench: Bench, short: bool) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Parts in the order in which they matter: name, the seconds that one should take, and its work."""
    cuda, rounds = bench.cuda, 1 if short else 3
    some = 64 * MIB if not cuda else 256 * MIB if short else 1024 * MIB
    buckets = [*BUCKETS[1:2]] if short else [*BUCKETS]
    sizes = {"size": some, "rounds": rounds}
    small = {"layers": 1, "tied": True}
    whole = (1, True) if short else (36, False)
    middle = (1, True) if short else (8, True)
    there: dict[str, Any] = {**small, "transport": "nccl", "buffers": "device"}

    def bare(backend: str, nodes: int, *cells: tuple[int, int]) -> tuple[str, float, Callable[[], Any]]:
        return "bare", 2.0 if short else 4.0, lambda: bench.plain(backend, nodes, [*cells], rounds)

    def publish(expected_s: float, **way: Any) -> tuple[str, float, Callable[[], Any]]:
        return "publish", expected_s, lambda: bench.publish(Way(**{"nodes": 1, **small, **way}))

    if cuda:
        yield bare("nccl", 1, *((some, b) for b in buckets[:-1]), (4 * some, buckets[-1]))
        if not short:
            yield publish(25.0, transport="nccl", layers=36, tied=False, bucket_mib=256, buffers="device")
        yield publish(4.0, **there, loads=True)
    yield bare("gloo", 1, (some, 64))
    yield publish(7.0, transport="gloo", loads=True)
    yield "copies", 4.0, lambda: bench.rates("copies", buckets=[b * MIB for b in buckets], **sizes)
    yield "digests", 3.0, lambda: bench.rates("digests", **sizes)
    if cuda:
        yield "ipc", 1.0, lambda: bench.ipc(some, rounds)
    yield "flips", 3.0 if short else 16.0, lambda: bench.flips(*whole, min(rounds, 2))
    if cuda:
        yield "vllm", 3.0, lambda: bench.vllm_ipc(*whole, rounds)
        yield "vllm", 4.0, lambda: bench.vllm_nccl(*middle, 1)
        yield publish(5.0, transport="nccl")
    yield publish(6.0, transport="relay")
    if cuda and not short:
        yield bare("nccl", 2, (some, 64), (some, 256))
        yield publish(4.0, **there, nodes=2, bucket_mib=256)
    yield "export", 10.0 if short else 15.0, lambda: bench.export(*middle, rounds)
    if short and cuda:
        return
    yield publish(8.0, transport="gloo", encoding="delta")
    yield from (publish(3.0, **there, bucket_mib=b) for b in (16, 256) if cuda)
    yield bare("gloo", 2, (some, 64))
    yield publish(7.0, transport="gloo", nodes=2)
    yield publish(7.0, transport="relay", nodes=2)
    yield "snapshots", 3.0 if short else 30.0, lambda: bench.snapshots(*whole, 1)


SHORT = {"action": "store_true", "help": "a few seconds of everything"}


@harness.script(short=SHORT, output="", seconds=100.0)
def main(args: harness.Options) -> harness.Figures:
    began = time.monotonic()
    bench = Bench(began + args.seconds, args.short)
    figures = {"rounds": 1 if args.short else 3, "device": bench.device, "failed": [], "not_reached": [], "seconds": []}
    parts = Parts(args, bench.crew, figures)
    for name, expected_s, work in plan(bench, args.short):
        parts.run(name, work, expected_s)
    bench.crew.close()
    return figures
