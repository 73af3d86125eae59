"""One data-parallel rank's part of an optimizer, as sharded tensors in the shapes of the parameters.

The distributed optimizer cuts a flat buffer into equal ranges, so a rank has a range of a parameter's elements. Every
range is a few boxes: the rest of a row, whole rows, the start of a row. Each rank writes and reads its own boxes where
they lie, so nothing is gathered. A checkpoint then has the same tensors, by name and shape, as one that was gathered.
Megatron's own format of this kind needs ShardedTensor.flattened_range, which 0.16.1 refuses.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Elements [start, end) of a row-major tensor of `shape`, in order; at most 2 len(shape) - 1 boxes."""
    if not shape and start < end:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while start < end:
        index, inside = divmod(start, row)
        if not inside and end - start >= row:
            rows = (end - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
            continue
        stop = min(end, (index + 1) * row)
        for offsets, sizes in boxes(shape[1:], inside, inside + stop - start):
            yield (index, *offsets), (1, *sizes)
        start = stop


class OwnStates:
    """Main parameters and states of this rank; `boxes` are views of them, or of new memory that a checkpoint fills."""

    def __init__(self, optimizers: Sequence[Any], models: dict[str, Any], loading: bool) -> None:
        """`optimizers` are Megatron's distributed ones, `models` is the sharded state of the chunks they step."""
        self.boxes: dict[str, ShardedTensor] = {}
        self._optimizers = [each for each in optimizers if not each.is_stub_optimizer]
        self._flat: list[tuple[Any, Tensor, dict[str, Tensor]]] = []  # optimizer, parameter, its states here
        known, _ = extract_sharded_tensors_and_factories(models)
        described = {each.data: each for each in nested_values(known)}
        for optimizer in self._optimizers:
            for parameter, own in _ranges(optimizer):
                states = optimizer._get_main_param_and_optimizer_states(parameter)
                states.pop("step", None)  # follows from the number of steps
                flat = {
                    name: torch.empty(state.numel()) if loading else state.detach().float().view(-1)
                    for name, state in states.items()
                }
                self._flat.append((optimizer, parameter, flat))
                for piece, of in _pieces(described[parameter], optimizer.distributed_optimizer_instance_id):
                    self._add(piece, of, own, flat)

    def _add(self, piece: ShardedTensor, of: range, own: range, flat: dict[str, Tensor]) -> None:
        """The common part of `piece`, the elements `of` of a parameter, and `own`, those of this rank."""
        start, end = max(own.start, of.start), min(own.stop, of.stop)
        local = (1,) * piece.prepend_axis_num + piece.local_shape
        at = start - own.start
        for offsets, sizes in boxes(local, start - of.start, end - of.start):
            place = {"global_offset": tuple(map(sum, zip(piece.global_offset, offsets, strict=True)))}
            shape = {"local_shape": sizes, "prepend_axis_num": 0, "axis_fragmentations": None}
            count = math.prod(sizes)
            for name, state in flat.items():
                named = {"key": f"optimizer.state.{name}.{piece.key}", "data": state[at : at + count].view(sizes)}
                self.boxes[str(len(self.boxes))] = replace(piece, **named, **place, **shape)
            at += count

    @torch.no_grad()
    def take_over(self) -> None:
        """Let the optimizers continue with what was loaded into the boxes."""
        for optimizer, parameter, flat in self._flat:
            optimizer._set_main_param_and_optimizer_states(parameter, flat)
        for optimizer in self._optimizers:
            if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
                optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _ranges(optimizer: Any) -> Iterator[tuple[Tensor, range]]:
    """Every parameter that has elements on this rank, and these elements."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, found in bucket["param_map"].items():
                    yield parameter, range(found["param"].start, found["param"].end)


def _pieces(described: Any, instance: int) -> Iterator[tuple[ShardedTensor, range]]:
    """The sharded tensors that a parameter is written as, by one of its replicas, and their places in it.

    Some parameters are several tensors in a checkpoint, as the gate and the projection of a gated layer.
    """
    whole = torch.empty(described.data.shape, device="meta")  # views of it have a place and no memory
    replica = (*described.replica_id[:2], instance)
    if isinstance(described, ShardedTensorFactory):
        pieces = nested_values(described.build_fn(described.key, whole, replica, None))
    else:
        pieces = [replace(described, data=whole, dtype=whole.dtype, replica_id=replica)]
    for piece in pieces:
        assert piece.data.is_contiguous(), piece.key
        first = piece.data.storage_offset()
        yield piece, range(first, first + piece.data.numel())
