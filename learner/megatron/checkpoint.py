"""Megatron's distributed checkpoints: weights, optimizer, step and random state, loadable under another layout."""

import queue
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from common.config import ParallelConfig
from common.errors import UsageError
from learner.megatron import durable, parallel
from learner.megatron.optimizer import Optimizer

FORMAT = 1


class InlineSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process, one file per rank.

    Upstream also saves synchronously through a spawned queue server, which imports the main module again (2 to 5 s),
    and forked writers; a process with live gloo or CUDA threads is better not forked.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        filesystem_async._results_queue = queue.Queue()  # found by prepare_write_data in place of a manager's
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=partial(_write_buckets, transforms))


def _write_buckets(
    transforms: list[Any],
    rank: int,
    buckets: list[filesystem_async.WriteBucket],
    results: "queue.Queue[dict[int, Any] | Exception]",
) -> None:
    written: dict[int, Any] = {}
    for i, bucket in enumerate(buckets):
        done: queue.Queue[tuple[int, Any]] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        running.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, done, running, use_fsync=True
        )
        outcome = done.get_nowait()[1]
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[i] = outcome
    results.put(written)


def _metadata() -> dict[str, Any]:
    # the default type of the optimizer's shards needs ShardedTensor.flattened_range, which 0.16.1 refuses
    return ensure_metadata_has_dp_cp_group(
        {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
    )


def _key(index: int, chunks: list[Any]) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"


def _state(chunks: list[Any], optimizer: Optimizer, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    state: dict[str, Any] = {
        _key(i, chunks): chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)
    }
    models = state if len(chunks) > 1 else state["model"]
    state["optimizer"] = optimizer.megatron.sharded_state_dict(models, is_loading=loading, metadata=metadata)
    return state


def _random_state() -> ShardedObject:
    state = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    rank, size = dist.get_rank(), dist.get_world_size()
    return ShardedObject("random_state", state, (size,), (rank,), replica_id=0)


def save(path: Path, chunks: list[Any], optimizer: Optimizer, layout: ParallelConfig) -> None:
    """Write the new folder `path`, complete and on disk on return, or absent. Collective."""
    if dist.get_rank() == 0:
        durable.prepare(path)
    parallel.barrier()
    state = _state(chunks, optimizer, loading=False)
    state["random_state"] = _random_state()
    state["slipstream"] = {"format": FORMAT, "steps": optimizer.steps, "layout": _layout(layout)}
    dist_checkpointing.save(state, str(durable.staging_path(path)), sharded_strategy=InlineSaveStrategy())
    parallel.barrier()
    if dist.get_rank() == 0:
        durable.publish(path)
    parallel.barrier()


def load(path: Path, chunks: list[Any], optimizer: Optimizer, layout: ParallelConfig) -> None:
    """Restore what `save` wrote; random state only under the same layout. Collective.

    Raises:
        UsageError: there is no checkpoint, or one of another format.
    """
    if not (path / "metadata.json").is_file():
        raise UsageError(f"{path} is not a checkpoint: no metadata.json in it")
    common = dist_checkpointing.load_common_state_dict(str(path))
    header = common.get("slipstream", {})
    if header.get("format") != FORMAT:
        raise UsageError(f"{path}: checkpoint format {header.get('format')}, this learner reads {FORMAT}")
    same_layout = header["layout"] == _layout(layout)
    state = _state(chunks, optimizer, loading=True)
    if same_layout:
        state["random_state"] = _random_state()
    loaded = dist_checkpointing.load(state, str(path))
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[_key(i, chunks)], strict=True)
    optimizer.megatron.load_state_dict(loaded["optimizer"])
    optimizer.steps = header["steps"]
    if same_layout:
        _restore_random(loaded["random_state"])


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _layout(layout: ParallelConfig) -> list[int]:
    sizes = (layout.tensor, layout.pipeline, layout.virtual_pipeline, layout.context, layout.expert)
    return [*sizes, layout.expert_tensor, mpu.get_data_parallel_world_size()]
