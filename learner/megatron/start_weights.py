"""The weights that training starts from: those of a Hugging Face folder, or what `slipstream convert` made of one."""

from pathlib import Path

from common.config.converted import WEIGHTS, is_converted
from common.config.schema import ParallelConfig
from common.errors import UsageError
from learner.megatron import checkpoint, parallel
from learner.megatron.conversion.model import Model, open_bridge


def load(path: Path, model: Model, layout: ParallelConfig) -> None:
    """Give the chunks of `model` the weights in `path`, a model of the same shape. Collective.

    Both kinds of folder give bitwise the same weights. Raises UsageError for a checkpoint that does not fit the model.
    Raises it on every rank if they find different kinds: each kind has its own collectives, so ranks would wait.
    """
    converted = is_converted(path)
    agree(path, converted, "of `slipstream convert`", "with safetensors files")
    if converted:
        checkpoint.load_weights(path / WEIGHTS, model.chunks, layout)
    else:
        open_bridge(path).load_hf_weights(model.chunks)


def agree(path: Path, here: bool, kind: str, other: str) -> None:
    """Raise UsageError on every rank unless `path` is a folder of `kind` on all of them, or on none. Collective.

    `here`: whether it is one on this rank.
    """
    told = parallel.gather(b"+" if here else b"-")
    if len(set(told)) > 1:
        found = ", ".join(str(rank) for rank, one in enumerate(told) if one == b"+")
        raise UsageError(
            f"{path}: expected the same folder on every machine, found one {kind} on the ranks {found} "
            f"and one {other} on the others"
        )
