"""One rank's parameters as Megatron-Core stores them: names, sizes and what the distributed optimizer makes of them.

Names and shapes are those of Megatron's GPTModel with Transformer Engine's layer spec, where a layer norm belongs to
the linear layer behind it. Ranks that differ only in tensor, context, data or expert coordinates have equally many.
"""

from collections.abc import Iterable, Iterator
from math import lcm

import msgspec

from common.config.schema import ParallelConfig
from launch.plan.architecture import Architecture, Attention, LatentAttention
from launch.plan.process_groups import Sizes

PARAMETER_ALIGNMENT = 64  # elements; ParamAndGradBuffer starts every parameter at a multiple of it
BUCKET_ALIGNMENT = 128  # elements; and ends a bucket at a multiple of it and of the number of shards
KINDS: tuple[str, ...] = ("embeddings", "attention", "dense", "experts", "other")  # other: norms and routers


class Parameter(msgspec.Struct, frozen=True):
    """`elements` on this rank; `shared` marks the two copies of a tied embedding, which get a bucket of their own."""

    name: str
    elements: int
    kind: str
    shared: bool = False


class Share(msgspec.Struct, frozen=True):
    """A buffer of parameters and gradients, cut into equal shards for the optimizer.

    Attributes:
        elements: with the gaps that alignment leaves.
        shard: elements of the fullest shard, without gaps.
    """

    elements: int
    shard: int


def chunk_parameters(
    model: Architecture, parallel: ParallelConfig, layers: range, first: bool, last: bool
) -> list[Parameter]:
    """Parameters of one model chunk on one rank, in the order of Megatron's named_parameters().

    Args:
        layers: numbers of the chunk's layers, from 0.
        first: the chunk has the embedding.
        last: the chunk has the final norm and the output layer.
    """
    out: list[Parameter] = []
    table = model.vocabulary * model.hidden // parallel.tensor
    shared = model.tied and parallel.pipeline > 1
    if first:
        out.append(Parameter("embedding.word_embeddings.weight", table, "embeddings", shared))
    for place, layer in enumerate(layers):
        for name, elements, kind in _layer(model, parallel, model.moe_layers[layer]):
            out.append(Parameter(f"decoder.layers.{place}.{name}", elements, kind))
    if last:
        out.append(Parameter("decoder.final_layernorm.weight", model.hidden, "other"))
        if not (model.tied and first):
            out.append(Parameter("output_layer.weight", table, "embeddings", shared))
    return out


