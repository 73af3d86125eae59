"""Activations and buffers against the papers' formulas and against sums by hand."""

from typing import get_args

import pytest

from common.config.architecture import Architecture, Attention, Experts, LatentAttention
from common.config.lora import LoraConfig
from common.config.schema import MemoryConfig, ParallelConfig
from launch.plan.layout import Sizes, count, count_adapters
from launch.plan.memory import Entropy, activations, in_flight, layer_bytes, output_bytes, resident

H, A = 512, 8


def decoder(**changes: object) -> Architecture:
    values: dict[str, object] = dict(kind="llama", layers=4, hidden=H, ffn=4 * H, vocabulary=1024, tied=False)
    values |= dict(positions=4096, attention=Attention(A, A, H // A), experts=None, moe_layers=(False,) * 4)
    return Architecture(**(values | changes))  # type: ignore[arg-type]


def test_a_layer_of_the_paper_keeps_what_the_paper_says() -> None:
    """Korthikanti et al., equation 2 without its dropout masks (2) and matrix term: 32 s b h / t bytes.

    Their feed-forward of 4 h without gate keeps 2 x 4 h elements, the activation and its input. Ours keeps five
    tensors of ffn, so ffn = 8 h / 5. Without sequence parallelism norms are whole on every rank, as in equation 1:
    s b h (10 + 24 / t). There 8 are the norms' inputs and outputs, and 2 are masks.
    """
    tokens, t = 1024, 4
    model = decoder(hidden=5 * H, ffn=8 * H, attention=Attention(A, A, 5 * H // A))
    log_sum_exp = tokens * A * 4 // t
    for sequence, per_hidden in ((True, 32 // t), (False, 8 + 24 // t)):
        found = layer_bytes(model, ParallelConfig(tensor=t, sequence=sequence), False, tokens, 2)
        assert found == tokens * 5 * H * per_hidden + log_sum_exp


def test_experts_keep_as_many_copies_of_a_token_as_it_is_routed_to() -> None:
    experts = Experts(count=16, per_token=2, ffn=64, shared_ffn=32)
    model = decoder(experts=experts, moe_layers=(True,) * 4)
    attention = (4 * H + 4 * H) * 2 + A * 4
    router = 2 * 16 * 4
    sent = 2 * (H + 5 * 64) * 2
    found = layer_bytes(model, ParallelConfig(), True, 100, 2)
    assert found == 100 * (attention + router + sent + 5 * 32 * 2)


def test_latent_attention_keeps_its_compressed_and_its_expanded_form() -> None:
    a = LatentAttention(heads=4, q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=12)
    model = decoder(attention=a)
    per_token = 4 * H + 5 * 4 * H  # norms, dense feed-forward
    per_token += 2 * 48 + 2 * 32 + 8  # compressed queries and keys before and after their norms, and the shared key
    per_token += 4 * (24 + 24 + 16 + 12 + 12)  # query, key, expanded keys and values, output
    assert layer_bytes(model, ParallelConfig(), False, 10, 2) == 10 * (2 * per_token + 4 * 4)


@pytest.mark.parametrize(
    ("stage", "pipeline", "virtual", "microbatches", "expected"),
    [
        (0, 4, 1, 100, 4),
        (3, 4, 1, 100, 1),
        (0, 4, 1, 2, 2),  # never more than there are
        (0, 1, 1, 5, 1),
        # (1 + (p - 1) / (p v)) of p stages' layers: Korthikanti et al., section 4.2.3, for the first stage
        (0, 4, 2, 100, 4 * (1 + 3 / (4 * 2))),
        (3, 4, 2, 100, 5 / 2),
    ],
)
def test_microbatches_in_flight(stage: int, pipeline: int, virtual: int, microbatches: int, expected: float) -> None:
    parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    assert in_flight(stage, parallel, microbatches) == pytest.approx(expected)


def test_full_recomputation_keeps_inputs_and_one_layer_and_context_parallelism_divides_the_tokens() -> None:
    model, parallel = decoder(), ParallelConfig(pipeline=2)
    full = [*activations(model, parallel, MemoryConfig(recompute="full"), 100, 8, 2)]
    none = [*activations(model, parallel, MemoryConfig(), 100, 8, 2)]
    assert full[0].layers == 2 * 2 * 100 * H * 2  # layers x microbatches x tokens x hidden x bytes
    assert full[0].recomputed == layer_bytes(model, parallel, False, 100, 2) == none[0].layers // 4
    assert none[0].recomputed == 0
    assert full[0].output == 0
    assert full[1].output > 0
    cut = [*activations(model, ParallelConfig(pipeline=2, context=4), MemoryConfig(), 100, 8, 2)]
    assert cut[0].layers * 4 == none[0].layers


def test_the_output_layer_works_in_chunks() -> None:
    model, parallel = decoder(vocabulary=1 << 17), ParallelConfig(tensor=4)
    width, item = (1 << 17) // 4, 2
    norm, hidden, weight = 2 * H * item // 4, 2 * H * item, width * H
    few = 100  # the weight's gradient in both types is more than their logits
    assert output_bytes(model, parallel, few, item) == few * (norm + hidden + width * item) + weight * (4 + item)
    some = 1 << 12  # tokens: 2^27 logits, in both types
    assert output_bytes(model, parallel, some, item) == some * (norm + hidden) + weight * 4 + (1 << 27) * (4 + item)
    many = 1 << 20  # from 2^28 on, logits take no more
    assert output_bytes(model, parallel, many, item) == many * (norm + hidden) + weight * 4 + (1 << 28) * (4 + item)
    assert output_bytes(model, parallel, some, 4) == some * 2 * (norm + hidden) + (weight + (1 << 27)) * 4


@pytest.mark.parametrize(("item", "logit"), [(2, 6), (4, 4)])
def test_an_entropy_takes_two_float32_tensors_of_logits(item: int, logit: int) -> None:
    model, parallel, tokens = decoder(hidden=3 * H, vocabulary=1 << 17), ParallelConfig(), 1 << 12
    rest, weight, chunk = tokens * 4 * 3 * H * item, (1 << 17) * 3 * H, 1 << 28
    found = {
        (frozen, entropy): output_bytes(model, parallel, tokens, item, frozen, entropy) - rest
        for frozen in (False, True)
        for entropy in get_args(Entropy)
    }
    assert found == {
        (False, "none"): 4 * weight + logit * chunk,
        (False, "measured"): max(4 * weight + logit * chunk, 8 * chunk),  # there is no gradient in the forward pass
        (False, "trained"): 4 * weight + 8 * chunk,
        (True, "none"): logit * chunk,
        (True, "measured"): 8 * chunk,
        (True, "trained"): 8 * chunk,
    }
    assert (found[False, "measured"] > found[False, "none"]) == (item == 4), "the backward pass needs more in bfloat16"


def test_adapters_have_the_only_gradients_and_states_and_share_a_over_a_fused_layer() -> None:
    model, lora = decoder(), LoraConfig(rank=8)
    qkv, proj, fc1, fc2 = (H, 3 * H), (H, H), (H, 8 * H), (4 * H, H)
    adapters = 4 * 8 * sum(inputs + outputs for inputs, outputs in (qkv, proj, fc1, fc2))
    assert count_adapters(model, lora) == adapters
    (held,) = resident(model, ParallelConfig(), Sizes.of(1, ParallelConfig()), "bfloat16", lora)
    assert held.parameters == (count(model) + adapters) * 2
    assert held.gradients == adapters * 4
    assert held.optimizer == adapters * (4 + 8)
    cut = ParallelConfig(tensor=2)
    (half,) = resident(model, cut, Sizes.of(2, cut), "bfloat16", LoraConfig(rank=8, targets=["linear_proj"]))
    assert half.gradients == 4 * 8 * 2 * H // 2 * 4


def test_an_adapter_keeps_its_inner_output_and_behind_a_norm_its_gathered_input() -> None:
    model, lora = decoder(), LoraConfig(rank=8)
    for parallel, more in ((ParallelConfig(), 4 * 8), (ParallelConfig(tensor=2), 4 * 8 + 2 * H)):
        with_some, without = (
            next(activations(model, parallel, MemoryConfig(), 100, 1, 2, each)) for each in (lora, None)
        )
        assert with_some.layers - without.layers == 4 * 100 * more * 2
        width = 1024 // parallel.tensor
        more = width * H * 4 + max(width * H * 2 + 100 * width * 2, 100 * width * 6) - 100 * width * 6
        assert without.output - with_some.output == more, "the output layer is frozen"
