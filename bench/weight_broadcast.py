"""Seconds of the weight plane: python bench/weight_broadcast.py [--mib 256] [--rounds 7] [--nodes 2].

Real publisher, control sockets, transports and node processes; only the engine is a buffer. In one run and the same
processes, in turns, so that a busy machine slows all of them alike:

- broadcast: from the announcement to the last node's Staged, every bucket verified, against one flat gloo broadcast
  of the same bytes (the floor) and a gloo broadcast per parameter; for large tensors and for many small ones, to
  `nodes` nodes and to one. Where there is a core for each process, each has its own;
- join: from a node whose engine is ready to its weights being in use, while others have the version;
- death: a node is killed or stopped in the middle of a broadcast; until every other node has the version.

Writes bench/results/weight_broadcast.json. Short mode: --mib 32 --rounds 2.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import harness
import msgspec
import torch

from common.config.schema import WeightsConfig
from common.process.local_address import host_and_port
from common.weights import messages, packing
from common.weights.collectives import Group, Meeting, dist
from common.weights.layout import Layout
from common.weights.messages import Epoch
from common.weights.receiver import Receiver, StagingStatus
from common.weights.transports.gloo import GlooGroup
from common.weights.transports.registry import open_group, receivable
from learner.publish.publisher import WeightPublisher
from rollout_fleet.weights.engine_weights import Flip, Watch, until_staged
from rollout_fleet.weights.weight_client import WeightClient
from tests.waiting import until

TIMEOUT_S = 20.0  # the default of weights.timeout_s
BUCKET = 8 << 20  # and of weights.bucket_mib
SMALL_TENSORS, SMALL_BYTES = 4096, 16384
CONTEXT = get_context("forkserver")


class Harmed:
    """A group whose process comes to harm at the second bucket of its second publish."""

    def __init__(self, epoch: Epoch, meeting: Meeting, target: "Target") -> None:
        self.group: Group = open_group(epoch, meeting)
        self.close, self.target = self.group.close, target

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        wait = self.group.post(bucket, timeout_s)
        return lambda: self._arrived(wait)

    def _arrived(self, wait: Callable[[], None]) -> None:
        wait()
        target = self.target
        target.buckets += 1
        if target.harm and (target.publishes, target.buckets) == (2, 2):
            target.pipe.send(("harmed", time.time()))
            os.kill(os.getpid(), target.harm)


class Target:
    """EngineWeights whose engine is the staging buffer itself."""

    def __init__(self, harm: int, pipe: Connection) -> None:
        self.receiver = Receiver(lambda epoch, meeting: Harmed(epoch, meeting, self))
        self.harm, self.pipe, self.publishes, self.buckets = harm, pipe, 0, 0

    async def tell(self, message: bytes, node_id: str) -> bytes:
        answer = self.receiver.obey(messages.decode_from_learner(message), node_id)
        return b"" if answer is None else messages.encode(answer)

    async def stage(self, publish: bytes, watch: Watch) -> float:
        self.publishes, self.buckets = self.publishes + 1, 0
        await self.tell(publish, "")
        return await until_staged(self._status, watch)

    async def _status(self) -> StagingStatus:
        return self.receiver.status

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        self.receiver.give_back(self.receiver.take(incarnation, version))
        return Flip(0.0, expected_checksum)  # every bucket of this very buffer has just been verified

    async def canary(self, tokens: list[int]) -> list[float]:
        return []

    async def exclude(self, reason: str) -> None:
        raise RuntimeError(reason)


def plain_group(epoch: Epoch) -> GlooGroup:
    """A gloo group whose members meet at the TCPStore of `epoch.reach`."""
    store: Any = dist.TCPStore(*host_and_port(epoch.reach), is_master=False, wait_for_workers=False)
    return GlooGroup(epoch, store)


def node(name: str, pipe: Connection, harm: int, transport: str, core: int | None) -> None:
    """A node process: follows addresses, takes part in plain broadcasts, says when a version is in use."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    group_of = cache(plain_group)
    memory_of = cache(packing.buffer)  # used again, as the weight plane does: fresh pages cost more than a broadcast

    def broadcasts(epoch: Epoch, sizes: list[int]) -> None:
        group, buffers = group_of(epoch), memory_of(sum(sizes)).split(sizes)
        group.post(torch.zeros(1, dtype=torch.uint8), 60.0)()  # all are ready
        for buffer in buffers:
            group.post(buffer, 60.0)()
        pipe.send(("through", time.time()))

    async def obey(client: WeightClient) -> None:
        while True:
            match await asyncio.to_thread(pipe.recv):
                case "follow", address:
                    client.follow(address, 0)
                case "broadcast", epoch, sizes:
                    await asyncio.to_thread(broadcasts, epoch, sizes)

    async def main() -> None:
        client = WeightClient(name, Target(harm, pipe), None, receivable(transport))
        pipe.send(("up", time.time()))
        obeying = asyncio.create_task(obey(client))
        version = -1
        while not obeying.done():
            state = await client.wait_change(1.0)
            if state.version != version:
                version = state.version
                pipe.send(("active", time.time(), version))

    asyncio.run(main())


