"""Which ranks work together, in Megatron's order tp-cp-ep-dp-pp, and which layers each pipeline stage has.

Megatron numbers the ranks twice. For the dense part of the model, rank = t + T (c + C (d + D p)). For the experts,
rank = t' + T' (e + E (d' + D' p)). Letters are tensor, context, data and pipeline coordinates, capitals their sizes.
T' is expert_tensor, and D' is the size that is left for expert-data parallelism.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import prod

import msgspec
import numpy as np

from common.config.parallel_layout import layers_per_stage
from common.config.schema import ParallelConfig

DENSE = ("tensor", "context", "data", "pipeline")
SPARSE = ("expert_tensor", "expert", "expert_data", "pipeline")


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of all kinds of groups; `data` and `expert_data` are what the world leaves."""

    world: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int

    @classmethod
    def of(cls, world: int, parallel: ParallelConfig) -> "Sizes":
        """For a world that the layout divides (common.config.parallel_layout.world_problems)."""
        given = {axis: getattr(parallel, axis) for axis in ("tensor", "context", "pipeline", "expert_tensor", "expert")}
        expert_data = world // (parallel.pipeline * parallel.expert * parallel.expert_tensor)
        return cls(world=world, data=world // parallel.model_ranks, expert_data=expert_data, **given)

    @property
    def dense_shards(self) -> int:
        """Ranks that share the optimizer states of dense parameters: data x context."""
        return self.data * self.context


class GroupKind(msgspec.Struct, frozen=True):
    """All groups of one kind; together they have every rank once."""

    name: str
    size: int
    groups: list[tuple[int, ...]]
    nodes: int  # that the widest of them spans


def group_kinds(sizes: Sizes, gpus_per_node: int, with_experts: bool) -> Iterator[GroupKind]:
    """Every kind of process group of a layout; those of experts only for a model that has some."""
    kinds = [(axes, DENSE) for axes in (("tensor",), ("context",), ("pipeline",), ("data",), ("data", "context"))]
    if with_experts:
        kinds += [((axis,), SPARSE) for axis in SPARSE[:-1]]
    for axes, order in kinds:
        groups = rank_groups(sizes, axes, order)
        nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
        yield GroupKind(" x ".join(axes), len(groups[0]), groups, nodes)


def rank_groups(sizes: Sizes, axes: tuple[str, ...], order: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Groups of the ranks that differ only in `axes`, some names of `order` (DENSE or SPARSE); all ascend."""
    slowest_first = order[::-1]
    ranks = np.arange(sizes.world).reshape([getattr(sizes, name) for name in slowest_first])
    inside = [i for i, name in enumerate(slowest_first) if name in axes]
    together = np.moveaxis(ranks, inside, range(-len(inside), 0))
    size = prod(getattr(sizes, name) for name in axes)
    return [tuple(group) for group in together.reshape(-1, size).tolist()]


def stage_chunks(layers: int, parallel: ParallelConfig) -> list[list[range]]:
    """[pipeline rank][virtual stage] -> layer numbers from 0; raises as layers_per_stage does."""
    sizes = layers_per_stage(layers, parallel)
    virtual = parallel.virtual_pipeline
    edges = accumulate((size // virtual for size in sizes * virtual), initial=0)
    chunks = [range(first, end) for first, end in pairwise(edges)]  # in the order in which a batch passes them
    return [chunks[stage :: len(sizes)] for stage in range(len(sizes))]
