"""CPU seconds of the relay for each GiB, on loopback: python bench/weight_cpu.py [--mib 512] [--rounds 4].

Real publisher and node processes; only the engine is a buffer. In one run and in turns:

- alone: a publisher without nodes, which copies a version and computes its checksums. All others contain this;
- plain, keys: a publisher and one node, without and with keys;
- plain to 3, keys to 3: the same with three nodes, two of them in the chain pass the version on. Each node after the
  first one adds the CPU of receiving and passing on, wherever that is spent;
- zeromq, curve: the floor, a DEALER that asks a ROUTER for pieces of 1 MiB of a buffer and copies them into its own.
  The relay is compared with it without the part that `alone` has.

CPU is user and system time of each process, all threads. It counts from before `publish` until the publisher knows that
every node runs the version: copy, checksums, transfer and verification. Each measurement has processes of its own.
Their first versions, which make the buffers, are not counted. Writes bench/results/weight_cpu.json in four minutes.
Short mode: --mib 64 --rounds 1.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil
import torch
import zmq

from common.config.schema import WeightsConfig
from common.security.credentials import KeyFolder, load_credential
from launch.keys import make
from learner.publish.publisher import WeightPublisher
from rollout_fleet.weights.engine_weights import Flip
from rollout_fleet.weights.weight_client import WeightClient
from tests.integration.weights.weight_plane_node import BufferTarget
from tests.waiting import until

CONTEXT = get_context("forkserver")
TIMEOUT_S = 300.0
VERSIONS = 3  # the last one is measured; a publisher needs two buffers
PIECE, CREDIT = 1 << 20, 8  # the floor's bytes of a piece, and pieces under way
WAYS = {"alone": (False, 0), "plain": (False, 1), "keys": (True, 1), "plain to 3": (False, 3), "keys to 3": (True, 3)}
FLOORS = {"zeromq": False, "curve": True}


class Sink(BufferTarget):
    """Every bucket of its buffer was verified; there is no engine to load it into."""

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        self.receiver.give_back(self.receiver.take(incarnation, version))
        return Flip(0.0, expected_checksum)


def node(pipe: Connection, name: str, keys: str) -> None:
    """Follows the address that comes in, and says each version that it runs."""
    torch.set_num_threads(1)

    async def main() -> None:
        credential = load_credential(str(KeyFolder(keys).nodes / f"{name}.json"), "node", name) if keys else None
        client = WeightClient(name, Sink(), credential, ("relay",))  # type: ignore[arg-type]
        client.follow(pipe.recv(), 0)
        version = -1
        while True:
            state = await client.wait_change(60.0)
            if state.version != version:
                version = state.version
                pipe.send(version)

    asyncio.run(main())


def learner(pipe: Connection, mib: int, nodes: int, keys: str) -> None:
    """Says its address, and that all nodes are there; publishes each version that comes in, and says when it is out."""
    torch.set_num_threads(1)
    weights = torch.randint(-(1 << 15), 1 << 15, (mib << 19,), dtype=torch.int16).view(torch.bfloat16)
    publisher = WeightPublisher(0, "bfloat16", WeightsConfig(transport="relay", timeout_s=TIMEOUT_S), keys or None)
    pipe.send(publisher.start())
    until(lambda: publisher.stats().nodes == nodes)
    pipe.send("ready")
    for count in range(1, VERSIONS + 1):
        version = pipe.recv()
        publisher.publish(version, [("weights", weights)], None)
        until(lambda: publisher.stats().published == count)  # noqa: B023
        until(lambda: nodes == 0 or publisher.stats().version_active == version)  # noqa: B023
        pipe.send(version)
    pipe.recv()


def serving(pipe: Connection, mib: int, curve: bool) -> None:
    """A ROUTER that sends the pieces that it is asked for, without a copy, until it is told to end."""
    memory = memoryview(np.random.default_rng(0).bytes(mib << 20))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        public, secret = zmq.curve_keypair() if curve else (b"", b"")
        if curve:
            router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret, True
        port = router.bind_to_random_port("tcp://127.0.0.1")
        pipe.send((f"tcp://127.0.0.1:{port}", public))
        while not pipe.poll():
            while router.poll(100):
                identity, start = router.recv_multipart()
                router.send_multipart([identity, memory[int(start) : int(start) + PIECE]], copy=False)


def asking(pipe: Connection, mib: int, address: str, public: bytes) -> None:
    """A DEALER that gets all pieces for each number that comes in, and says that number."""
    buffer = np.ones(mib << 20, np.uint8)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if public:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = public
        dealer.connect(address)
        for _ in range(VERSIONS):
            number, asked = pipe.recv(), 0
            for start in range(0, len(buffer), PIECE):
                while asked < len(buffer) and asked - start < CREDIT * PIECE:
                    dealer.send(str(asked).encode())
                    asked += PIECE
                buffer[start : start + PIECE] = np.frombuffer(dealer.recv(copy=False).buffer, np.uint8)
            pipe.send(number)
        pipe.recv()


class Process:
    """A process of this script, and its CPU."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        if not self.pipe.poll(TIMEOUT_S):
            raise SystemExit(f"a process said nothing within {TIMEOUT_S:g} s")
        return self.pipe.recv()

    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def last_one(first: Process, others: list[Process], asked: Process) -> tuple[float, list[float]]:
    """CPU seconds of the first process and of the others for the last transfer that `asked` is asked for."""
    before = list[float]()
    for number in range(1, VERSIONS + 1):
        before = [process.cpu_s() for process in (first, *others)]
        asked.pipe.send(number)
        for process in {asked, *others}:
            heard = process.hear()
            assert heard == number, f"{heard} came instead of {number}"
    mine, *rest = (process.cpu_s() - s for process, s in zip((first, *others), before, strict=True))
    return mine, rest


