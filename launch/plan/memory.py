"""Bytes that a rank needs: parameters, gradients, optimizer states, and activations kept for the backward pass.

Activations are counted in the manner of Korthikanti et al. (arXiv 2205.05198). Their equation 2,
s b h (34 + 5 a s / h) / t per layer, counts a feed-forward of 4 h without gate. It also counts dropout masks and the
attention matrix, which are absent here: flash attention keeps a log-sum-exp per head instead. The other tensors are
counted one by one below, so that grouped queries, gates and experts are covered as well. For their layer the sum is
their 32 s b h / t (tests/unit/launch/test_plan_memory.py).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import lcm
from typing import Literal

import msgspec
import numpy as np

from common.config.architecture import Architecture, Attention
from common.config.lora import LoraConfig
from common.config.schema import MemoryConfig, ParallelConfig
from launch.plan.layout import KINDS, Parameter, Sizes, chunk_parameters, stage_chunks

FLOAT32 = 4
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # always float32
ADAM_BYTES = 8  # two float32 states
MAIN_BYTES = {"float32": 0, "bfloat16": 4}  # float32 copy of a shard; float32 parameters are their own
PARAMETER_ALIGNMENT = 64  # elements; ParamAndGradBuffer starts every parameter at a multiple of it
BUCKET_ALIGNMENT = 128  # elements; and ends a bucket at a multiple of it and of the number of shards
# H100, H200 and B200 as the driver reports them
DEVICES = {"80 GB": 79.6 * (1 << 30), "141 GB": 139.8 * (1 << 30), "192 GB": 179.1 * (1 << 30)}
HEADROOM = 0.10  # left for the CUDA context, communication buffers and fragmentation
# Gate and up projection, the gate's activation, the up projection plus Megatron's offset of 0, and the product of both
GATED = 5
Entropy = Literal["none", "measured", "trained"]  # "trained": it is in the loss
CHUNK_ELEMENTS = 1 << 28  # logits that learner.megatron.logprobs computes at once on a GPU


def fits(needed: float, device: float) -> bool:
    return needed <= device * (1 - HEADROOM)


class Resident(msgspec.Struct, frozen=True):
    """One rank of a pipeline stage; bytes, gaps of alignment included."""

    elements: dict[str, int]  # parameters by kind (launch.plan.layout.KINDS)
    parameters: int
    gradients: int
    optimizer: int  # main parameters and Adam's states of the fullest shard


class Activations(msgspec.Struct, frozen=True):
    """Peak bytes on one rank of a pipeline stage."""

    layers: int  # those of its layers, for all microbatches in flight
    recomputed: int  # one layer's own while it is computed again (full recomputation)
    output: int  # final norm and output layer for one microbatch; 0 except on the last stage
    in_flight: float  # microbatches that are kept at once, in units of the whole stage


def resident(
    model: Architecture, parallel: ParallelConfig, sizes: Sizes, dtype: str, lora: LoraConfig | None = None
) -> Iterator[Resident]:
    """Resident bytes on a rank of each pipeline stage. With `lora` only adapters have gradients and states.

    The distributed optimizer shards main parameters and Adam's states over data x context ranks. It shards those of
    experts, which have a buffer of their own, over the expert-data ranks (ZeRO stage 1, arXiv 1910.02054).
    """
    stages = stage_chunks(model.layers, parallel)
    for stage, chunks in enumerate(stages):
        elements = dict.fromkeys(KINDS, 0)
        whole = fullest = frozen = 0
        for v, layers in enumerate(chunks):
            last = stage == len(stages) - 1 and v == len(chunks) - 1
            parameters = [*chunk_parameters(model, parallel, layers, stage == v == 0, last, lora)]
            for parameter in parameters:
                elements[parameter.kind] += parameter.elements
            if lora is not None:
                frozen += sum(p.elements for p in parameters if p.kind != "adapters")
                parameters = [p for p in parameters if p.kind == "adapters"]
            for experts, shards in ((False, sizes.dense_shards), (True, sizes.expert_data)):
                size, shard = buffer([p for p in parameters if (p.kind == "experts") == experts], shards)
                whole += size
                fullest += shard
        optimizer = fullest * (ADAM_BYTES + MAIN_BYTES[dtype])
        yield Resident(elements, (whole + frozen) * ITEM_BYTES[dtype], whole * GRADIENT_BYTES, optimizer)


def buffer(parameters: Sequence[Parameter], shards: int) -> tuple[int, int]:
    """(elements with the gaps of alignment, elements of the fullest shard without) of Megatron's ParamAndGradBuffer.

    It is one bucket, but shared embeddings have buckets of their own. Each bucket is cut into `shards` equal parts.
    """
    at = 0
    full = np.zeros(shards, dtype=np.int64)
    backward = reversed(parameters)  # roughly the order of the backward pass
    for _, bucket in groupby(backward, lambda p: p.name if p.shared else ""):
        begin = at
        spans: list[tuple[int, int]] = []
        for parameter in bucket:
            at = _aligned(at, PARAMETER_ALIGNMENT)
            spans.append((at, at + parameter.elements))
            at += parameter.elements
        at = _aligned(at, lcm(shards, BUCKET_ALIGNMENT))
        low = np.linspace(begin, at, shards, endpoint=False, dtype=np.int64)
        for start, end in spans:
            full += np.clip(np.minimum(end, low + (at - begin) // shards) - np.maximum(start, low), 0, None)
    return at, int(full.max())


def _aligned(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def activations(
    model: Architecture,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    tokens: int,
    microbatches: int,
    item: int,
    lora: LoraConfig | None = None,
    entropy: Entropy = "none",
) -> Iterator[Activations]:
    """Peak of each pipeline stage when every data-parallel rank has `microbatches` full ones in a step.

    Each has `tokens`, before context parallelism cuts it; an activation has `item` bytes.
    """
    tokens = -(-tokens // parallel.context)
    stages = stage_chunks(model.layers, parallel)
    for stage, chunks in enumerate(stages):
        layers = [layer for chunk in chunks for layer in chunk]
        more = tokens * adapter_elements(model, parallel, lora) * item if lora is not None else 0
        sizes = [layer_bytes(model, parallel, model.moe_layers[n], tokens, item) + more for n in layers]
        kept = sum(sizes)
        again = 0
        if memory.recompute == "full":  # a layer keeps its input alone
            kept = len(layers) * tokens * model.hidden * item // _sequence_shards(parallel)
            again = max(sizes, default=0)
        flying = in_flight(stage, parallel, microbatches)
        output = 0
        if stage == len(stages) - 1:
            output = output_bytes(model, parallel, tokens, item, lora is not None, entropy)
        yield Activations(round(kept * flying), again, output, flying)


def _sequence_shards(parallel: ParallelConfig) -> int:
    """Ranks among which sequence parallelism cuts norms and residuals."""
    return parallel.tensor if parallel.sequence_parallel else 1


def output_bytes(
    model: Architecture,
    parallel: ParallelConfig,
    tokens: int,
    item: int,
    frozen: bool = False,
    entropy: Entropy = "none",
) -> int:
    """Peak of final norm, output layer and loss for this rank's `tokens`, as if all of them were in the loss.

    A `frozen` output layer has no gradient. An entropy takes two float32 tensors of a chunk's logits at once. It does
    so in the forward pass, before the weight's gradient exists, and in the backward pass if the loss has it.
    """
    width = model.vocabulary // parallel.tensor
    norm = 2 * tokens * model.hidden * item // _sequence_shards(parallel)
    hidden = 2 * tokens * model.hidden * item  # whole on every tensor-parallel rank, and its gradient
    chunk = min(max(CHUNK_ELEMENTS, width), tokens * width)
    rounded = item if item < FLOAT32 else 0  # products are computed in this type, and copied to float32
    one, two = chunk * (FLOAT32 + rounded), chunk * 2 * FLOAT32
    forward = one if entropy == "none" else two
    weight = 0 if frozen else width * model.hidden
    last = weight * rounded + chunk * item  # a chunk's part of the weight's gradient, when its logits are gone
    backward = weight * FLOAT32 + max(two if entropy == "trained" else one, last)
    return norm + hidden + max(forward, backward)


def adapter_elements(model: Architecture, parallel: ParallelConfig, lora: LoraConfig) -> int:
    """Elements of one token that the adapters of a layer keep besides what the layer keeps.

    A's output is whole on every tensor-parallel rank. Under sequence parallelism an adapter behind a norm keeps its
    gathered input, too.
    """
    gathered = {"linear_qkv", "linear_fc1"} & set(lora.targets) if parallel.sequence_parallel else ()
    return len(lora.targets) * lora.rank + len(gathered) * model.hidden


def in_flight(stage: int, parallel: ParallelConfig, microbatches: int) -> float:
    """Microbatches whose activations a stage keeps at once, in units of all its layers.

    One forward, one backward (Narayanan et al., arXiv 2104.04473, section 2.2.1): as many as there are stages from it
    to the last. With v virtual stages the warm-up runs 2 (p - stage - 1) + (v - 1) p chunks ahead, each 1 / v of the
    layers.
    """
    p, v = parallel.pipeline, parallel.virtual_pipeline
    if v == 1:
        return min(microbatches, p - stage)
    return min(microbatches * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v


def layer_bytes(model: Architecture, parallel: ParallelConfig, moe: bool, tokens: int, item: int) -> int:
    """Bytes that one layer keeps for this rank's `tokens` of one microbatch."""
    t = parallel.tensor
    shards = _sequence_shards(parallel)
    # input and output of both norms; sequence parallelism keeps them cut and gathers them again (section 4.2.2)
    elements = 4 * model.hidden / shards
    # tensors that the attention kernel and the output projection need again
    a = model.attention
    float32 = a.heads / t  # log-sum-exp
    if isinstance(a, Attention):
        normed = a.heads + a.kv_heads if a.qk_norm else 0  # queries and keys before their norms
        elements += (2 * a.heads + 2 * a.kv_heads + normed) * a.head_dim / t
    else:
        compressed = 2 * (a.q_rank or 0) + 2 * a.kv_rank + a.rope_dim  # before and after their norms
        elements += (compressed + a.heads * (2 * a.qk_dim + a.nope_dim + 2 * a.value_dim)) / t
    if not moe or model.experts is None:
        elements += GATED * model.ffn / t
    else:
        e = model.experts
        float32 += 2 * e.count / shards  # router's logits and probabilities
        # each token is sent to per_token experts; a rank gets as many as it sends when they are balanced
        elements += e.per_token / shards * (model.hidden * parallel.expert_tensor + GATED * e.ffn)
        elements += GATED * e.shared_ffn / t
    return round(tokens * (elements * item + float32 * FLOAT32))
