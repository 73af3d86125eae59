"""Where Megatron-Bridge 0.3.1 gives wrong numbers without an error, on any device; each with its cause.

`hf_folder.give_rope_theta` before the provider is made, `correct_provider` after, `check_rope` on the built model.
Mixtral has no bridge there; ours is registered here.
`within_the_part` is no correction: it takes out collectives for which the bridge has no switch.
"""

import functools
import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.bridge.models.conversion import model_bridge, param_mapping
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from common.errors import SlipstreamError, UsageError

logger = logging.getLogger(__name__)

# Frequencies of these do not depend on the sequence, so Hugging Face's table can stand in for Megatron's.
_FIXED_FREQUENCIES = {"default", "linear", "llama3"}
# These change with the sequence length, so agreeing on short ones proves nothing.
_CHANGING_FREQUENCIES = {"dynamic", "longrope"}
LATENT_NORM_EPS = 1e-6


@functools.cache
def patch_bridge() -> None:
    """Silence the progress bars and repair the copy of tied embeddings under a virtual pipeline."""
    cls: Any = model_bridge.MegatronModelBridge
    share = cls._broadcast_shared_embeddings

    def broadcast_shared_embeddings(self: Any, model: Any) -> None:
        # 0.3.1 looks at chunk 0 only, which has neither embedding nor output layer on the last stage
        chunks = model if isinstance(model, list) else [model]
        share(self, chunks if hasattr(model_bridge.unwrap_model(chunks)[0], "embedding") else chunks[-1:])

    cls._with_progress_tracking = lambda self, tasks, *args, **kwargs: iter(tasks)
    cls._broadcast_shared_embeddings = broadcast_shared_embeddings


@contextmanager
def within_the_part() -> Iterator[None]:
    """While active, each parameter is converted only on the pipeline stage and expert-parallel rank that own it.

    0.3.1 sends every parameter to all stages, gathers it there on all tensor-parallel ranks, and experts on all
    expert-parallel ranks too. Here the first tensor-parallel rank alone gathers; the others get tensors without memory.
    """
    cls = param_mapping.MegatronParamMapping  # no mapping overrides these methods
    ours = {
        "broadcast_from_pp_rank": _as_it_is,
        "broadcast_obj_from_pp_rank": _as_it_is,
        "gather_from_tp_ranks": _gather_on_first,
        "gather_from_ep_ranks": _own_experts,
    }
    with ExitStack() as restore:
        for name, method in ours.items():
            restore.callback(setattr, cls, name, getattr(cls, name))
            setattr(cls, name, method)
        yield


def _as_it_is(self: Any, own: Any, cache_key: str | None = None) -> Any:
    return own


def _gather_on_first(self: Any, tensor: Tensor) -> list[Tensor]:
    if self.tp_size == 1 or tensor.is_meta:
        return [tensor] * self.tp_size
    if self.tp_rank == 0:
        shards = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.gather(tensor, shards, group=self.tp_group, group_dst=0)
        return shards
    dist.gather(tensor, group=self.tp_group, group_dst=0)
    return [torch.empty_like(tensor, device="meta")] * self.tp_size


def _own_experts(self: Any, weights: Tensor, module: Any, name: str) -> dict[str, Tensor]:
    if self.ep_size > 1 and not re.search(r"experts\.\d+\.", name):
        raise SlipstreamError(f"{name} has the experts of several ranks; they cannot be exported apart")
    return {name: weights.squeeze()}  # the name has the expert's number in the whole model; 0.3.1 squeezes too


def correct_provider(config: Any, provider: Any) -> None:
    """Every correction of the configuration; a certificate fails without any of them."""
    correct_window(config, provider)
    if getattr(provider, "num_moe_experts", None):
        correct_router(config, provider)
    correct_shared_experts(config, provider)
    if getattr(provider, "multi_latent_attention", False):
        correct_latent_attention(config, provider)
    correct_further_tokens(provider)


def correct_shared_experts(config: Any, provider: Any) -> None:
    """GLM's bridge counts one shared expert, however many there are."""
    if getattr(config, "n_shared_experts", None):
        provider.moe_shared_expert_intermediate_size = config.moe_intermediate_size * config.n_shared_experts


def correct_further_tokens(provider: Any) -> None:
    """Heads that predict further tokens need labels; reinforcement learning has none."""
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
        provider.window_size = (window - 1, 0)
        provider.cp_comm_type = "a2a"
        provider.window_attn_skip_freq = None if all(slides) else slides


def correct_router(config: Any, provider: Any) -> None:
    """The bridge ignores norm_topk_prob=False (softmax over all experts, not over the chosen) and sigmoid scores.

    Raises UsageError for sigmoid scores that are not divided by their sum, which Megatron does always.
    """
    normalised = getattr(config, "norm_topk_prob", True) is not False
    if getattr(provider, "moe_router_enable_expert_bias", False):
        # the bridge expects config.scoring_func, which files of transformers 5 do not have; the model knows no other
        provider.moe_router_score_function = "sigmoid"
        if not normalised:
            raise UsageError("norm_topk_prob: false in config.json: Megatron always normalises sigmoid scores")
    elif not normalised:
        provider.moe_router_pre_softmax = True