def relay(way: str, mib: int, keys: str) -> dict[str, Any]:
    secured, nodes = WAYS[way]
    folder = keys if secured else ""
    lead, fleet = Process(learner, mib, nodes, folder), [Process(node, f"node-{i}", folder) for i in range(nodes)]
    address = lead.hear()
    for one in fleet:
        one.pipe.send(address)
    assert lead.hear() == "ready"
    return figures(lead, fleet, lead, mib)


def floor(way: str, mib: int) -> dict[str, Any]:
    server = Process(serving, mib, FLOORS[way])
    client = Process(asking, mib, *server.hear())
    return figures(server, [client], client, mib)


def figures(first: Process, others: list[Process], asked: Process, mib: int) -> dict[str, Any]:
    """CPU seconds for each GiB, of the sender, of each receiver, and of all; ends the processes."""
    try:
        sender, receivers = last_one(first, others, asked)
    finally:
        for process in (first, *others):
            process.end()
    gib = mib / 1024
    each = sorted(round(s / gib, 3) for s in receivers)
    return {"sender_s": sender / gib, "receivers_s": each, "total_s": (sender + sum(receivers)) / gib}


def summary(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way: medians over the rounds, and the range of the total; `middle_s` is that of 2 of 3 nodes."""
    return [
        {
            "way": way,
            "sender_s": round(statistics.median(r["sender_s"] for r in found), 3),
            "middle_s": round(statistics.median(statistics.median(r["receivers_s"] or [0.0]) for r in found), 3),
            "total_s": round(statistics.median(r["total_s"] for r in found), 3),
            "least_s": round(min(r["total_s"] for r in found), 3),
            "most_s": round(max(r["total_s"] for r in found), 3),
            "receivers_s": [r["receivers_s"] for r in found],
        }
        for way, found in rounds.items()
    ]


def compared(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Ratios and differences of totals that were measured in the same round."""
    names = ("keys / plain", "plain / zeromq", "keys / curve", "s of a further node", "s of a further node, keys")
    found: dict[str, list[float]] = {name: [] for name in names}
    for each in zip(*rounds.values(), strict=True):
        total = {way: figures["total_s"] for way, figures in zip(rounds, each, strict=True)}
        plain, keys = total["plain"] - total["alone"], total["keys"] - total["alone"]  # without copy and sealing
        further = [(total[f"{way} to 3"] - total[way]) / 2 for way in ("plain", "keys")]
        values = (total["keys"] / total["plain"], plain / total["zeromq"], keys / total["curve"], *further)
        for name, value in zip(found, values, strict=True):
            found[name].append(round(value, 3))
    return [
        {"figure": name, "median": statistics.median(v), "least": min(v), "most": max(v), "rounds": v}
        for name, v in found.items()
    ]


def main() -> None:
    args = harness.parser(__doc__, mib=512, rounds=4).parse_args()
    CONTEXT.set_forkserver_preload(["common.weights.receiver", "common.weights.transports.relay", "__main__"])
    with tempfile.TemporaryDirectory() as folder:
        make(KeyFolder(folder), [f"node-{i}" for i in range(3)])
        keys = str(Path(folder))

        def measure(way: str, _: int) -> dict[str, Any]:
            return floor(way, args.mib) if way in FLOORS else relay(way, args.mib, keys)

        found = harness.in_turns([*WAYS, *FLOORS], range(args.rounds), measure)
    result = {"rounds": args.rounds, "ways": summary(found), "compared": compared(found)}
    harness.save("weight_cpu", args, result, ("torch", "pyzmq"))


if __name__ == "__main__":
    main()
