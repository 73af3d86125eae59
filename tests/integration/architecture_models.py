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


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": qwen2,
    "qwen2.5-untied": lambda: qwen2(tie_word_embeddings=False),
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "qwen3": qwen3,
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "mistral": mistral,
    "mixtral": mixtral,
    "mixtral-window": lambda: mixtral(sliding_window=6),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-normed": lambda: qwen3_moe(norm_topk_prob=True, use_sliding_window=True, sliding_window=6),
}


def new_model(kind: str) -> Any:
    """A float32 transformers model with random weights, the same each time."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    model = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand_like(tensor) * 0.2)
            elif tensor.dim() == 1 and "inv_freq" not in name:  # norms not all ones, biases not all zeros
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.float()
