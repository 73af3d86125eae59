"""The processes of bench/gpu_weights.py on one device: `Learner`, which publishes, and `Node`, which receives.

`serve` is such a process. It is told (name of a method, its arguments) and answers (error, result). Without CUDA the
device is the CPU.
"""

import asyncio
import gc
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from blake3 import blake3
from torch.multiprocessing.reductions import reduce_tensor
from weights_model import Model, Specs

from common.config.schema import MoeConfig, ParallelConfig, WeightsConfig
from common.weights.receive.contract import Flip, Watch
from common.weights.receive.weight_client import WeightClient
from common.weights.source.publisher import WeightPublisher
from common.weights.source.snapshot import SnapshotMaker
from common.weights.transports.groups import dist, receivable
from common.weights.transports.nccl import remember_device
from common.weights.wire import flat_buffer, messages
from common.weights.wire.failures import ProofFailed
from common.weights.wire.layout import WORDS, XXH3, Layout
from rollout_fleet.weights import weight_proof
from rollout_fleet.weights.tensor_parallel import EngineWorkers
from tests.rigs import device
from tests.rigs.waiting import until
from tests.rigs.weight_processes import BufferTarget

GROUP_S = 60.0  # that members of a plain group may take to meet
ALONE = SimpleNamespace(rank_in_group=0, world_size=1)  # vLLM's group of an engine with one worker
Rates = dict[str, float]


