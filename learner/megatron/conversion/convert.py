"""Converts a checkpoint of any layout to a Hugging Face folder, on one rank and without an optimizer."""

from pathlib import Path

import torch

import learner.megatron.backend  # noqa: F401  (prepares the process for megatron)
from common.config.schema import LearnerConfig, ModelConfig, MoeConfig, ParallelConfig
from learner.megatron import checkpoint, parallel
from learner.megatron.conversion.export import Exporter
from learner.megatron.conversion.hf_folder import check_layout, read_config
from learner.megatron.model import DTYPES, build


def write_hugging_face(model: ModelConfig, saved: Path, target: Path) -> None:
    """Write `target`, a folder like model.path with the weights of a checkpoint; complete or absent.

    Args:
        model: the model that the run was started with.
        saved: the backend's folder in the checkpoint.
        target: new, or an empty folder.

    Raises:
        UsageError: model.path is no usable model, or the checkpoint is not one of it.
    """
    source, alone = Path(model.path), ParallelConfig()
    hf_config = read_config(source)
    check_layout(hf_config, alone, world_size=1)
    parallel.initialize(alone, seed=0, timeout_s=LearnerConfig().timeout_s)
    built = build(source, hf_config, DTYPES[model.dtype], alone, MoeConfig())
    checkpoint.load_weights(saved, built.chunks, alone)
    with torch.no_grad():
        Exporter(built, []).save(source, target)
    parallel.shutdown()
