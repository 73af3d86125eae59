"""CPU seconds of the relay for each GiB, on loopback: python bench/weight_cpu.py [--mib 512] [--rounds 4].

Real publisher and node processes; only the engine is a buffer. In one run and in turns:

- alone: a publisher without nodes, which copies a version and computes its checksums. All others contain this;
- plain, keys: a publisher and one node, without and with keys;
- plain to 3, keys to 3: the same with three nodes, two of them in the chain pass the version on. Each node after the
  first one adds the CPU of receiving and passing on, wherever that is spent;
- zeromq, curve: the floor, a PUSH that sends pieces of 1 MiB of a buffer to a PULL, which copies them into its own.
  The relay is compared with it without the part that `alone` has;
- cores: seconds in which a node has pieces that were sealed beforehand, its process and the sender's together on one
  core and on two. `over_one` is the speed over that on one core in the same round.

CPU is user and system time of each process, all threads; the sender is this process. It counts from before `publish`
until the publisher knows that every node runs the version: copy, checksums, transfer and verification. `receiver_s` is
of the node in the middle: with one node it receives, with three it also passes on. First versions, which make the
buffers, are not counted. Writes bench/results/weight_cpu.json in four minutes. Short mode: --mib 64 --rounds 1.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil
import torch
import zmq

from common.security.credentials import KeyFolder
from common.weights.transports.relay import PartFetches, RelayServer
from common.weights.wire.messages import Part, Publish
from common.weights.wire.pieces import PartBuffer, new_part
from launch.keys import make
from tests.rigs.waiting import until
from tests.rigs.weight_plane import Plane

BUCKET = 8 << 20  # the default of weights.bucket_mib
PIECE, AHEAD = 1 << 20, 8  # the floor's bytes of a piece, and pieces under way
WARM_UP = 2  # versions; a publisher needs two buffers
WAYS = {"alone": (False, 0), "plain": (False, 1), "keys": (True, 1), "plain to 3": (False, 3), "keys to 3": (True, 3)}
FLOORS = {"zeromq": False, "curve": True}
CORES = (1, 2)


def relay(way: str, weights: torch.Tensor, keys: KeyFolder) -> dict[str, Any]:
    secured, nodes = WAYS[way]
    with closing(Plane()) as plane:
        credentials = str(keys.path) if secured else None
        publisher = plane.publisher(credentials=credentials, dtype="bfloat16", bucket_bytes=BUCKET, transport="relay")
        address, fleet = publisher.start(), []
        for name in map("node-{}".format, range(nodes)):
            own = {"credentials": str(keys.nodes / f"{name}.json")} if secured else {}
            fleet += plane.following(address, name, transport="relay", loads=False, **own)
        until(lambda: publisher.stats().nodes == nodes)

        def send(version: int) -> None:
            publisher.publish(version, [("weights", weights)], None)
            until(lambda: publisher.stats().published == version)
            until(lambda: not nodes or publisher.stats().version_active == version)

        return measured(send, [node.process.pid for node in fleet], weights.nbytes)


def floor(way: str, weights: torch.Tensor) -> dict[str, Any]:
    memory = memoryview(weights.view(torch.uint8).numpy())
    with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
        public, secret = zmq.curve_keypair() if FLOORS[way] else (b"", b"")
        if public:
            pusher.curve_publickey, pusher.curve_secretkey, pusher.curve_server = public, secret, True
        pusher.hwm = AHEAD
        address = f"tcp://127.0.0.1:{pusher.bind_to_random_port('tcp://127.0.0.1')}"
        pipe = harness.spawned(pulling, address, public, len(memory))

        def send(_: int) -> None:
            for start in range(0, len(memory), PIECE):
                pusher.send(memory[start : start + PIECE], copy=False)
            harness.received(pipe)

        return measured(send, [harness.received(pipe)], len(memory))


def pulling(address: str, public: bytes, size: int, pipe: Connection) -> None:
    """Says its process id, and that it has a version, one after the other."""
    buffer = np.ones(size, np.uint8)
    with zmq.Context() as context, context.socket(zmq.PULL) as puller:
        if public:
            puller.curve_publickey, puller.curve_secretkey = zmq.curve_keypair()
            puller.curve_serverkey = public
        puller.hwm = AHEAD
        puller.connect(address)
        pipe.send(os.getpid())
        for _ in range(WARM_UP + 1):
            for start in range(0, size, PIECE):
                buffer[start : start + PIECE] = np.frombuffer(puller.recv(copy=False).buffer, np.uint8)
            pipe.send("all there")


class SealedBefore(PartBuffer):
    """A source that sealed every piece before it is asked for one."""

    def __init__(self, part: Part, payload: torch.Tensor) -> None:
        super().__init__(part, payload)
        self.kept = [PartBuffer(part, payload).sealed(number) for number in range(self.count)]

    def sealed(self, number: int) -> Any:
        return self.kept[number]


def feeding(mib: int, cores: int, pipe: Connection) -> None:
    """Says the Publish of a payload that it serves on these cores, until it hears anything."""
    os.sched_setaffinity(0, range(cores))
    payload = torch.randint(0, 256, (mib << 20,), dtype=torch.uint8)
    with closing(RelayServer("127.0.0.1")) as server:
        part = new_part(payload, 0, mib << 20, piece=PIECE, origin=server.address, secured=True)
        server.offer(SealedBefore(part, payload))
        publish = Publish(0, 1, 1, "", 0, [], "", timeout_s=harness.PATIENCE_S, parts=[part], sources=[server.address])
        pipe.send(publish)
        harness.received(pipe)


def fetching(publish: Publish, cores: int, pipe: Connection) -> None:
    """Says the seconds of a fetch into memory that it has written before, and the same in CPU."""
    os.sched_setaffinity(0, range(cores))
    payload = torch.ones(publish.parts[0].size, dtype=torch.uint8)
    spent = 0.0, 0.0
    for _ in range(WARM_UP):
        began, cpu = time.perf_counter(), time.process_time()
        PartFetches(publish, "").run(payload, None, lambda share: None)
        spent = time.perf_counter() - began, time.process_time() - cpu
    pipe.send(spent)


def fetched(cores: int, mib: int) -> dict[str, float]:
    feeder = harness.spawned(feeding, mib, cores)
    seconds, cpu_s = harness.received(harness.spawned(fetching, harness.received(feeder), cores))
    feeder.send("end")
    return {"s": seconds * 1024 / mib, "cpu_s": cpu_s * 1024 / mib}


def measured(send: Callable[[int], None], receivers: Sequence[int | None], size: int) -> dict[str, Any]:
    """CPU seconds for each GiB of a version: of this process, of each receiver, and of all."""
    processes = [psutil.Process(), *map(psutil.Process, receivers)]
    for version in range(1, WARM_UP + 1):
        send(version)
    before = list(map(harness.cpu_s, processes))
    send(WARM_UP + 1)
    sender, *each = ((harness.cpu_s(p) - b) * 2**30 / size for p, b in zip(processes, before, strict=True))
    return {"sender_s": sender, "receiver_s": statistics.median(each or [0.0]), "total_s": sender + sum(each)}


def compared(total: dict[str, float]) -> dict[str, float]:
    """Ratios and differences of totals that were measured in the same round."""
    plain, keys = (total[way] - total["alone"] for way in ("plain", "keys"))  # without copy and sealing
    return {
        "keys / plain": total["keys"] / total["plain"],
        "plain / zeromq": plain / total["zeromq"],
        "keys / curve": keys / total["curve"],
        "s of a further node": (total["plain to 3"] - total["plain"]) / 2,
        "s of a further node, keys": (total["keys to 3"] - total["keys"]) / 2,
    }


@harness.script(mib=512, rounds=4)
def main(args: harness.Options) -> harness.Figures:
    torch.set_num_threads(1)
    weights = torch.randint(-(1 << 15), 1 << 15, (args.mib << 19,), dtype=torch.int16).view(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        make(keys := KeyFolder(Path(folder)), [f"node-{i}" for i in range(3)])

        def measure(way: str, _: int) -> dict[str, Any]:
            return floor(way, weights) if way in FLOORS else relay(way, weights, keys)

        found = harness.in_turns([*WAYS, *FLOORS], range(args.rounds), measure)
    rounds = [compared({way: found[way][i]["total_s"] for way in found}) for i in range(args.rounds)]
    cores = harness.in_turns(CORES, range(args.rounds), lambda count, _: fetched(count, args.mib))
    for figures in cores.values():
        for one, alone in zip(figures, cores[1], strict=True):
            one["over_one"] = alone["s"] / one["s"]
    figures = {name: [{"value": one[name]} for one in rounds] for name in rounds[0]}
    result = {"ways": harness.rows(found, ("way",), "total_s"), "compared": harness.rows(figures, ("figure",), "value")}
    result["cores"] = harness.rows(cores, ("cores",), "over_one")
    return {"rounds": args.rounds, **result}
