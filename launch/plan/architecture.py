"""The shape of a decoder as its Hugging Face config.json gives it, in one form for all architectures."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import msgspec

Document = Mapping[str, object]


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
    """A decoder with RMSNorm, rotary positions and gated feed-forward layers.

    Attributes:
        kind: model_type in config.json.
        moe_layers: whether each layer has experts instead of a dense feed-forward.
        tied: the output layer is the embedding.
        mlp_bias: biases in the dense feed-forward layers.
    """

    kind: str
    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    tied: bool
    positions: int
    attention: Attention | LatentAttention
    experts: Experts | None
    moe_layers: tuple[bool, ...]
    mlp_bias: bool = False


class UnknownArchitecture(ValueError):
    """A config.json that the planner cannot count; says why."""


def read_architecture(config: Document) -> Architecture:
    """The shape that a config.json describes.

    Raises:
        UnknownArchitecture: another model_type than those in READERS, or a number is missing.
    """
    kind = config.get("model_type")
    if kind not in READERS:
        raise UnknownArchitecture(f"model_type {kind!r}; the planner counts {', '.join(READERS)}")
    return READERS[cast("str", kind)](config)


def _dense(config: Document, qk_norm: bool = False, qkv_bias: bool = False) -> Architecture:
    return _architecture(config, _attention(config, qk_norm, qkv_bias), None, lambda _: False)


def _mixtral(config: Document) -> Architecture:
    experts = _experts(config, "num_local_experts", "intermediate_size", mixtral_names=True)
    return _architecture(config, _attention(config), experts, lambda _: True)


def _qwen3_moe(config: Document) -> Architecture:
    dense = cast("list[int]", config.get("mlp_only_layers") or [])
    every = _positive(config, "decoder_sparse_step", 1)
    experts = _experts(config, "num_experts", "moe_intermediate_size")
    attention = _attention(config, qk_norm=True)
    return _architecture(config, attention, experts, lambda n: n not in dense and (n + 1) % every == 0)


def _deepseek_v3(config: Document) -> Architecture:
    attention = LatentAttention(
        heads=_number(config, "num_attention_heads"),
        q_rank=None if config.get("q_lora_rank") is None else _number(config, "q_lora_rank"),
        kv_rank=_number(config, "kv_lora_rank"),
        nope_dim=_number(config, "qk_nope_head_dim"),
        rope_dim=_number(config, "qk_rope_head_dim"),
        value_dim=_number(config, "v_head_dim"),
    )
    return _with_shared_experts(config, attention)


def _glm4_moe(config: Document) -> Architecture:
    attention = _attention(config, qk_norm=_flag(config, "use_qk_norm"))
    return _with_shared_experts(config, msgspec.structs.replace(attention, output_bias=False))


def _with_shared_experts(config: Document, attention: Attention | LatentAttention) -> Architecture:
    """A decoder whose first layers are dense, with shared experts and a selection bias in the others."""
    experts = _experts(config, "n_routed_experts", "moe_intermediate_size", selection_bias=True)
    shared_ffn = experts.ffn * _number(config, "n_shared_experts", 0)
    dense = _number(config, "first_k_dense_replace", 0)
    experts = msgspec.structs.replace(experts, shared_ffn=shared_ffn)
    return _architecture(config, attention, experts, lambda n: n >= dense)


READERS: dict[str, Callable[[Document], Architecture]] = {
    "qwen2": partial(_dense, qkv_bias=True),
    "qwen3": partial(_dense, qk_norm=True),
    "llama": _dense,
    "mistral": _dense,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}


def _attention(config: Document, qk_norm: bool = False, qkv_bias: bool = False) -> Attention:
    heads = _positive(config, "num_attention_heads")
    both = _flag(config, "attention_bias")
    return Attention(
        heads=heads,
        kv_heads=_positive(config, "num_key_value_heads", heads),
        head_dim=_number(config, "head_dim", _number(config, "hidden_size") // heads),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias or both,
        output_bias=both,
    )


def _experts(config: Document, count: str, ffn: str, **traits: bool) -> Experts:
    """Routed experts; `count` and `ffn` are names in config.json, where transformers 5 may say num_local_experts."""
    return Experts(
        count=_number(config, count if count in config else "num_local_experts"),
        per_token=_number(config, "num_experts_per_tok"),
        ffn=_number(config, ffn),
        **traits,
    )


def _architecture(
    config: Document,
    attention: Attention | LatentAttention,
    experts: Experts | None,
    is_moe: Callable[[int], bool],
) -> Architecture:
    layers = _number(config, "num_hidden_layers")
    return Architecture(
        kind=cast("str", config["model_type"]),
        layers=layers,
        hidden=_number(config, "hidden_size"),
        ffn=_number(config, "intermediate_size"),
        vocabulary=_number(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings"),
        positions=_number(config, "max_position_embeddings"),
        attention=attention,
        experts=experts,
        moe_layers=tuple(is_moe(n) for n in range(layers)),
        mlp_bias=_flag(config, "mlp_bias"),
    )


def _number(config: Document, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnknownArchitecture(f"{name} is {value!r}, expected a whole number")
    return value


def _positive(config: Document, name: str, default: int | None = None) -> int:
    value = _number(config, name, default)
    if value == 0:
        raise UnknownArchitecture(f"{name} is 0, expected at least 1")
    return value


def _flag(config: Document, name: str) -> bool:
    return config.get(name) is True
