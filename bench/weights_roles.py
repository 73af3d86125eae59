"""The processes of bench/gpu_weights.py on one device: `Learner`, which publishes, and `Node`, which receives.

`serve` is such a process. It is told (name of a method, its arguments) and answers (error, result). Without CUDA the
device is the CPU.
"""

import asyncio
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from common.config.schema import WeightsConfig
from common.weights.receive.contract import Flip, Watch
from common.weights.receive.weight_client import WeightClient
from common.weights.source.publisher import WeightPublisher
from common.weights.transports.groups import dist, receivable
from common.weights.transports.nccl import remember_device
from common.weights.wire import flat_buffer, messages
from common.weights.wire.failures import ProofFailed
from rollout_fleet.weights import weight_proof
from rollout_fleet.weights.tensor_parallel import EngineWorkers
from tests.rigs import device
from tests.rigs.waiting import until
from tests.rigs.weight_processes import BufferTarget

GROUP_S = 60.0  # that members of a plain group may take to meet
ALONE = SimpleNamespace(rank_in_group=0, world_size=1)  # vLLM's group of an engine with one worker
Rates = dict[str, float]
Specs = list[tuple[str, tuple[int, ...]]]


class Model:
    """Parameters by name, as far as a flip and its proof need them. It loads tensor by tensor, as vLLM's models do."""

    def __init__(self, named: Specs, where: torch.device) -> None:
        self.held = {name: torch.empty(shape, dtype=torch.bfloat16, device=where) for name, shape in named}
        for tensor in self.held.values():
            tensor.normal_(0.0, 0.02)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.held[name].copy_(tensor)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
        return self.held.items()

    def named_modules(self) -> tuple[()]:
        return ()


class Role:
    """A process of either kind."""

    def __init__(self) -> None:
        self.device = remember_device()
        self.model: Model | None = None

    def ready(self) -> dict[str, Any]:
        """The device: its name and its free memory, when this process has its context."""
        if self.device.type == "cpu":
            return {"name": "cpu"}
        torch.zeros(1, device=self.device)
        free, total = torch.cuda.mem_get_info()
        return {"name": torch.cuda.get_device_name(), "free_gb": free / 1e9, "total_gb": total / 1e9}

    def make(self, shape: Specs) -> None:
        """New weights."""
        self.model = None
        self.model = Model(shape, self.device)

    def clear(self) -> None:
        """Let all memory go."""
        self.model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], object], rounds: int) -> list[float]:
        """Seconds of `work` until the device is through; the first time does not count."""
        return [self._after(self.wait, work) for _ in range(1 + rounds)][1:]

    def bare(
        self, backend: str, port: int, rank: int, world: int, cells: list[tuple[int, int]], rounds: int
    ) -> list[list[float]]:
        """The seconds of plain torch.distributed broadcasts, for each (bytes, bytes of a bucket) of `cells`."""
        where = self.device if backend == "nccl" else torch.device("cpu")
        with self._group(backend, port, rank, world) as meet:
            flat = torch.full((max(size for size, _ in cells),), int(rank == 0), dtype=torch.uint8, device=where)
            found: list[list[float]] = []
            for size, bucket in cells:
                parts = flat[:size].split(bucket)

                def send(parts: Iterable[torch.Tensor] = parts) -> None:
                    for part in parts:
                        dist.broadcast(part, 0)

                found.append([self._after(meet, send) for _ in range(rounds + 1)][1:])
            assert flat[-1].item() == 1, "nothing arrived"
            return found

    @contextmanager
    def _group(self, backend: str, port: int, rank: int, world: int) -> Iterator[Callable[[], None]]:
        """torch.distributed's default group of these processes; yields a function in which all members meet."""
        limit, where = timedelta(seconds=GROUP_S), self.device if backend == "nccl" else torch.device("cpu")
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        met = torch.zeros(1, device=where)

        def meet() -> None:
            dist.all_reduce(met)
            self.wait()

        try:
            yield meet
        finally:
            dist.destroy_process_group()

    def _after(self, first: Callable[[], None], work: Callable[[], object]) -> float:
        first()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def copies(self, size: int, buckets: list[int], rounds: int) -> dict[str, list[float]]:
        """Seconds of copies between host and device, by direction, kind of host memory and bytes of a bucket."""
        there = torch.zeros(size, dtype=torch.uint8, device=self.device)
        other = torch.zeros_like(there)
        hosts = {"pageable": flat_buffer.buffer(size).fill_(1)}
        if self.device.type == "cuda":
            hosts["pinned"] = torch.ones(size, dtype=torch.uint8).pin_memory()
        found = {"device to device": self.timed(lambda: other.copy_(there), rounds)}
        for kind, host in hosts.items():
            for bucket in buckets:
                ends = {"device to host": (there, host), "host to device": (host, there)}
                for way, (source, target) in ends.items():
                    pairs = list(zip(source.split(bucket), target.split(bucket), strict=True))
                    work = lambda pairs=pairs: [b.copy_(a, non_blocking=True) for a, b in pairs]  # noqa: E731
                    found[f"{way}, {kind}, {bucket >> 20} MiB"] = self.timed(work, rounds)
        return found