def correct_latent_attention(config: Any, provider: Any) -> None:
    """Multi-latent attention: the bridge expects the rotary keys of transformers 4.

    Without scaling it leaves Megatron's defaults, which are YaRN by a factor of 40. It also
    treats `q_lora_rank: null` as absent. Raises UsageError for pairs that are not interleaved.
    """
    if getattr(config, "rope_interleave", True) is not True:
        raise UsageError("rope_interleave: false in config.json: Megatron rotates interleaved pairs only")
    provider.q_lora_rank = config.q_lora_rank
    rope = config.rope_parameters
    provider.apply_rope_fusion = False
    provider.rotary_base = rope["rope_theta"]
    provider.rope_type = "rope"
    provider.rotary_scaling_factor = provider.mscale = provider.mscale_all_dim = 1.0
    if rope.get("rope_type", "default") == "yarn":
        provider.rope_type = "yarn"
        provider.rotary_scaling_factor = rope["factor"]
        provider.original_max_position_embeddings = rope["original_max_position_embeddings"]
        provider.beta_fast = rope.get("beta_fast") or 32
        provider.beta_slow = rope.get("beta_slow") or 1
        provider.mscale = rope.get("mscale") or 1.0
        provider.mscale_all_dim = rope.get("mscale_all_dim") or 0.0


def correct_latent_norms(model: torch.nn.Module) -> None:
    """transformers normalises the compressed queries and keys with eps 1e-6 and ignores rms_norm_eps."""
    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            for name in ("linear_q_up_proj", "linear_kv_up_proj"):
                if hasattr(module, name):
                    getattr(module, name).eps = LATENT_NORM_EPS


def check_rope(config: Any, model: torch.nn.Module) -> None:
    """Compare the rotary frequencies of a built Megatron chunk with Hugging Face's; replace it where that is safe.

    Megatron hardcodes an original length of 8192 and factors 1 and 4 for llama3 scaling; other kinds are ignored.
    Raises UsageError if they differ and the table cannot simply be exchanged.
    """
    latent = (m for m in model.modules() if isinstance(m, MLASelfAttention))
    rotaries = [m.rotary_pos_emb for m in [model, *latent] if getattr(m, "rotary_pos_emb", None) is not None]
    if not rotaries:
        return
    module = inspect.getmodule(getattr(transformers, config.architectures[0]))
    kinds: list[Any] = [c for n, c in vars(module).items() if n.endswith("RotaryEmbedding") and inspect.isclass(c)]
    table = kinds[0](config)
    for rotary in rotaries:
        _check_rotary(config, rotary, table.inv_freq.detach().float(), float(table.attention_scaling))


def _check_rotary(config: Any, rotary: Any, expected: Tensor, scaling: float) -> None:
    found = rotary.inv_freq.float().cpu()
    found_scaling = 1.0
    if isinstance(rotary, YarnRotaryEmbedding):
        embedded, found_scaling = rotary.get_emb(2)
        found = embedded[1, 0, 0, : len(found)].float().cpu()  # angles of position 1
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    agree = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=0)
    if agree and abs(scaling - found_scaling) < 1e-6 and kind not in _CHANGING_FREQUENCIES:
        return
    if scaling != 1.0 or found.shape != expected.shape or kind not in _FIXED_FREQUENCIES:
        raise UsageError(
            f"rotary embedding of type {kind!r} is not what Megatron computes "
            f"(attention scaling {scaling:.4g} against {found_scaling:.4g}, {len(expected)} frequencies against "
            f"{len(found)}); this model cannot be trained"
        )
    logger.warning("rotary frequencies of type %r taken from Hugging Face; Megatron's differ", kind)
    rotary.inv_freq = expected.to(rotary.inv_freq.device, copy=True)
    forward = type(rotary).forward
    if hasattr(forward, "cache_clear"):
        forward.cache_clear()


register: Any = model_bridge.MegatronModelBridge.register_bridge  # typed for classes that need no arguments


@register(source=transformers.MixtralForCausalLM, target=GPTModel, model_type="mixtral")
class MixtralBridge(Qwen3MoEBridge):
    """Mixtral 8x7B and 8x22B: Qwen3's layers without norms of queries and keys, and other names for the experts.

    Checkpoints name one matrix per expert, `block_sparse_moe.experts.N.w1` (gate), `w3` (up) and `w2` (down);
    transformers 5 fuses them in memory, but writes and reads these names.

    Hugging Face divides the softmax over all experts by the sum of the chosen: the softmax over the chosen, as Qwen3's.
    """

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        provider.qk_layernorm = False
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        ours = "decoder.layers.*.mlp"
        theirs = "model.layers.*.block_sparse_moe"
        up = f"{theirs}.experts.*.w3.weight"
        gate = f"{theirs}.experts.*.w1.weight"
        other = re.compile(r"\.mlp\.|[qk]_layernorm")
        return MegatronMappingRegistry(
            *(mapping for mapping in super().mapping_registry() if not other.search(mapping.megatron_param)),
            AutoMapping(f"{ours}.router.weight", f"{theirs}.gate.weight"),
            AutoMapping(f"{ours}.experts.linear_fc2.weight*", f"{theirs}.experts.*.w2.weight"),
            GatedMLPMapping(f"{ours}.experts.linear_fc1.weight*", gate=gate, up=up),
        )
