"""Seconds of the weight plane: python bench/weight_broadcast.py [--mib 256] [--rounds 7] [--nodes 2].

Real publisher, control sockets, transports and node processes; only the engine is a buffer. In one run and in turns, so
that a busy machine slows all of them alike:

- broadcast: from the announcement to the last node's Staged, every bucket verified, against one flat gloo broadcast
  of the same bytes to as many processes (the floor) and a gloo broadcast per parameter; for large tensors and for many
  small ones, to `nodes` nodes and to one. Where there is a core for each process, each has its own;
- death: a node is killed or stopped in the middle of a broadcast; until every other node has the version.

Short mode: --mib 32 --rounds 2.
"""

import contextlib
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import harness
import torch

from common.weights.transports.groups import GlooGroup, dist
from common.weights.wire import flat_buffer
from common.weights.wire.layout import Layout
from common.weights.wire.messages import Epoch
from launch.up.supervisor import pin
from tests.rigs.waiting import until
from tests.rigs.weight_plane import Plane

TIMEOUT_S = 20.0  # the default of weights.timeout_s
BUCKET = 8 << 20  # and of weights.bucket_mib
DEFAULTS = {"dtype": "bfloat16", "bucket_bytes": BUCKET, "timeout_s": TIMEOUT_S}
SMALL_TENSORS, SMALL_BYTES = 4096, 16384
FAULTS = {"SIGKILL": "kill", "SIGSTOP": "stop"}
Named = list[tuple[str, torch.Tensor]]


def model(tensors: int, total_bytes: int) -> Named:
    size = total_bytes // tensors // 2
    return [(f"layers.{i}.weight", torch.randn(size).bfloat16()) for i in range(tensors)]


def store_at(port: int) -> Any:
    """Where the members of plain broadcasts meet; 0: a new one, which the learner has."""
    return dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)


def member(rank: int, nodes: int, store: Any) -> GlooGroup:
    """A group without anything else of ours; it forms when all members ask for it. The learner is rank 0."""
    return GlooGroup(Epoch(1, rank, nodes + 1, 60.0, "gloo", f"127.0.0.1:{store.port}"), store)


def through(group: GlooGroup, parts: list[torch.Tensor]) -> tuple[float, float]:
    """When all members were ready, and when this one had sent or received the last of `parts`; unix seconds."""
    group.post(torch.zeros(1, dtype=torch.uint8), 60.0)()
    began = time.time()
    for part in parts:
        group.post(part, 60.0)()
    return began, time.time()


def receiver(rank: int, nodes: int, port: int, size: int, pipe: Connection) -> None:
    """Takes part in plain broadcasts of parts of the sizes that come in, and says when each was through."""
    torch.set_num_threads(1)
    memory = flat_buffer.buffer(size)  # used again, as the weight plane does: fresh pages cost more than a broadcast
    pipe.send(os.getpid())
    group = member(rank, nodes, store_at(port))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(through(group, list(memory.split(pipe.recv()))))


def broadcast(name: str, named: Named, nodes: int, rounds: int) -> dict[str, Any]:
    """Our broadcast, the floor and one per parameter, in turns; medians in seconds."""
    layout = Layout.of([(n, "bfloat16", tuple(t.shape)) for n, t in named])
    flat = flat_buffer.pack(named, layout)
    each = [flat[e.offset : e.offset + e.size_bytes] for e in layout.entries]
    store, found = store_at(0), list[dict[str, float]]()
    pipes = [harness.spawned(receiver, i + 1, nodes, store.port, len(flat)) for i in range(nodes)]
    pids = list(map(harness.received, pipes))
    group = member(0, nodes, store)

    def plain_s(parts: list[torch.Tensor]) -> float:
        for pipe in pipes:
            pipe.send([len(part) for part in parts])
        began, _ = through(group, parts)
        return max(harness.received(pipe)[1] for pipe in pipes) - began

    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > nodes  # a core for each process; elsewhere they share, as the kernel sees fit
    with contextlib.closing(Plane()) as plane:
        ours, _, fleet = plane.fleet(*(f"n{i}" for i in range(nodes)), loads=False, **DEFAULTS)
        for i, core in enumerate(cores[: nodes + 1] if apart else ()):
            for pid in (fleet[i - 1].process.pid, pids[i - 1]) if i else (os.getpid(),):
                pin(pid, frozenset({core}))
        for version in range(1, rounds + 2):
            ours.publish(version, named, None)
            for node in fleet:
                node.wait("active", version=version)
            until(lambda: ours.stats().version_active == version, every_s=0.002)  # noqa: B023
            # The learner packs before a broadcast of ours, and nodes wait for it.
            flat_buffer.pack(named, layout, flat)
            flat_buffer.all_checksums(flat, BUCKET)
            found.append({"broadcast_s": ours.stats().broadcast_s, "flat_s": plain_s([flat])})
            found[-1]["per_parameter_s"] = plain_s(each)
    os.sched_setaffinity(0, cores)
    del found[0]  # it forms groups and allocates
    median = harness.medians(found, 5)
    return {
        "model": name,
        "tensors": len(named),
        "bytes": layout.total_bytes,
        "nodes": nodes,
        "core_each": apart,
        "rounds": rounds,
        **median,
        "over_flat": round(statistics.median(r["broadcast_s"] / r["flat_s"] for r in found), 3),
        "times_faster_than_per_parameter": round(median["per_parameter_s"] / median["broadcast_s"], 2),
    }


def death(fault: str, named: Named) -> float:
    """Seconds from a node's death at the second bucket of its second version until the others run that."""
    with contextlib.closing(Plane()) as plane:
        ours, address, fine = plane.fleet("a", "b", loads=False, **DEFAULTS)
        buckets = -(-sum(tensor.nbytes for _, tensor in named) // BUCKET)
        (victim,) = plane.following(address, "victim", fault=FAULTS[fault], at=buckets + 2, loads=False)
        until(lambda: ours.stats().nodes == 3, every_s=0.002)
        for version in (1, 2):
            ours.publish(version, named, None)
            ends = [node.wait("active", version=version)["time"] for node in (*fine, victim)[: 4 - version]]
        until(lambda: ours.stats().ejections == 1, every_s=0.002)
        return max(ends) - victim.wait("fault")["time"]


@harness.script(mib=256, rounds=7, nodes=2)
def main(args: harness.Options) -> harness.Figures:
    torch.set_num_threads(1)
    large = model(64, args.mib << 20)
    small = model(SMALL_TENSORS, SMALL_TENSORS * SMALL_BYTES)
    few = range(max(1, args.rounds // 2))
    result: dict[str, Any] = {"rounds": args.rounds, "timeout_s": TIMEOUT_S}
    result["broadcast"] = [
        broadcast(name, named, nodes, args.rounds)
        for nodes in (args.nodes, 1)
        for name, named in (("large tensors", large), ("many small tensors", small))
    ]
    deaths = harness.in_turns(list(FAULTS), few, lambda fault, _: death(fault, large))
    result["death"] = [
        {"signal": fault, "others_have_it_s": round(statistics.median(found), 3), "worst_s": round(max(found), 3)}
        for fault, found in deaths.items()
    ]
    return result
