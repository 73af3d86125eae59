"""A model cut over ranks: which ranks work together, which layers a pipeline stage has, which parameters a rank has.

Ranks are in Megatron's order tp-cp-ep-dp-pp. Megatron numbers them twice. For the dense part of the model,
rank = t + T (c + C (d + D p)). For the experts, rank = t' + T' (e + E (d' + D' p)). Letters are tensor, context, data
and pipeline coordinates, capitals their sizes. T' is expert_tensor, and D' is the size that is left for expert-data
parallelism.

Parameters have two names: that of Hugging Face, and that of Megatron-Core on one rank. One table has both. Every row is
a parameter of Megatron's GPTModel with Transformer Engine's layer spec, where a layer norm belongs to the linear layer
behind it. The row lists the Hugging Face tensors that the parameter is made of.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from common.config.architecture import Architecture, Attention, LatentAttention
from common.config.lora import LoraConfig
from common.config.parallel_layout import layers_per_stage
from common.config.schema import ParallelConfig

DENSE = ("tensor", "context", "data", "pipeline")
SPARSE = ("expert_tensor", "expert", "expert_data", "pipeline")
# other: norms, biases and routers
KINDS: tuple[str, ...] = ("embeddings", "attention", "dense", "experts", "other", "adapters")
Shapes = dict[str, tuple[int, ...]]  # Hugging Face names without the layer's prefix


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of all kinds of groups; `data` and `expert_data` are what the world leaves."""

    world: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int

    @classmethod
    def of(cls, world: int, parallel: ParallelConfig) -> "Sizes":
        """For a world that the layout divides (common.config.parallel_layout.world_problems)."""
        given = {axis: getattr(parallel, axis) for axis in ("tensor", "context", "pipeline", "expert_tensor", "expert")}
        expert_data = world // (parallel.pipeline * parallel.expert * parallel.expert_tensor)
        return cls(world=world, data=world // parallel.model_ranks, expert_data=expert_data, **given)

    @property
    def dense_shards(self) -> int:
        """Ranks that share the optimizer states of dense parameters: data x context."""
        return self.data * self.context


class GroupKind(msgspec.Struct, frozen=True):
    """All groups of one kind; together they have every rank once."""

    name: str
    size: int
    groups: list[tuple[int, ...]]
    nodes: int  # that the widest of them spans


def group_kinds(sizes: Sizes, gpus_per_node: int, with_experts: bool) -> Iterator[GroupKind]:
    """Every kind of process group of a layout; those of experts only for a model that has some."""
    kinds = [(axes, DENSE) for axes in (("tensor",), ("context",), ("pipeline",), ("data",), ("data", "context"))]
    if with_experts:
        kinds += [((axis,), SPARSE) for axis in SPARSE[:-1]]
    for axes, order in kinds:
        groups = rank_groups(sizes, axes, order)
        nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
        yield GroupKind(" x ".join(axes), len(groups[0]), groups, nodes)


def rank_groups(sizes: Sizes, axes: tuple[str, ...], order: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Groups of the ranks that differ only in `axes`, some names of `order` (DENSE or SPARSE); all ascend."""
    slowest_first = order[::-1]
    ranks = np.arange(sizes.world).reshape([getattr(sizes, name) for name in slowest_first])
    inside = [i for i, name in enumerate(slowest_first) if name in axes]
    together = np.moveaxis(ranks, inside, range(-len(inside), 0))
    size = prod(getattr(sizes, name) for name in axes)
    return [tuple(group) for group in together.reshape(-1, size).tolist()]


def stage_chunks(layers: int, parallel: ParallelConfig) -> list[list[range]]:
    """[pipeline rank][virtual stage] -> layer numbers from 0; raises as layers_per_stage does."""
    sizes = layers_per_stage(layers, parallel)
    virtual = parallel.virtual_pipeline
    edges = accumulate((size // virtual for size in sizes * virtual), initial=0)
    chunks = [range(first, end) for first, end in pairwise(edges)]  # in the order in which a batch passes them
    return [chunks[stage :: len(sizes)] for stage in range(len(sizes))]


class Parameter(msgspec.Struct, frozen=True):
    """`elements` on this rank; `shared` marks the two copies of a tied embedding, which get a bucket of their own."""

    name: str
    elements: int
    kind: str
    shared: bool = False


class _Row(NamedTuple):
    """A parameter of one layer; `cut` is the size of ParallelConfig that divides it, '' for none."""

    name: str
    kind: str
    cut: str
    tensors: Shapes


def hf_tensors(model: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter in the safetensors files, experts one by one, without selection biases."""
    yield "model.embed_tokens.weight", (model.vocabulary, model.hidden)
    experts = model.experts.count if model.experts else 0
    for layer, moe in enumerate(model.moe_layers):
        for row in _layer(model, moe, experts):
            for name, shape in row.tensors.items():
                yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (model.hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocabulary, model.hidden)


def count(model: Architecture) -> int:
    """Parameters in all; a tied output layer counts once."""
    return sum(prod(shape) for _, shape in hf_tensors(model))


def count_active(model: Architecture) -> int:
    """Parameters that one token passes through: of the experts, only as many as it is routed to."""
    if model.experts is None:
        return count(model)
    idle = sum(model.moe_layers) * (model.experts.count - model.experts.per_token)
    return count(model) - idle * 3 * model.hidden * model.experts.ffn


def count_adapters(model: Architecture, lora: LoraConfig) -> int:
    """Parameters of all adapters."""
    every = chunk_parameters(model, ParallelConfig(), range(model.layers), True, True, lora)
    return sum(parameter.elements for parameter in every if parameter.kind == "adapters")


def chunk_parameters(
    model: Architecture,
    parallel: ParallelConfig,
    layers: range,
    first: bool,
    last: bool,
    lora: LoraConfig | None = None,
) -> Iterator[Parameter]:
    """Parameters of one model chunk on one rank, in the order of Megatron's named_parameters().

    The first chunk has the embedding, the last one the final norm and the output layer. Layers count from 0.
    Ranks that differ only in tensor, context, data or expert coordinates have equally many parameters.
    """
    table = model.vocabulary * model.hidden // parallel.tensor
    shared = model.tied and parallel.pipeline > 1
    experts = model.experts.count // parallel.expert if model.experts else 0
    targets, rank = (lora.targets, lora.rank) if lora is not None else ([], 0)
    if first:
        yield Parameter("embedding.word_embeddings.weight", table, "embeddings", shared)
    for number, layer in enumerate(layers):
        for row in _layer(model, model.moe_layers[layer], experts):
            whole = sum(map(prod, row.tensors.values()))
            elements = whole // (getattr(parallel, row.cut) if row.cut else 1)
            module, _, name = f"decoder.layers.{number}.{row.name}".rpartition(".")
            adapted = row.name.split(".")[1] in targets
            yield Parameter(f"{module}.to_wrap.{name}" if adapted else f"{module}.{name}", elements, row.kind)
            if adapted and name == "weight":
                inputs = next(iter(row.tensors.values()))[1]
                for side, size in (("in", inputs), ("out", whole // inputs)):
                    part = rank * size // parallel.tensor
                    yield Parameter(f"{module}.adapter.linear_{side}.weight", part, "adapters")
    if last:
        yield Parameter("decoder.final_layernorm.weight", model.hidden, "other")
        if not (model.tied and first):
            yield Parameter("output_layer.weight", table, "embeddings", shared)


def _layer(model: Architecture, moe: bool, local_experts: int) -> Iterator[_Row]:
    """The rows of one layer with its first `local_experts` experts."""
    hidden = model.hidden
    norm = {"post_attention_layernorm.weight": (hidden,)}
    if isinstance(model.attention, Attention):
        yield from _attention(model.attention, hidden)
    else:
        yield from _latent_attention(model.attention, hidden)
    if not moe or model.experts is None:
        yield _Row("mlp.linear_fc1.layer_norm_weight", "other", "", norm)
        yield from _gated("mlp.", hidden, model.ffn, model.mlp_bias)
        return
    experts = model.experts
    block = "block_sparse_moe" if experts.mixtral_names else "mlp"
    gate, up, down = ("w1", "w3", "w2") if experts.mixtral_names else ("gate_proj", "up_proj", "down_proj")
    wide = (experts.ffn, hidden)
    narrow = (hidden, experts.ffn)
    yield _Row("pre_mlp_layernorm.weight", "other", "", norm)
    yield _Row("mlp.router.weight", "other", "", {f"{block}.gate.weight": (experts.count, hidden)})
    for layer, shapes in (("linear_fc1", {gate: wide, up: wide}), ("linear_fc2", {down: narrow})):
        for n in range(local_experts):
            tensors = {f"{block}.experts.{n}.{name}.weight": shape for name, shape in shapes.items()}
            yield _Row(f"mlp.experts.{layer}.weight{n}", "experts", "expert_tensor", tensors)
    if experts.shared_ffn:
        yield from _gated("mlp.shared_experts.", hidden, experts.shared_ffn)


def _attention(a: Attention, hidden: int) -> Iterator[_Row]:
    ours = "self_attention."
    theirs = "self_attn."
    out = a.heads * a.head_dim
    qkv = {"q_proj": out, "k_proj": a.kv_heads * a.head_dim, "v_proj": a.kv_heads * a.head_dim}
    yield _Row(f"{ours}linear_proj.weight", "attention", "tensor", {f"{theirs}o_proj.weight": (hidden, out)})
    if a.output_bias:
        yield _Row(f"{ours}linear_proj.bias", "other", "", {f"{theirs}o_proj.bias": (hidden,)})
    yield _Row(f"{ours}linear_qkv.layer_norm_weight", "other", "", {"input_layernorm.weight": (hidden,)})
    weights: Shapes = {f"{theirs}{name}.weight": (size, hidden) for name, size in qkv.items()}
    yield _Row(f"{ours}linear_qkv.weight", "attention", "tensor", weights)
    if a.qkv_bias:
        biases: Shapes = {f"{theirs}{name}.bias": (size,) for name, size in qkv.items()}
        yield _Row(f"{ours}linear_qkv.bias", "other", "tensor", biases)
    for side in "qk" if a.qk_norm else "":
        yield _Row(f"{ours}{side}_layernorm.weight", "other", "", {f"{theirs}{side}_norm.weight": (a.head_dim,)})


def _latent_attention(a: LatentAttention, hidden: int) -> Iterator[_Row]:
    """Down projections are whole on every tensor-parallel rank."""

    def row(name: str, kind: str, cut: str, theirs: str, *shape: int) -> _Row:
        return _Row(f"self_attention.{name}", kind, cut, {f"self_attn.{theirs}.weight": shape})

    queries = a.heads * a.qk_dim
    up = a.heads * (a.nope_dim + a.value_dim)
    yield _Row("input_layernorm.weight", "other", "", {"input_layernorm.weight": (hidden,)})
    yield row("linear_proj.weight", "attention", "tensor", "o_proj", hidden, a.heads * a.value_dim)
    if a.q_rank is None:
        yield row("linear_q_proj.weight", "attention", "tensor", "q_proj", queries, hidden)
    else:
        yield row("linear_q_down_proj.weight", "attention", "", "q_a_proj", a.q_rank, hidden)
        yield row("linear_q_up_proj.layer_norm_weight", "other", "", "q_a_layernorm", a.q_rank)
        yield row("linear_q_up_proj.weight", "attention", "tensor", "q_b_proj", queries, a.q_rank)
    yield row("linear_kv_down_proj.weight", "attention", "", "kv_a_proj_with_mqa", a.kv_rank + a.rope_dim, hidden)
    yield row("linear_kv_up_proj.layer_norm_weight", "other", "", "kv_a_layernorm", a.kv_rank)
    yield row("linear_kv_up_proj.weight", "attention", "tensor", "kv_b_proj", up, a.kv_rank)


def _gated(prefix: str, hidden: int, ffn: int, bias: bool = False) -> Iterator[_Row]:
    for layer, names, shape, bias_cut in (
        ("linear_fc1", ("gate_proj", "up_proj"), (ffn, hidden), "tensor"),
        ("linear_fc2", ("down_proj",), (hidden, ffn), ""),
    ):
        yield _Row(f"{prefix}{layer}.weight", "dense", "tensor", {f"{prefix}{n}.weight": shape for n in names})
        if bias:
            yield _Row(f"{prefix}{layer}.bias", "other", bias_cut, {f"{prefix}{n}.bias": shape[:1] for n in names})
