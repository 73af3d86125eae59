"""Bytes that a rank needs for parameters, gradients and optimizer states."""

import msgspec

from common.config.schema import ParallelConfig
from launch.plan.architecture import Architecture
from launch.plan.process_groups import Sizes, stage_chunks
from launch.plan.rank_parameters import KINDS, Share, chunk_parameters, shares

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # always float32
ADAM_BYTES = 8  # two float32 states
MAIN_BYTES = {"float32": 0, "bfloat16": 4}  # float32 copy of a shard; float32 parameters are their own


class Resident(msgspec.Struct, frozen=True):
    """One rank of a pipeline stage; bytes, gaps of alignment included.

    Attributes:
        elements: parameters by kind (launch.plan.rank_parameters.KINDS).
        optimizer: main parameters and Adam's states of the fullest shard.
    """

    elements: dict[str, int]
    parameters: int
    gradients: int
    optimizer: int


def resident(model: Architecture, parallel: ParallelConfig, sizes: Sizes, dtype: str) -> list[Resident]:
    """Resident bytes on a rank of each pipeline stage.

    The distributed optimizer shards main parameters and Adam's states over data x context ranks. It shards those of
    experts over the expert-data ranks (ZeRO stage 1, arXiv 1910.02054).
    """
    out: list[Resident] = []
    stages = stage_chunks(model.layers, parallel)
    for stage, chunks in enumerate(stages):
        elements = dict.fromkeys(KINDS, 0)
        held: list[Share] = []
        for v, layers in enumerate(chunks):
            first = stage == v == 0
            last = stage == len(stages) - 1 and v == len(chunks) - 1
            parameters = chunk_parameters(model, parallel, layers, first, last)
            for parameter in parameters:
                elements[parameter.kind] += parameter.elements
            held += shares(parameters, sizes)
        whole, shard = sum(s.elements for s in held), sum(s.shard for s in held)
        out.append(
            Resident(
                elements=elements,
                parameters=whole * ITEM_BYTES[dtype],
                gradients=whole * GRADIENT_BYTES,
                optimizer=shard * (ADAM_BYTES + MAIN_BYTES[dtype]),
            )
        )
    return out