def dense_and_expert(parameters: Iterable[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters by the buffer that they live in: routed experts have one of their own."""
    dense: list[Parameter] = []
    experts: list[Parameter] = []
    for parameter in parameters:
        (experts if parameter.kind == "experts" else dense).append(parameter)
    return dense, experts


def shares(parameters: Iterable[Parameter], sizes: Sizes) -> tuple[Share, Share]:
    """(dense, experts) buffers of one model chunk."""
    dense, experts = dense_and_expert(parameters)
    return share(dense, sizes.dense_shards), share(experts, sizes.expert_data)


def share(parameters: list[Parameter], shards: int) -> Share:
    """The buffer that Megatron's ParamAndGradBuffer makes of `parameters`, in one bucket but for shared embeddings."""
    buckets: list[list[tuple[int, int]]] = [[]]
    start = at = 0

    def close() -> None:
        nonlocal start, at
        unit = lcm(shards, BUCKET_ALIGNMENT)
        buckets[-1].append((start, at := -(-at // unit) * unit))  # last entry: the bucket's own bounds
        start = at
        buckets.append([])

    for parameter in reversed(parameters):  # roughly the order of the backward pass
        at = -(-at // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        if parameter.shared and buckets[-1]:
            close()
        buckets[-1].append((at, at + parameter.elements))
        at += parameter.elements
        if parameter.shared:
            close()
    if buckets[-1]:
        close()
    full = [0] * shards
    for bucket in buckets[:-1]:
        *spans, (begin, end) = bucket
        width = (end - begin) // shards
        for a, b in spans:
            for rank in range((a - begin) // width, (b - begin - 1) // width + 1):
                low = begin + rank * width
                full[rank] += min(b, low + width) - max(a, low)
    return Share(at, max(full, default=0))


def _layer(model: Architecture, parallel: ParallelConfig, moe: bool) -> Iterator[tuple[str, int, str]]:
    hidden, tensor = model.hidden, parallel.tensor
    if isinstance(model.attention, Attention):
        yield from _attention(model.attention, hidden, tensor)
    else:
        yield from _latent_attention(model.attention, hidden, tensor)
    if not moe or model.experts is None:
        yield "mlp.linear_fc1.layer_norm_weight", hidden, "other"
        yield from _gated("mlp.", hidden, model.ffn, tensor, "dense", model.mlp_bias)
        return
    experts = model.experts
    yield "pre_mlp_layernorm.weight", hidden, "other"
    yield "mlp.router.weight", experts.count * hidden, "other"
    here, width = experts.count // parallel.expert, experts.ffn // parallel.expert_tensor
    for layer, size in (("linear_fc1", 2 * width * hidden), ("linear_fc2", width * hidden)):
        for n in range(here):
            yield f"mlp.experts.{layer}.weight{n}", size, "experts"
    if experts.shared_ffn:
        yield from _gated("mlp.shared_experts.", hidden, experts.shared_ffn, tensor, "dense", False)


def _attention(a: Attention, hidden: int, tensor: int) -> Iterator[tuple[str, int, str]]:
    prefix = "self_attention."
    yield prefix + "linear_proj.weight", hidden * a.heads * a.head_dim // tensor, "attention"
    if a.output_bias:
        yield prefix + "linear_proj.bias", hidden, "other"
    width = (a.heads + 2 * a.kv_heads) * a.head_dim // tensor
    yield prefix + "linear_qkv.layer_norm_weight", hidden, "other"
    yield prefix + "linear_qkv.weight", width * hidden, "attention"
    if a.qkv_bias:
        yield prefix + "linear_qkv.bias", width, "other"
    if a.qk_norm:
        yield prefix + "q_layernorm.weight", a.head_dim, "other"
        yield prefix + "k_layernorm.weight", a.head_dim, "other"


def _latent_attention(a: LatentAttention, hidden: int, tensor: int) -> Iterator[tuple[str, int, str]]:
    """Down projections are whole on every tensor-parallel rank."""
    prefix, queries = "self_attention.", a.heads * a.qk_dim // tensor
    yield "input_layernorm.weight", hidden, "other"
    yield prefix + "linear_proj.weight", hidden * a.heads * a.value_dim // tensor, "attention"
    if a.q_rank is None:
        yield prefix + "linear_q_proj.weight", queries * hidden, "attention"
    else:
        yield prefix + "linear_q_down_proj.weight", a.q_rank * hidden, "attention"
        yield prefix + "linear_q_up_proj.layer_norm_weight", a.q_rank, "other"
        yield prefix + "linear_q_up_proj.weight", queries * a.q_rank, "attention"
    yield prefix + "linear_kv_down_proj.weight", (a.kv_rank + a.rope_dim) * hidden, "attention"
    yield prefix + "linear_kv_up_proj.layer_norm_weight", a.kv_rank, "other"
    yield prefix + "linear_kv_up_proj.weight", a.heads * (a.nope_dim + a.value_dim) // tensor * a.kv_rank, "attention"


def _gated(prefix: str, hidden: int, ffn: int, tensor: int, kind: str, bias: bool) -> Iterator[tuple[str, int, str]]:
    yield prefix + "linear_fc1.weight", 2 * ffn * hidden // tensor, kind
    if bias:
        yield prefix + "linear_fc1.bias", 2 * ffn // tensor, "other"
    yield prefix + "linear_fc2.weight", ffn * hidden // tensor, kind
    if bias:
        yield prefix + "linear_fc2.bias", hidden, "other"
