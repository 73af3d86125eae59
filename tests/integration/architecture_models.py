"""Tiny models of every architecture; large initial values, no trivial norms or biases, so that an error shows."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 128
DEFAULT_ROPE = {"rope_theta": 1e6, "rope_type": "default"}
LLAMA3_ROPE = {
    **{"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    **{"rope_theta": 1e4, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def base(**changes: Any) -> dict[str, Any]:
    """Keyword arguments that all configurations share."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return {**sizes, **heads, **tokens, "rope_parameters": dict(DEFAULT_ROPE), "attn_implementation": "sdpa", **changes}


def qwen2(**changes: Any) -> Any:
    return transformers.Qwen2Config(**base(**{"tie_word_embeddings": True, **changes}))


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3Config(**base(**{"head_dim": 16, "tie_word_embeddings": True, **changes}))


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**base(**{"rope_parameters": dict(LLAMA3_ROPE), **changes}))


def mistral(**changes: Any) -> Any:
    return transformers.MistralConfig(**base(**{"head_dim": 16, "sliding_window": 6, **changes}))


def mixtral(**changes: Any) -> Any:
    return transformers.MixtralConfig(**base(**{"num_local_experts": 4, "num_experts_per_tok": 2, **changes}))


def qwen3_moe(**changes: Any) -> Any:
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=False)
    return transformers.Qwen3MoeConfig(**base(head_dim=16, **{**experts, **changes}))


def deepseek_v3(**changes: Any) -> Any:
    latent = dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    experts = dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=32)
    groups = dict(n_group=4, topk_group=2, first_k_dense_replace=1, num_key_value_heads=4, rms_norm_eps=1e-3)
    values = {**latent, **experts, **groups, "rope_parameters": dict(YARN_ROPE)}
    return transformers.DeepseekV3Config(**base(**{**values, **changes}))


def glm4_moe(**changes: Any) -> Any:
    experts = dict(n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=32)
    rope = {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}
    values = dict(head_dim=16, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True, rope_parameters=rope)
    return transformers.Glm4MoeConfig(**base(**{**experts, **values, **changes}))


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": qwen2,
    "qwen2.5-untied": lambda: qwen2(tie_word_embeddings=False),
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "qwen3": qwen3,
    "llama": llama,
    "llama-linear": lambda: llama(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "mistral": mistral,
    "mixtral": mixtral,
    "mixtral-window": lambda: mixtral(sliding_window=6),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-normed": lambda: qwen3_moe(norm_topk_prob=True, use_sliding_window=True, sliding_window=6),
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-rope": lambda: deepseek_v3(rope_parameters=DEFAULT_ROPE),
    "deepseek-v3-plain": lambda: deepseek_v3(q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=DEFAULT_ROPE),
    "glm4-moe": glm4_moe,
}

SHORT_YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}
# What loading refuses, and what it says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "llama-attention-bias": (
        lambda: llama(attention_bias=True),
        r"Megatron has no place for model\.layers\.0\.self_attn\.k_proj\.bias, .* \(16 tensors in all\)",
    ),
    "qwen2-yarn": (lambda: qwen2(rope_parameters=SHORT_YARN), "rotary embedding of type 'yarn' is not what Megatron"),
    "llama-dynamic": (lambda: llama(rope_parameters=DYNAMIC), "rotary embedding of type 'dynamic' is not"),
    "qwen3-moe-dense-layer": (lambda: qwen3_moe(mlp_only_layers=[0]), "no place for model.layers.0.mlp.down_proj"),
    "deepseek-v3-unnormed": (lambda: deepseek_v3(norm_topk_prob=False), "norm_topk_prob: false in config.json"),
    "deepseek-v3-halves": (lambda: deepseek_v3(rope_interleave=False), "rope_interleave: false in config.json"),
    "deepseek-v3-tied": (lambda: deepseek_v3(tie_word_embeddings=True), "has no weights for output_layer.weight"),
    # transformers ranks groups by their two best experts, Megatron by as many as a group may give
    "deepseek-v3-three-of-a-group": (
        lambda: deepseek_v3(num_experts_per_tok=6),
        "Log-probabilities of a miniature of it differ by",
    ),
}


def new_model(kind: str) -> Any:
    """A float32 transformers model with random weights, the same each time."""
    torch.manual_seed(0)
    config = CONFIGS[kind]() if kind in CONFIGS else REFUSED[kind][0]()
    model = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand_like(tensor) * 0.2)
            elif tensor.dim() == 1 and "inv_freq" not in name:  # norms not all ones, biases not all zeros
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.float()
