"""A tiny model of the same architecture: it keeps the keys that the translation to Megatron reads, but not the sizes.

It has windows, groups, dense layers among sparse ones and low-rank projections where the model has them.
"""

import math
from typing import Any

import torch
import transformers

from common.config.schema import ParallelConfig

HEAD_DIM = 32
VOCABULARY = 256
WINDOW = 6


def config_of(config: Any, parallel: ParallelConfig) -> Any:
    """The transformers configuration of a miniature of `config`; the layout's numbers divide its sizes."""
    values: dict[str, Any] = config.to_dict() | _attention(config, parallel.tensor) | _experts(config, parallel)
    values |= _layers(config, parallel.pipeline * parallel.virtual_pipeline)
    width = 64 * math.lcm(parallel.tensor, parallel.expert_tensor)
    values |= {
        "intermediate_size": width,
        "vocab_size": VOCABULARY * parallel.tensor,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 1.6 / math.sqrt(values["hidden_size"]),
        "dtype": "float32",
    }
    if "moe_intermediate_size" in values:
        values["moe_intermediate_size"] = width // 2
    return type(config).from_dict(values)


def new_model(config: Any, seed: int = 5) -> Any:
    """A float32 transformers model of `config`, the same for each seed; no norm or bias of it is trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, config.architectures[0])(config)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.dim() == 1 and "inv_freq" not in name:
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.float().eval()


def _attention(config: Any, tensor: int) -> dict[str, Any]:
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None)
    if getattr(config, "kv_lora_rank", None):
        small = math.lcm(4, tensor)
        ranks = {"q_lora_rank": 24 if config.q_lora_rank is not None else None, "kv_lora_rank": 32}
        dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "qk_head_dim": 24}
        return {"hidden_size": 64, "num_attention_heads": small, "num_key_value_heads": small, **ranks, **dims}
    kv = 1 if groups == 1 else math.lcm(2, tensor)
    new = {"num_attention_heads": 2 * math.lcm(kv, tensor), "num_key_value_heads": kv}
    if groups in (None, heads):
        new["num_key_value_heads"] = new["num_attention_heads"]
    projected = new["num_attention_heads"] * HEAD_DIM
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        new["head_dim"] = HEAD_DIM
    # a hidden size that the heads do not fill stays one
    new["hidden_size"] = projected // (1 if head_dim in (None, config.hidden_size // heads) else 2)
    return new


def _layers(config: Any, stages: int) -> dict[str, Any]:
    layers = stages * math.ceil(4 / stages)
    new: dict[str, Any] = {"num_hidden_layers": layers}
    if getattr(config, "sliding_window", None) is not None:
        new["sliding_window"] = WINDOW
    kinds = getattr(config, "layer_types", None)
    if kinds:
        last = len(kinds) - 1
        new["layer_types"] = [kinds[round(i * last / max(1, layers - 1))] for i in range(layers)]
    if getattr(config, "first_k_dense_replace", 0):
        new["first_k_dense_replace"] = 1
    if getattr(config, "mlp_only_layers", None):
        new["mlp_only_layers"] = [0]
    return new


def _experts(config: Any, parallel: ParallelConfig) -> dict[str, Any]:
    """Few experts, but as many as the router's choices need, in as many groups."""
    name = next((n for n in ("n_routed_experts", "num_local_experts", "num_experts") if n in config.to_dict()), None)
    if name is None or not getattr(config, name):
        return {}
    chosen = config.num_experts_per_tok
    groups, kept = (getattr(config, name, None) or 1 for name in ("n_group", "topk_group"))
    in_group = max(2, math.ceil(chosen / kept) + 1)
    count = math.lcm(groups, parallel.expert)
    return {name: count * math.ceil(max(groups * in_group, chosen + 2) / count)}
