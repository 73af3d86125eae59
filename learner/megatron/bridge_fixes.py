"""Where Megatron-Bridge 0.3.1 gives wrong numbers without an error, on any device; each with its cause.

`hf_folder.give_rope_theta` before the provider is made, `correct_provider` after, `check_rope` on the built model.
"""

import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from megatron.bridge.models.conversion import model_bridge
from torch import Tensor

from common.errors import UsageError

logger = logging.getLogger(__name__)

# Frequencies of these do not depend on the sequence, so Hugging Face's table can stand in for Megatron's.
_FIXED_FREQUENCIES = {"default", "linear", "llama3"}


def patch_bridge() -> None:
    """Silence the progress bars and repair the copy of tied embeddings under a virtual pipeline. Idempotent."""
    cls = model_bridge.MegatronModelBridge
    if getattr(cls, "_slipstream_patched", False):
        return
    cls._slipstream_patched = True

    def without_progress(
        self: Any, tasks: Iterable[Any], description: str, show_progress: bool = True
    ) -> Iterable[Any]:
        return iter(tasks)

    # 0.3.1 looks at chunk 0 only, which holds neither embedding nor output layer on the last stage
    share = cls._broadcast_shared_embeddings

    def broadcast_shared_embeddings(self: Any, model: Any) -> None:
        chunks = model if isinstance(model, list) else [model]
        share(self, chunks if hasattr(model_bridge.unwrap_model(chunks)[0], "embedding") else chunks[-1:])

    cls._with_progress_tracking = without_progress
    cls._broadcast_shared_embeddings = broadcast_shared_embeddings


def correct_provider(config: Any, provider: Any) -> None:
    """Set what the bridge translates wrongly."""
    correct_window(config, provider)
    if getattr(provider, "num_moe_experts", None):
        correct_router(config, provider)
    # multi-token prediction heads need labels; reinforcement learning has none
    provider.mtp_num_layers = None


def correct_window(config: Any, provider: Any) -> None:
    """The sliding window: off by one in Mistral's bridge, forgotten in those of Qwen2, Qwen3 and Qwen3-MoE."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if any(slides):
        # Hugging Face counts the token itself into the window, Megatron's left window does not
        provider.window_size, provider.cp_comm_type = (window - 1, 0), "a2a"
        provider.window_attn_skip_freq = None if all(slides) else slides


def correct_router(config: Any, provider: Any) -> None:
    """norm_topk_prob=False (softmax over all experts, not over the chosen) is ignored."""
    if getattr(config, "norm_topk_prob", True) is False:
        provider.moe_router_pre_softmax = True


def hf_rotary_table(config: Any) -> tuple[Tensor, float]:
    """(inverse frequencies [rotary_dim / 2] float32, attention scaling) that Hugging Face computes for `config`."""
    model = getattr(transformers, config.architectures[0])
    module = inspect.getmodule(model)
    rotary = next(c for n, c in vars(module).items() if n.endswith("RotaryEmbedding") and inspect.isclass(c))
    instance = rotary(config)
    return instance.inv_freq.detach().float().clone(), float(instance.attention_scaling)


def check_rope(config: Any, model: torch.nn.Module) -> None:
    """Compare the rotary frequencies of a built Megatron chunk with Hugging Face's; repair what surely can be.

    Megatron hardcodes an original length of 8192 and factors 1 and 4 for llama3 scaling; other kinds are ignored.

    Raises:
        UsageError: they differ and the table cannot simply be exchanged.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None:
        return
    expected, scaling = hf_rotary_table(config)
    found = rotary.inv_freq.float().cpu()
    if scaling == 1.0 and found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=0):
        return
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if scaling != 1.0 or found.shape != expected.shape or kind not in _FIXED_FREQUENCIES:
        raise UsageError(
            f"rotary embedding of type {kind!r} is not what Megatron computes "
            f"(attention scaling {scaling}, {len(expected)} frequencies against {len(found)}); "
            "this model cannot be trained"
        )
    logger.warning("rotary frequencies of type %r taken from Hugging Face; Megatron's differ", kind)
    rotary.inv_freq = expected.to(rotary.inv_freq.device)
    forward = type(rotary).forward
    if hasattr(forward, "cache_clear"):
        forward.cache_clear()
