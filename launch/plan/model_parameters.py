"""The parameters of a model in Hugging Face terms: names and shapes, totals, and those that one token uses."""

from collections.abc import Iterator
from math import prod

from launch.plan.architecture import Architecture, Attention, Experts

Named = tuple[str, tuple[int, ...]]


def hf_tensors(model: Architecture) -> Iterator[Named]:
    """(name, shape) of every parameter in the safetensors files, experts one by one, without selection biases."""
    yield "model.embed_tokens.weight", (model.vocabulary, model.hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        for name, shape in _layer(model, model.moe_layers[layer]):
            yield prefix + name, shape
    yield "model.norm.weight", (model.hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocabulary, model.hidden)


def count(model: Architecture) -> int:
    """Parameters in all; a tied output layer counts once."""
    return sum(prod(shape) for _, shape in hf_tensors(model))


def count_active(model: Architecture) -> int:
    """Parameters that one token passes through: of the experts, only as many as it is routed to."""
    experts = model.experts
    if experts is None:
        return count(model)
    one = 3 * model.hidden * experts.ffn
    return count(model) - sum(model.moe_layers) * (experts.count - experts.per_token) * one


def _layer(model: Architecture, moe: bool) -> Iterator[Named]:
    yield "input_layernorm.weight", (model.hidden,)
    yield from _attention(model)
    yield "post_attention_layernorm.weight", (model.hidden,)
    if moe and model.experts is not None:
        yield from _experts(model, model.experts)
    else:
        yield from _gated("mlp.", model.hidden, model.ffn, model.mlp_bias)


def _attention(model: Architecture) -> Iterator[Named]:
    a, hidden, prefix = model.attention, model.hidden, "self_attn."
    if isinstance(a, Attention):
        sizes = {"q_proj": a.heads * a.head_dim, "k_proj": a.kv_heads * a.head_dim, "v_proj": a.kv_heads * a.head_dim}
        for name, size in sizes.items():
            yield f"{prefix}{name}.weight", (size, hidden)
            if a.qkv_bias:
                yield f"{prefix}{name}.bias", (size,)
        yield prefix + "o_proj.weight", (hidden, a.heads * a.head_dim)
        if a.output_bias:
            yield prefix + "o_proj.bias", (hidden,)
        if a.qk_norm:
            yield prefix + "q_norm.weight", (a.head_dim,)
            yield prefix + "k_norm.weight", (a.head_dim,)
        return
    if a.q_rank is None:
        yield prefix + "q_proj.weight", (a.heads * a.qk_dim, hidden)
    else:
        yield prefix + "q_a_proj.weight", (a.q_rank, hidden)
        yield prefix + "q_a_layernorm.weight", (a.q_rank,)
        yield prefix + "q_b_proj.weight", (a.heads * a.qk_dim, a.q_rank)
    yield prefix + "kv_a_proj_with_mqa.weight", (a.kv_rank + a.rope_dim, hidden)
    yield prefix + "kv_a_layernorm.weight", (a.kv_rank,)
    yield prefix + "kv_b_proj.weight", (a.heads * (a.nope_dim + a.value_dim), a.kv_rank)
    yield prefix + "o_proj.weight", (hidden, a.heads * a.value_dim)


def _experts(model: Architecture, experts: Experts) -> Iterator[Named]:
    hidden = model.hidden
    block = "block_sparse_moe." if experts.mixtral_names else "mlp."
    yield block + "gate.weight", (experts.count, hidden)
    for n in range(experts.count):
        prefix = f"{block}experts.{n}."
        if experts.mixtral_names:
            yield prefix + "w1.weight", (experts.ffn, hidden)
            yield prefix + "w2.weight", (hidden, experts.ffn)
            yield prefix + "w3.weight", (experts.ffn, hidden)
        else:
            yield from _gated(prefix, hidden, experts.ffn)
    if experts.shared_ffn:
        yield from _gated("mlp.shared_experts.", hidden, experts.shared_ffn)


def _gated(prefix: str, hidden: int, ffn: int, bias: bool = False) -> Iterator[Named]:
    shapes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", shape
        if bias:
            yield f"{prefix}{name}.bias", shape[:1]
