"""Bytes of activations that a rank keeps for the backward pass, in the manner of Korthikanti et al. (arXiv 2205.05198).

Their equation 2, s b h (34 + 5 a s / h) / t per layer, counts a feed-forward of 4 h without gate. It also counts
dropout masks and the attention matrix, which are absent here: flash attention keeps a log-sum-exp per head instead. The
other tensors are counted one by one below, so that grouped queries, gates and experts are covered as well. For their
layer the sum is their 32 s b h / t (tests/unit/launch/test_plan_memory.py).
"""

import msgspec

from common.config.schema import MemoryConfig, ParallelConfig
from launch.plan.architecture import Architecture, Attention
from launch.plan.process_groups import stage_chunks

FLOAT32 = 4
CHUNK_ELEMENTS = 1 << 26  # logits that a GPU computes at once (learner.megatron.logprobs)


class Activations(msgspec.Struct, frozen=True):
    """Peak bytes on one rank of a pipeline stage.

    Attributes:
        layers: activations that the layers keep for all microbatches in flight.
        recomputed: one layer's own activations while it is computed again (full recomputation).
        output: activations of the final norm and the output layer for one microbatch; 0 except on the last stage.
        in_flight: microbatches whose activations are kept at once, in units of the whole stage.
    """

    layers: int
    recomputed: int
    output: int
    in_flight: float

    @property
    def total(self) -> int:
        return self.layers + self.recomputed + self.output


def activations(
    model: Architecture,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    micro_batch_tokens: int,
    microbatches: int,
    item_bytes: int,
) -> list[Activations]:
    """Peak of each pipeline stage for full microbatches.

    Args:
        micro_batch_tokens: tokens of one microbatch, before context parallelism cuts it.
        microbatches: number in one step on one data-parallel rank.
        item_bytes: bytes of an activation, 2 in bfloat16.
    """
    tokens = -(-micro_batch_tokens // parallel.context)
    shards = parallel.tensor if parallel.sequence_parallel else 1
    out: list[Activations] = []
    stages = stage_chunks(model.layers, parallel)
    for stage, chunks in enumerate(stages):
        layers = [layer for chunk in chunks for layer in chunk]
        sizes = [layer_bytes(model, parallel, model.moe_layers[n], tokens, item_bytes) for n in layers]
        kept = sum(sizes)
        again = 0
        if memory.recompute == "full":  # a layer keeps its input alone
            kept, again = len(layers) * tokens * model.hidden * item_bytes // shards, max(sizes, default=0)
        held = in_flight(stage, parallel, microbatches)
        output = output_bytes(model, parallel, tokens, item_bytes) if stage == len(stages) - 1 else 0
        out.append(Activations(round(kept * held), again, output, held))
    return out


def output_bytes(model: Architecture, parallel: ParallelConfig, tokens: int, item_bytes: int) -> int:
    """Peak of final norm, output layer and loss in the backward pass, which takes logits in chunks.

    Args:
        tokens: number on this context-parallel rank.
    """
    width = model.vocabulary // parallel.tensor
    shards = parallel.tensor if parallel.sequence_parallel else 1
    norm = 2 * tokens * model.hidden * item_bytes // shards
    hidden = 2 * tokens * model.hidden * item_bytes  # whole on every tensor-parallel rank, and its gradient
    weight = width * model.hidden * (FLOAT32 + item_bytes)  # its gradient, and one chunk's part of it
    chunk = 2 * min(max(CHUNK_ELEMENTS, width), tokens * width) * FLOAT32  # log-probabilities and probabilities
    return norm + hidden + weight + chunk


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


def layer_bytes(model: Architecture, parallel: ParallelConfig, moe: bool, tokens: int, item_bytes: int) -> int:
    """Bytes that one layer keeps for one microbatch.

    Args:
        tokens: number on this context-parallel rank.
    """
    t = parallel.tensor
    shards = t if parallel.sequence_parallel else 1
    # input and output of both norms; sequence parallelism keeps them cut and gathers them again (section 4.2.2)
    elements = 4 * model.hidden / shards + _attention_elements(model) / t
    float32 = model.attention.heads / t  # log-sum-exp
    if not moe or model.experts is None:
        elements += 3 * model.ffn / t  # gate and up projection, and their product
    else:
        e = model.experts
        float32 += 2 * e.count / shards  # router's logits and probabilities
        # each token is sent to per_token experts; a rank gets as many as it sends when they are balanced
        elements += e.per_token / shards * (model.hidden * parallel.expert_tensor + 3 * e.ffn)
        elements += 3 * e.shared_ffn / t
    return round(tokens * (elements * item_bytes + float32 * FLOAT32))


def _attention_elements(model: Architecture) -> int:
    """Per token, before tensor parallelism: what the attention kernel and the output projection need again."""
    a = model.attention
    if isinstance(a, Attention):
        return (a.heads + 2 * a.kv_heads) * a.head_dim + a.heads * a.head_dim
    compressed = 2 * (a.q_rank or 0) + 2 * a.kv_rank + a.rope_dim  # before and after their norms
    return compressed + a.heads * (2 * a.qk_dim + a.nope_dim + 2 * a.value_dim)
