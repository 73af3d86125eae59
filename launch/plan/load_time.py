"""Seconds in which the learner's ranks read the weights that training starts from; docs/models.md, 'Load once'.

From safetensors a rank reads the tensors of its pipeline stage and keeps its share; of the experts it reads its own
alone. It reads only its share if the folder is converted. The speeds are those of bench/results/load_weights.json:
files in memory, one CPU thread a rank. A slower disk adds its own time.
"""

from collections.abc import Iterable

import msgspec

from common.config.schema import ParallelConfig
from launch.plan.memory import ITEM_BYTES, Resident

# GB/s from safetensors and from a converted folder, by the ranks that share each matrix; the last is that of any more
GB_S = {1: (1.47, 0.545), 2: (0.639, 0.445)}
_CUT = ("embeddings", "attention", "dense")  # kinds that tensor-parallel ranks share


class Start(msgspec.Struct, frozen=True):
    """The slowest rank's times, with the model's weights in the plan's type."""

    safetensors_s: float
    converted_s: float


def start_of(stages: Iterable[Resident], parallel: ParallelConfig, dtype: str) -> Start:
    """`stages` has a rank of each pipeline stage."""
    whole = share = 0
    for stage in stages:
        factors = {kind: parallel.tensor for kind in _CUT} | {"experts": parallel.expert_tensor}
        whole = max(whole, sum(n * factors.get(kind, 1) for kind, n in stage.elements.items()))
        share = max(share, sum(stage.elements.values()))
    gb = ITEM_BYTES[dtype] / 1e9
    safetensors, converted = GB_S[min(parallel.tensor, max(GB_S))]
    return Start(safetensors_s=whole * gb / safetensors, converted_s=share * gb / converted)
