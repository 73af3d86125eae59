"""Weights of an engine that computes in 8 bits: how vLLM loads and rounds them, and the same rounding for the proof."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from rollout_fleet.vllm_patches.engine_process import require

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # value of FP8
LEAST_SCALE = 1 / (LARGEST * 512)


def per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [out, in] as vLLM's fp8_per_channel has it: [out, in] FP8, and scales [out, 1] float32.

    vLLM 0.32, online/fp8.py. A row's scale maps its largest value to LARGEST. Under tensor parallelism vLLM takes the
    largest value of the whole row, so shards of this rounding are the roundings of shards. The divisor is a tensor,
    because CUDA multiplies by the rounded reciprocal of a number, and some scales would differ by their last bit.
    """
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / weight.new_tensor(LARGEST)).clamp(min=LEAST_SCALE)
    return (weight / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def load_and_round(model: Any, weights: Iterable[tuple[str, torch.Tensor]], config: Any) -> None:
    """Load `weights` into a live model of vLLM's that computes with rounded ones; `config`: vLLM's ModelConfig.

    Each layer takes the form that it had before it was rounded, is loaded and rounded. CUDA graphs have the addresses
    of the old memory, so the result goes there. Layers without weights of their own, as a tied head, make vLLM warn;
    the proof finds a layer that lacks some.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    require(layerwise, "initialize_layerwise_reload", "finalize_layerwise_reload")
    logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
    layerwise.initialize_layerwise_reload(model)
    model.load_weights((name, tensor.to(config.dtype)) for name, tensor in weights)
    layerwise.finalize_layerwise_reload(model, config)


def unrounded_layers(model: Any) -> list[str]:
    """Names of the linear layers of a model of vLLM's whose weights are not in 8 bits."""
    from vllm.model_executor.layers.linear import LinearBase

    linear = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LinearBase))
    return [name for name, layer in linear if layer.weight.dtype != FP8]
