"""Checkpoints as they were before each rank wrote its own states: gathered over gloo by Megatron itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True}


@contextmanager
def _offsets_as_saved(buffers: list[Any]) -> Iterator[None]:
    """Megatron-Core 0.16.1 leaves the pads between buckets out of the states but counts them in the offsets."""
    kept = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        ends = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
        pads = [bucket.offset - start for bucket, start in zip(buffer.buckets, ends, strict=False)]
        buffer.param_index_map = {
            parameter: (start - pads[bucket], end - pads[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, offsets in zip(buffers, kept, strict=True):
            buffer.param_index_map = offsets


@contextmanager
def gathered(backend: Any) -> Iterator[None]:
    """Within, `backend` saves like that."""
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group(FORMAT | {"singleton_local_shards": False})

    def own_states(models: dict[str, Any], loading: bool) -> Any:
        assert not loading, "only saves were different"
        states: dict[str, Any] = {}
        for i, optimizer in enumerate(backend.optimizer.megatron.chained_optimizers):
            with _offsets_as_saved(optimizer.buffers):
                found = optimizer.sharded_state_dict(models, metadata=metadata)["param_state"]
            states |= {f"{i}.{key}": each for key, each in (found or {}).items()}
        return SimpleNamespace(boxes=states)

    backend.optimizer.own_states = own_states
    try:
        yield
    finally:
        del backend.optimizer.own_states