class Role:
    """A process of either kind."""

    def __init__(self) -> None:
        self.device = remember_device()
        self.model: Model | None = None
        self._lent: torch.Tensor | None = None
        self._pieces: Iterator[Any] = iter(())
        self._importer: Any = None

    def ready(self) -> dict[str, Any]:
        """The device: its name and its free memory, when this process has its context."""
        if self.device.type == "cpu":
            return {"name": "cpu"}
        torch.zeros(1, device=self.device)
        free, total = torch.cuda.mem_get_info()
        return {"name": torch.cuda.get_device_name(), "free_gb": free / 1e9, "total_gb": total / 1e9}

    def make(self, shape: Specs) -> int:
        """New weights; their bytes."""
        self.model = None
        self.model = Model(shape, self.device)
        return self.model.layout(XXH3).total_bytes

    def clear(self) -> None:
        """Let all memory go."""
        self.model = self._lent = self._importer = None
        self._pieces = iter(())
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], object], rounds: int, warm_up: int = 1) -> list[float]:
        """Seconds of `work` until the device is through; the first `warm_up` do not count."""
        return [self._after(self.wait, work) for _ in range(warm_up + rounds)][warm_up:]

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

    def lend(self, size: int) -> Any:
        """A handle of new memory of this device, for another process."""
        self._lent = torch.full((size,), 7, dtype=torch.uint8, device=self.device)
        self.wait()
        return reduce_tensor(self._lent)

    def borrow(self, handle: Any, rounds: int) -> list[float]:
        """Seconds of a copy of the memory behind the handle of another process."""
        rebuild, arguments = handle
        theirs = rebuild(*arguments)
        own = torch.zeros_like(theirs)
        found = self.timed(lambda: own.copy_(theirs), rounds)
        assert own[-1].item() == 7, "nothing arrived"
        return found

    def packed(self, port: int, rank: int, world: int, rounds: int) -> list[float]:
        """Seconds of a version through the functions of vLLM's nccl transfer; nodes load it as it comes."""
        code, model = vllm_transfers(), self.model
        assert model is not None
        told = [(name, (list(tensor.shape), tensor.dtype)) for name, tensor in model.held.items()]
        group = SimpleNamespace(broadcast=lambda tensor, src: dist.broadcast(tensor, src))

        def send() -> None:
            if rank == 0:
                code.packed_nccl_broadcast_producer(iter(model.held.items()), group, 0, itemgetter(1))
            else:
                code.packed_nccl_broadcast_consumer(iter(told), group, 0, model.load_weights, device=self.device)

        with self._group("nccl", port, rank, world) as meet:
            return [self._after(meet, send) for _ in range(rounds + 1)][1:]

    def give(self, buffer_bytes: int) -> None:
        """Begin to send a version as vLLM's ipc transfer does, piece by piece; 0: each tensor as it is, in one go."""
        assert self.model is not None
        uuid, held = str(torch.cuda.get_device_properties(self.device).uuid), self.model.held.items()
        if buffer_bytes:
            self._pieces = vllm_transfers().packed_ipc_producer(iter(held), uuid, itemgetter(1), buffer_bytes)
        else:
            self._pieces = iter([[(name, reduce_tensor(tensor)) for name, tensor in held]])

    def next_piece(self) -> Any:
        """None at the end."""
        piece = next(self._pieces, None)
        return vars(piece) if hasattr(piece, "ipc_handle") else piece

    def load(self, piece: Any) -> None:
        """Load what `next_piece` of another process gave."""
        assert self.model is not None
        if isinstance(piece, dict):
            self._importer = self._importer or vllm_transfers().PackedBufferImporter()
            place = {"device_index": self.device.index, "importer": self._importer}
            self.model.load_weights(vllm_transfers().packed_ipc_consumer(**piece, **place))
        else:
            self.model.load_weights((name, rebuild(*arguments)) for name, (rebuild, arguments) in piece)
        self.wait()

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

    def digests(self, size: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of the checksums of `size` bytes: one thread on the host, and those of the device."""
        host = flat_buffer.buffer(size).random_(0, 256)
        held: Any = host.numpy()
        there, data = host.to(self.device), memoryview(held)
        found = {
            "xxh3-128": self.timed(lambda: xxhash.xxh3_128_digest(data), rounds),
            "blake3": self.timed(lambda: blake3(data).digest(), rounds),
            "blake3, all cores": self.timed(lambda: blake3(data, max_threads=blake3.AUTO).digest(), rounds),
            "xxh3-128, buckets and whole": self.timed(lambda: flat_buffer.all_checksums(host, 64 << 20), rounds),
        }
        found["words on the device"] = self.timed(lambda: flat_buffer.checksum(there, WORDS), rounds)
        whole = "words on the device, buckets and whole"
        found[whole] = self.timed(lambda: flat_buffer.all_checksums(there, 64 << 20, WORDS), rounds)
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

    def snapshots(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of copies of the model, as `_copied`."""
        assert self.model is not None
        return self._copied(self.model.named_parameters, rounds)

    def export(self, folder: str, rounds: int) -> dict[str, Any]:
        """The same of a Megatron model that is exported meanwhile, and of the export alone; `bytes` of the version.

        `folder` is a Hugging Face folder without values, as `write_folder` makes it.
        """
        import learner.megatron.backend  # noqa: F401  (before Megatron)
        from learner.megatron import parallel
        from learner.megatron.conversion import hf_folder, model
        from learner.megatron.conversion.export import Exporter
        from learner.megatron.lora import Adapters

        path, layout = Path(folder), ParallelConfig()
        parallel.initialize(layout, 0, GROUP_S)
        try:
            built = model.build(path, hf_folder.read_config(path), torch.bfloat16, layout, MoeConfig())
            for chunk in built.chunks:
                for parameter in chunk.parameters():
                    parameter.data.normal_(0.0, 0.02)
            exporter = Exporter(built, Adapters(built, None, path, 0))
            size = sum(tensor.nbytes for _, tensor in exporter.tensors())
            alone = self.timed(lambda: deque(exporter.tensors(), maxlen=0), rounds)
            return {"bytes": size, "export alone": alone, **self._copied(exporter.tensors, rounds)}
        finally:
            parallel.shutdown()

    def _copied(self, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]], rounds: int) -> dict[str, list[float]]:
        """Seconds for which a learner stands still while a version is copied: SnapshotMaker, by where its buffers are.

        The first two versions make the buffers.
        """
        found: dict[str, list[float]] = {}
        for name, where in {"host": None, "device": self.device}.items():
            maker, kept = SnapshotMaker("bfloat16", where), []
            for version in range(rounds + 2):
                self.wait()
                began = time.perf_counter()
                kept.append(maker.make(version, tensors(), None))
                found.setdefault(f"to buffers on the {name}", []).append(time.perf_counter() - began)
                del kept[:-1]
            del maker, kept
            gc.collect()
        return found


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

    def flips(self, buckets: list[int], rounds: int) -> dict[str, Any]:
        """Seconds of loading a staged version that is elsewhere, of a bare copy of as many bytes, and of the proofs.

        `registered` is the same host memory, pinned where it is; `register_s` is how long that took.
        """
        assert self.model is not None
        found: dict[str, Any] = {}
        layout = self.model.layout(XXH3)
        torch.set_num_threads(os.cpu_count() or 1)
        flat = flat_buffer.buffer(layout.total_bytes).fill_(0)  # its pages are there, as after the first version
        torch.set_num_threads(1)
        found["host, pageable"] = self._loads(flat, layout, buckets[1:2], 1, warm_up=0)
        found["proof of host buffers"] = self._proof(layout)
        if self.device.type != "cuda":
            return found
        began = time.perf_counter()
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
        found["register_s"] = time.perf_counter() - began
        found["host, registered"] = self._loads(flat, layout, buckets, rounds)
        torch.cuda.check_error(runtime.cudaHostUnregister(flat.data_ptr()))
        del flat
        staged = flat_buffer.buffer(layout.total_bytes, self.device)
        found["device"] = self._loads(staged, layout, buckets[1:2], rounds)
        found["proof of device buffers"] = self._proof(self.model.layout(WORDS))
        return found

    def _proof(self, layout: Layout) -> dict[str, list[float]]:
        return {"proof": self.timed(lambda: weight_proof.checksum(self.model, layout), 1, warm_up=0)}

    def _loads(
        self, flat: torch.Tensor, layout: Layout, buckets: list[int], rounds: int, warm_up: int = 1
    ) -> dict[str, list[float]]:
        """Seconds of the model's load from `flat`, and of copies to one buffer on the device."""
        model = self.model
        assert model is not None
        load = lambda: model.load_weights(flat_buffer.view(flat, layout))  # noqa: E731
        found = {"load": self.timed(load, rounds, warm_up)}
        for bucket in buckets:
            there = torch.empty(bucket, dtype=torch.uint8, device=self.device)

            def bare(there: torch.Tensor = there, parts: Iterable[torch.Tensor] = flat.split(bucket)) -> None:
                for part in parts:
                    there[: part.numel()].copy_(part, non_blocking=True)

            found[f"bare, {bucket >> 20} MiB"] = self.timed(bare, rounds, warm_up)
        return found


@cache
def vllm_transfers() -> Any:
    """vLLM's packed_tensor.py, with which its nccl and ipc transfers send and receive. It imports only torch."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("vLLM is not installed")
    path = Path(found.submodule_search_locations[0]) / "distributed" / "weight_transfer" / "packed_tensor.py"
    spec = importlib.util.spec_from_file_location("packed_tensor", path)
    assert spec is not None and spec.loader is not None
    code = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


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
