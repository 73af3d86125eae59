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
    told = parallel.gather(b"+" if converted else b"-")
    if len(set(told)) > 1:
        found = ", ".join(str(rank) for rank, one in enumerate(told) if one == b"+")
        raise UsageError(
            f"{path}: expected the same folder on every machine, found one of `slipstream convert` on the ranks "
            f"{found} and one with safetensors files on the others"
        )
    if converted:
        checkpoint.load_weights(path / WEIGHTS, model.chunks, layout)
    else:
        open_bridge(path).load_hf_weights(model.chunks)
