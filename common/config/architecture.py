"""The shape of a decoder as its Hugging Face config.json gives it, in one form for all architectures.

Config checks and `slipstream plan` read it. Neither needs torch.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

Document = Mapping[str, object]
MOST_SIZE = 1 << 24  # widest layer, vocabulary or context; the largest known ones have ten million
MOST_COUNTED = 1 << 12  # layers, heads or experts, which are counted one by one


class Attention(msgspec.Struct, frozen=True):
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False  # RMSNorm over each head's query and key
    qkv_bias: bool = False
    output_bias: bool = False


class LatentAttention(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    heads: int
    q_rank: int | None  # None: queries are not compressed
    kv_rank: int
    nope_dim: int  # size of a query or key head, without position
    rope_dim: int  # size of a query head with position, and of the one key that all heads share
    value_dim: int

    @property
    def kv_heads(self) -> int:
        """Every head has keys and values of its own, once they are expanded."""
        return self.heads

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class Experts(msgspec.Struct, frozen=True):
    count: int
    per_token: int
    ffn: int  # intermediate size of one expert
    shared_ffn: int = 0  # intermediate size of all shared experts together; 0: none
    selection_bias: bool = False  # a bias per expert that only selects (arXiv 2408.15664); no gradient
    mixtral_names: bool = False  # Mixtral's names: block_sparse_moe.experts.N.w1


class Architecture(msgspec.Struct, frozen=True):
    """A decoder with RMSNorm, rotary positions and gated feed-forward layers."""

    kind: str  # model_type in config.json
    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    tied: bool  # the output layer is the embedding
    positions: int
    attention: Attention | LatentAttention
    experts: Experts | None
    moe_layers: tuple[bool, ...]  # whether each layer has experts instead of a dense feed-forward
    mlp_bias: bool = False  # in the dense feed-forward layers


class UnknownArchitecture(ValueError):
    """A config.json that cannot be read: another model_type than those in READERS, or a number is missing."""


class _Traits(msgspec.Struct, frozen=True):
    """Facts that config.json of a model_type leaves out; `experts` are its keys for their number and their size."""

    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = True  # attention_bias is one of the output projection too
    latent: bool = False
    experts: tuple[str, str] | None = None
    selection_bias: bool = False


# The supported architectures and their model_type. They are proven to load, compute and come back as in transformers:
# docs/models.md, and tests/integration/megatron/test_architectures.py.
KIND_OF = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_ROUTED = ("n_routed_experts", "moe_intermediate_size")
READERS = {
    "qwen2": _Traits(qkv_bias=True),
    "qwen3": _Traits(qk_norm=True),
    "llama": _Traits(),
    "mistral": _Traits(),
    "mixtral": _Traits(experts=("num_local_experts", "intermediate_size")),
    "qwen3_moe": _Traits(qk_norm=True, experts=("num_experts", "moe_intermediate_size")),
    "deepseek_v3": _Traits(latent=True, experts=_ROUTED, selection_bias=True),
    "glm4_moe": _Traits(output_bias=False, experts=_ROUTED, selection_bias=True),
}


def first_class(named: object) -> str | None:
    """The first of a config.json's `architectures`; None where it names none."""
    first = cast("Sequence[object]", named)[0] if isinstance(named, list | tuple) and named else None
    return None if first is None else str(first)


def read_architecture(config: Document) -> Architecture:
    """The shape that a config.json describes; raises UnknownArchitecture."""
    kind = str(config.get("model_type"))
    if kind not in READERS:
        kind = KIND_OF.get(first_class(config.get("architectures")) or "", kind)
    if kind not in READERS:
        raise UnknownArchitecture(f"model_type {kind!r}; the planner counts {', '.join(READERS)}")
    traits = READERS[kind]
    layers = _number(config, "num_hidden_layers", most=MOST_COUNTED)
    first = _number(config, "first_k_dense_replace", 0, least=0)
    every = _number(config, "decoder_sparse_step", 1)
    only: object = config.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(isinstance(n, int) for n in cast("list[object]", only)):
        raise UnknownArchitecture(f"mlp_only_layers is {only!r}, expected a list of whole numbers")
    dense = {*range(min(first, layers)), *cast("list[int]", only)}
    has_experts = traits.experts is not None
    return Architecture(
        kind=kind,
        layers=layers,
        hidden=_number(config, "hidden_size"),
        ffn=_number(config, "intermediate_size"),
        vocabulary=_number(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings"),
        positions=_number(config, "max_position_embeddings"),
        attention=_attention(config, traits),
        experts=_experts(config, traits),
        moe_layers=tuple(has_experts and n not in dense and (n + 1) % every == 0 for n in range(layers)),
        mlp_bias=_flag(config, "mlp_bias"),
    )


def _attention(config: Document, traits: _Traits) -> Attention | LatentAttention:
    heads = _number(config, "num_attention_heads", most=MOST_COUNTED)
    if traits.latent:
        return LatentAttention(
            heads=heads,
            q_rank=None if config.get("q_lora_rank") is None else _number(config, "q_lora_rank"),
            kv_rank=_number(config, "kv_lora_rank"),
            nope_dim=_number(config, "qk_nope_head_dim"),
            rope_dim=_number(config, "qk_rope_head_dim"),
            value_dim=_number(config, "v_head_dim"),
        )
    bias = _flag(config, "attention_bias")
    return Attention(
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", heads, most=heads),
        head_dim=_number(config, "head_dim", _number(config, "hidden_size") // heads),
        qk_norm=traits.qk_norm or _flag(config, "use_qk_norm"),
        qkv_bias=traits.qkv_bias or bias,
        output_bias=traits.output_bias and bias,
    )


def _experts(config: Document, traits: _Traits) -> Experts | None:
    """Routed and shared experts; transformers 5 may say num_local_experts in place of the model's own key."""
    if traits.experts is None:
        return None
    own, size = traits.experts
    ffn = _number(config, size)
    count = _number(config, own if own in config else "num_local_experts", most=MOST_COUNTED)
    return Experts(
        count=count,
        per_token=_number(config, "num_experts_per_tok", most=count),
        ffn=ffn,
        shared_ffn=ffn * _number(config, "n_shared_experts", 0, least=0, most=MOST_COUNTED),
        selection_bias=traits.selection_bias,
        mixtral_names=own == "num_local_experts",
    )


def _number(config: Document, name: str, default: int | None = None, least: int = 1, most: int = MOST_SIZE) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UnknownArchitecture(f"{name} is {value!r}, expected a whole number from {least} to {most}")
    return value


def _flag(config: Document, name: str) -> bool:
    return config.get(name) is True
