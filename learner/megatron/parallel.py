"""torch.distributed and Megatron's process groups: gloo on CPU, NCCL on CUDA."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from common.config.schema import ParallelConfig

mpu: Any = parallel_state  # upstream types its groups as optional, or as numbers
_JOIN_S = 300.0  # ranks start apart from one another: imports, the lead's search for its broker

_PIECE = 1 << 28  # bytes in one send
_IN_FLIGHT = 16  # sends
_MOST_PADDING = 1 << 24  # bytes in one collective

_control: dist.ProcessGroup | None = None


def device() -> torch.device:
    """This rank's device: cuda:LOCAL_RANK, or the CPU where there is no CUDA."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def world_size() -> int:
    """Ranks in the world, also before `initialize`."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def initialize(parallel: ParallelConfig, seed: int, timeout_s: float) -> None:
    """Join torchrun's world, or make one of a single process, and cut it into Megatron's groups. Collective.

    A world that exists already is used. `seed` starts Megatron's random generators. A collective that takes longer than
    `timeout_s` raises on the ranks that wait in it.
    """
    global _control
    limit = timedelta(seconds=timeout_s)
    here = device()
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
            alone = {"store": HashStore(), "rank": 0, "world_size": 1}  # no port
        join = timedelta(seconds=max(timeout_s, _JOIN_S))
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo", timeout=join, **alone)
        dist.distributed_c10d._set_pg_timeout(limit)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,  # typed int, used as a timedelta's minutes
    )
    group: Any = dist.new_group(backend="gloo", timeout=limit)
    _control = group
    model_parallel_cuda_manual_seed(seed)


def rng_tracker() -> Any:
    """Megatron's random generators of this rank's device."""
    return get_cuda_rng_tracker()


def shutdown() -> None:
    """Leave the groups and the world. Collective."""
    global _control
    _control = None
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes to every rank, over gloo. Collective."""
    return _broadcast(data, 0, _control, torch.device("cpu")) if dist.get_world_size() > 1 else bytes(data or b"")


def broadcast_from_last_stage(data: bytes | None) -> bytes:
    """The last pipeline stage's bytes to the other stages of its pipeline. Collective over the pipeline."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return bytes(data or b"")
    return _broadcast(data, mpu.get_pipeline_model_parallel_last_rank(), group, device())


def broadcast_tensor_from_last_stage(tensor: Tensor) -> Tensor:
    """In place; every stage passes a tensor of the same shape and dtype. Collective over the pipeline."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(tensor, mpu.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def barrier() -> None:
    """Wait for every rank, over gloo. Collective."""
    if dist.get_world_size() > 1:
        dist.barrier(group=_control)


def largest(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks, in place on every rank, over gloo. Collective."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=_control)
    return values


def gather(data: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order, over gloo. Collective.

    Where equal places would need much padding, the ranks that have bytes send them one after the other.
    """
    sizes = _sizes(data)
    if len(sizes) * max(sizes) - sum(sizes) > _MOST_PADDING:
        cpu = torch.device("cpu")
        return [_broadcast(data, rank, _control, cpu) if size else b"" for rank, size in enumerate(sizes)]
    padded, places = _equal_places(data, sizes)
    dist.all_gather(places, padded, group=_control)
    return _cut(places, sizes)


def gather_to_lead(data: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order, on rank 0; [] elsewhere. Collective."""
    sizes = _sizes(data)
    padded, places = _equal_places(data, sizes)
    is_lead = dist.get_rank() == 0
    dist.gather(padded, places if is_lead else None, 0, group=_control)
    return _cut(places, sizes) if is_lead else []


def deliver(make: Callable[[int], np.ndarray] | None, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """See learner.backend_protocol.Backend.deliver. Over gloo, in pieces."""
    rank = dist.get_rank()
    group = next(ranks for ranks in groups if rank in ranks)
    own = np.zeros(0, dtype=np.uint8)
    sent: deque[Any] = deque()
    if make is not None:
        for number, ranks in enumerate(groups):
            if ranks == group:
                own = make(number) if len(ranks) > 1 else own
                continue
            sent += _send(make(number), ranks[0])
            while len(sent) > _IN_FLIGHT:
                sent.popleft()[0].wait()
    else:
        own = _receive(0 if rank == group[0] else group[0])
    if rank == group[0]:
        for other in group[1:]:
            sent += _send(own, other)
    for work, _ in sent:
        work.wait()
    return own


def _send(data: np.ndarray, rank: int) -> list[tuple[Any, Tensor]]:
    """The sends that have begun, each with its tensor, which must live until it is complete."""
    size = torch.tensor([len(data)])
    tensors = [size, *torch.from_numpy(data).split(_PIECE)]
    return [(dist.isend(tensor, rank, group=_control), tensor) for tensor in tensors]


def _receive(rank: int) -> np.ndarray:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank, group=_control)
    data = torch.empty(int(size), dtype=torch.uint8)
    for piece in data.split(_PIECE):
        dist.recv(piece, rank, group=_control)
    return data.numpy()


def _sizes(data: bytes) -> list[int]:
    """How many bytes each rank has. Collective."""
    told = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.tensor([len(data)]), group=_control)
    return [int(size) for size in told]


def _equal_places(data: bytes, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """`data` as long as the longest, and a place of that length for each rank."""
    longest = max(1, *sizes)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    return padded, [torch.empty_like(padded) for _ in sizes]


def _cut(places: Sequence[Tensor], sizes: Sequence[int]) -> list[bytes]:
    return [place[:size].numpy().tobytes() for place, size in zip(places, sizes, strict=True)]


def _broadcast(data: bytes | None, source: int, group: dist.ProcessGroup | None, where: torch.device) -> bytes:
    mine = data if dist.get_rank() == source else None
    size = torch.tensor(len(mine or b""), device=where)
    dist.broadcast(size, source, group=group)
    if not int(size):
        return b""
    buffer = torch.frombuffer(bytearray(mine or int(size)), dtype=torch.uint8).to(where)
    dist.broadcast(buffer, source, group=group)
    return mine or buffer.cpu().numpy().tobytes()