class Learner(Role):
    """Publishes versions of a model through the product's WeightPublisher."""

    def __init__(self) -> None:
        super().__init__()
        self._publisher: WeightPublisher | None = None

    def listen(self, bucket_bytes: int, **weights: Any) -> str:
        """A new publisher's address; `weights`: keys of that section."""
        torch.set_num_threads(1)
        config = WeightsConfig(anchor_every=0, **weights)
        self._publisher = WeightPublisher(0, "bfloat16", config, bucket_bytes=bucket_bytes)
        return self._publisher.start()

    def publish(self, version: int, changed: float, nodes: int, limit_s: float) -> Rates:
        """Change a share of the elements by a unit, publish, and wait until the nodes run it. Seconds, and bytes."""
        publisher, model = self._publisher, self.model
        assert publisher is not None and model is not None
        until(lambda: publisher.stats().nodes == nodes, limit_s=limit_s)
        _change(model, changed)
        self.wait()
        began = time.perf_counter()
        size = publisher.publish(version, model.named_parameters(), None)
        stall_s = time.perf_counter() - began

        def active() -> bool:
            stats = publisher.stats()
            if stats.fatal or stats.ejections:
                raise RuntimeError(stats.fatal or "a node was ejected")
            return stats.version_active == version

        until(active, f"version {version}", limit_s, every_s=0.002)
        stats = publisher.stats()
        return {
            "bytes": size,
            "sent_bytes": stats.publish_bytes,
            "stall_s": stall_s,
            "publish_s": stats.publish_s,
            "broadcast_s": stats.broadcast_s,
            "active_s": time.perf_counter() - began,
        }

    def clear(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None
        super().clear()


def _change(model: Model, share: float) -> None:
    for tensor in model.held.values():
        words = tensor.view(-1).view(torch.int16)
        at = torch.randint(0, words.numel(), (int(share * words.numel()),), device=words.device)
        words[at] += 1


class DeviceTarget(BufferTarget):
    """EngineWeights of a model on the device; it flips and proves as rollout_fleet/weights/worker_extension.py does."""

    def __init__(self, model: Model | None, where: torch.device) -> None:
        """Without a model nothing is loaded, and nothing is proven beyond what was received."""
        super().__init__()
        self.receiver = EngineWorkers(ALONE, where).receiver
        self.model, self._device = model, where
        self.seen: list[Rates] = []
        self.ways: set[str] = set()  # by which versions came

    async def tell(self, message: bytes, node_id: str) -> bytes:
        told = messages.decode_from_learner(message)
        if isinstance(told, messages.Epoch):
            self.ways.add(told.transport)
        return await super().tell(message, node_id)

    async def stage(self, publish: bytes, watch: Watch) -> float:
        receive_s = await super().stage(publish, watch)
        self.seen.append({"receive_s": receive_s})
        return receive_s

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        return await asyncio.to_thread(self._flip, incarnation, version, expected_checksum)

    def _flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        flat, layout = self.receiver.take(incarnation, version), self.receiver.layout
        assert layout is not None
        if self.model is None:
            self.receiver.give_back(flat)
            return Flip(0.0, expected_checksum)
        began = time.perf_counter()
        self.model.load_weights(flat_buffer.view(flat, layout))
        flat_buffer.finish(next(iter(self.model.held.values())).view(-1))
        stall_s = time.perf_counter() - began
        self.receiver.give_back(flat)
        found = weight_proof.checksum(self.model, layout)
        self.seen[-1] |= {"flip_s": stall_s, "proof_s": time.perf_counter() - began - stall_s}
        if found != expected_checksum:
            raise ProofFailed(f"found {found}, published {expected_checksum}")
        return Flip(stall_s, found)


class Node(Role):
    """Follows a publisher, as a node of the fleet does."""

    def __init__(self) -> None:
        super().__init__()
        self._target: DeviceTarget | None = None
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, name: str, address: str, transport: str, loads: bool) -> None:
        torch.set_num_threads(1)
        self._leave.clear()
        self._target = DeviceTarget(self.model if loads else None, self.device)
        work = self._follow(WeightClient(name, self._target, transports=receivable(transport)), address)
        self._thread = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
        self._thread.start()

    async def _follow(self, client: WeightClient, address: str) -> None:
        client.follow(address, 0)
        while not self._leave.is_set():
            await asyncio.sleep(0.05)
        await client.close()

    def seen(self, transport: str) -> list[Rates]:
        """The figures of every version, in order. RuntimeError when one came by another way than `transport`."""
        assert self._target is not None
        if self._target.ways != {transport}:
            raise RuntimeError(f"versions came by {', '.join(sorted(self._target.ways))}, not by {transport} alone")
        return self._target.seen

    def clear(self) -> None:
        self._leave.set()
        if self._thread is not None and self._target is not None:
            self._thread.join(10.0)
            self._target.receiver.close()
        self._thread = self._target = None
        super().clear()


def serve(number: int, pipe: Connection) -> None:
    """Process `number`; 0 is the learner."""
    os.environ |= device.sharing(f"bench-{number}")
    role = Node() if number else Learner()
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send(("", getattr(role, name)(**arguments)))
        except Exception:
            pipe.send((traceback.format_exc(limit=-4), None))
