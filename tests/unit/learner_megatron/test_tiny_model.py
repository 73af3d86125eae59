"""Miniatures of published configurations (transformers' defaults are those of the models named)."""

from typing import Any

import pytest
import torch
import transformers

from common.config.schema import ParallelConfig
from learner.megatron.conversion import tiny_model

LLAMA3 = {
    **{"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def llama_70b() -> Any:
    sizes = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    heads = dict(num_attention_heads=64, num_key_value_heads=8)
    return transformers.LlamaConfig(**sizes, **heads, rope_parameters=dict(LLAMA3), architectures=["LlamaForCausalLM"])


def deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"]
    )


def qwen2_mixed() -> Any:
    window = dict(use_sliding_window=True, sliding_window=4096, max_window_layers=28)
    return transformers.Qwen2Config(**window, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])


CONFIGS = {"llama": llama_70b, "deepseek": deepseek_v3, "qwen3-moe": qwen3_moe, "qwen2": qwen2_mixed}
KEPT = (
    *("rope_parameters", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias", "architectures"),
    *("num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "n_shared_experts"),
    *("rope_interleave", "decoder_sparse_step", "max_position_embeddings"),
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_the_translation_reads_is_kept(kind: str) -> None:
    config = CONFIGS[kind]()
    small = tiny_model.config_of(config, ParallelConfig())
    for name in KEPT:
        assert getattr(small, name, None) == getattr(config, name, None), name
    assert (getattr(small, "sliding_window", None) is None) == (getattr(config, "sliding_window", None) is None)
    grouped = config.num_attention_heads > config.num_key_value_heads
    assert (small.num_attention_heads > small.num_key_value_heads) == grouped


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=8, pipeline=16),
        ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, context=2),
        ParallelConfig(pipeline=16, expert=32),
        ParallelConfig(tensor=4, pipeline=8, expert=4, expert_tensor=2),
    ],
    ids=["tp8-pp16", "vpp2", "ep32", "etp2"],
)
def test_the_layout_divides_every_size(kind: str, parallel: ParallelConfig) -> None:
    small = tiny_model.config_of(CONFIGS[kind](), parallel)
    for size in (small.num_attention_heads, small.num_key_value_heads, small.vocab_size, small.intermediate_size):
        assert size % parallel.tensor == 0
    assert small.num_hidden_layers % (parallel.pipeline * parallel.virtual_pipeline) == 0
    experts = getattr(small, "n_routed_experts", None) or getattr(small, "num_experts", None)
    if experts:
        assert experts % parallel.expert == 0
        assert small.moe_intermediate_size % parallel.expert_tensor == 0


def test_a_mixture_of_layer_kinds_stays_one() -> None:
    small = tiny_model.config_of(qwen2_mixed(), ParallelConfig())
    assert set(small.layer_types) == {"full_attention", "sliding_attention"}
    deep = tiny_model.config_of(deepseek_v3(), ParallelConfig())
    assert 0 < deep.first_k_dense_replace < deep.num_hidden_layers
    assert deep.n_routed_experts // deep.n_group > deep.num_experts_per_tok // deep.topk_group


def test_the_model_is_small_the_same_each_time_and_not_trivial() -> None:
    config = tiny_model.config_of(qwen3_moe(), ParallelConfig())
    before = torch.get_rng_state()
    one, two = tiny_model.new_model(config).state_dict(), tiny_model.new_model(config).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert sum(tensor.numel() for tensor in one.values()) < 2e6
    norms = [tensor for name, tensor in one.items() if "norm" in name]
    assert all(tensor.std() > 0.01 for tensor in norms)
