"""Tensors that vLLM computes from parameters once after loading: renewed at every flip, and beside the parameters.

Latent attention (MLA) decodes with two matrices that it takes out of kv_b_proj. In vLLM 0.32-0.33 they are views of
unquantised weights, which a flip changes too, on the backends with plain products. Other backends have copies: AMX_MLA
packs its own, decode context parallelism gathers them, ROCm's kernels quantise them. Prefill never reads these.
"""

from typing import Any

import torch

from rollout_fleet.vllm_patches.compat import require


def renew(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Compute again what attention layers of `model` derive from parameters; as after vLLM's own loading."""
    from vllm.model_executor.layers import attention

    require(attention, "is_deferred_attention_layer")
    for layer in model.modules():
        if attention.is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(dtype)  # in place where it can: a CUDA graph has the addresses


def compute_mla_from_parameters() -> None:
    """On the CPU, latent attention keeps kv_b_proj beside AMX's packed copies, and rotates every head and key.

    AMX_MLA (vLLM 0.32-0.33) frees kv_b_proj once its copies are made, so a flip could neither load nor prove it.
    The CPU's rotary kernel takes the head stride of latent attention's queries [T, heads, rope] for the token stride.
    """
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    require(MLAAttention, "process_weights_after_loading")
    require(RotaryEmbedding, "forward_cpu", "forward_native")
    process, rotate = MLAAttention.process_weights_after_loading, RotaryEmbedding.forward_cpu

    def process_and_keep(layer: Any, act_dtype: torch.dtype) -> None:
        weight = layer.kv_b_proj.weight
        process(layer, act_dtype)
        layer.kv_b_proj.weight = weight

    def rotate_any(layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        return rotate(layer, positions, query, key) if query.dim() == 2 else layer.forward_native(positions, query, key)

    MLAAttention.process_weights_after_loading = process_and_keep  # type: ignore[method-assign]
    RotaryEmbedding.forward_cpu = rotate_any  # type: ignore[method-assign]