class Node:
    """The bench's end of a node process."""

    def __init__(self, name: str, harm: int = 0, transport: str = "gloo", core: int | None = None) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=node, args=(name, theirs, harm, transport, core), daemon=True)
        self.process.start()
        theirs.close()
        self.hear("up")

    def hear(self, kind: str, version: int | None = None) -> float:
        """When it said that; unix seconds."""
        while True:
            if not self.pipe.poll(120):
                raise SystemExit(f"a node did not say {kind} within 120 s")
            said = self.pipe.recv()
            if said[0] == kind and (version is None or said[2] == version):
                return said[1]

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def model(tensors: int, total_bytes: int) -> list[tuple[str, torch.Tensor]]:
    size = total_bytes // tensors // 2
    return [(f"layers.{i}.weight", torch.randn(size).bfloat16()) for i in range(tensors)]


@contextlib.contextmanager
def plane(*nodes: Node) -> Iterator[tuple[WeightPublisher, str]]:
    """A publisher and its address, for nodes that do not follow it yet and end with it."""
    ours = WeightPublisher(0, "bfloat16", WeightsConfig())
    yield ours, ours.start()
    ours.close()
    for one in nodes:
        one.end()


class Plain:
    """Gloo broadcasts without anything of ours, among the learner and the same nodes."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes, self.group_of = nodes, cache(plain_group)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.epoch = Epoch(1, 0, len(nodes) + 1, 60.0, "gloo", f"127.0.0.1:{self.store.port}")

    def seconds(self, parts: list[torch.Tensor]) -> float:
        """From the moment when all are ready until the last node has the last of `parts`."""
        for rank, one in enumerate(self.nodes, start=1):
            one.pipe.send(("broadcast", msgspec.structs.replace(self.epoch, rank=rank), [len(p) for p in parts]))
        group = self.group_of(self.epoch)
        group.post(torch.zeros(1, dtype=torch.uint8), 60.0)()
        began = time.time()
        for part in parts:
            group.post(part, 60.0)()
        return max(one.hear("through") for one in self.nodes) - began


def broadcast(name: str, named: list[tuple[str, torch.Tensor]], nodes: int, rounds: int) -> dict[str, Any]:
    """Our broadcast, the floor and one per parameter, in turns; medians in seconds."""
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > nodes  # a core for each process; elsewhere they share, as the kernel sees fit
    fleet = [Node(f"n{i}", core=cores[i + 1] if apart else None) for i in range(nodes)]
    if apart:
        os.sched_setaffinity(0, {cores[0]})  # the threads that begin from here on inherit it
    with plane(*fleet) as (ours, address):
        for one in fleet:
            one.pipe.send(("follow", address))
        until(lambda: ours.stats().nodes == nodes, every_s=0.002)
        layout = Layout.of([(n, "bfloat16", tuple(t.shape)) for n, t in named])
        flat = packing.pack(named, layout)
        each = [flat[e.offset : e.offset + e.size_bytes] for e in layout.entries]
        plain = Plain(fleet)
        found: list[dict[str, float]] = []
        for version in range(rounds + 1):
            ours.publish(version, named, None)
            for one in fleet:
                one.hear("active", version)
            until(lambda: ours.stats().version_sent == version, every_s=0.002)  # noqa: B023
            packing.pack(named, layout, flat)  # the learner does so before a broadcast of ours, and nodes wait for it
            packing.all_checksums(flat, BUCKET)
            took = {"broadcast_s": ours.stats().broadcast_s, "flat_s": plain.seconds([flat])}
            found.append({**took, "per_parameter_s": plain.seconds(each)})
    os.sched_setaffinity(0, cores)
    found = found[1:]  # the first forms groups and allocates
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


def join(named: list[tuple[str, torch.Tensor]], rounds: int) -> dict[str, Any]:
    """Seconds from an engine that is ready to weights in use, served by the learner and by a peer."""
    found: dict[str, list[float]] = {"learner": [], "peer": []}
    for _ in range(rounds):
        first, late = Node("first", transport="relay"), Node("late")  # by the learner's relay, as a newcomer is
        with plane(first, late) as (ours, address):
            ours.publish(1, named, None)
            until(lambda: ours.stats().published == 1, every_s=0.002)
            for kind, one in (("learner", first), ("peer", late)):
                began = time.time()
                one.pipe.send(("follow", address))
                found[kind].append(one.hear("active", 1) - began)
                until(lambda: ours.stats().version_active == 1, every_s=0.002)
    return {f"from_{kind}_s": round(statistics.median(values), 4) for kind, values in found.items()}


def death(named: list[tuple[str, torch.Tensor]], harm: signal.Signals, rounds: int) -> dict[str, Any]:
    """Seconds from a node's death in the middle of a broadcast until the others run the version."""
    found: list[float] = []
    for _ in range(rounds):
        *fine, victim = nodes = [Node("a"), Node("b"), Node("victim", int(harm))]
        with plane(*nodes) as (ours, address):
            for one in nodes:
                one.pipe.send(("follow", address))
            until(lambda: ours.stats().nodes == 3, every_s=0.002)
            ours.publish(1, named, None)
            for one in nodes:
                one.hear("active", 1)
            ours.publish(2, named, None)
            harmed = victim.hear("harmed")
            found.append(max(one.hear("active", 2) for one in fine) - harmed)
            until(lambda: ours.stats().ejections == 1, every_s=0.002)
    median, worst = round(statistics.median(found), 3), round(max(found), 3)
    return {"signal": harm.name, "others_have_it_s": median, "worst_s": worst}


def main() -> None:
    args = harness.parser(__doc__, mib=256, rounds=7, nodes=2).parse_args()
    torch.set_num_threads(1)
    CONTEXT.set_forkserver_preload(["common.weights.receiver", "common.weights.transports.gloo", "__main__"])
    large = model(64, args.mib << 20)
    small = model(SMALL_TENSORS, SMALL_TENSORS * SMALL_BYTES)
    few = max(1, args.rounds // 2)
    result: dict[str, Any] = {"rounds": args.rounds, "timeout_s": TIMEOUT_S}
    result["broadcast"] = [
        broadcast(name, named, nodes, args.rounds)
        for nodes in (args.nodes, 1)
        for name, named in (("large tensors", large), ("many small tensors", small))
    ]
    result["join"] = {"bytes": args.mib << 20, **join(large, few)}
    result["death"] = [death(large, harm, few) for harm in (signal.SIGKILL, signal.SIGSTOP)]
    harness.save("weight_broadcast", args, result, ("torch", "pyzmq"))
    for thread in threading.enumerate():
        if thread.name.startswith("send-weights"):
            thread.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
