"""The weights that training starts from: those of a Hugging Face folder, or what `slipstream convert` made of one."""

from pathlib import Path

from common.config.converted import WEIGHTS, is_converted
from common.config.schema import ParallelConfig
from learner.megatron import checkpoint
from learner.megatron.conversion.model import Model, open_bridge


def load(path: Path, model: Model, layout: ParallelConfig) -> None:
    """Give the chunks of `model` the weights in `path`, a model of the same shape. Collective.

    Both kinds of folder give bitwise the same weights. Raises UsageError for a checkpoint that does not fit the model.
    """
    if is_converted(path):
        checkpoint.load_weights(path / WEIGHTS, model.chunks, layout)
    else:
        open_bridge(path).load_hf_weights(model.chunks)
