"""The real vLLM engine with a mixture of experts, fed over the real weight plane, against transformers in float32.

One engine per architecture; tests run in order and the last one breaks it.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_rig import END, VOCABULARY, Rig, logprobs

from common.errors import SlipstreamError
from common.weights.messages import Canary

TOLERANCE = 3e-5


def qwen3_moe(seed: int) -> Any:
    """Tiny Qwen3-MoE, the middle layer dense; different seeds disagree by nats."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.15, mlp_only_layers=[1],
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
        eos_token_id=END, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("engine"), qwen3_moe)
    yield made
    made.close()


def prompt(i: int) -> list[int]:
    return [(i * 7 + j * 3) % 90 + 4 for j in range(12)]


def worst(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


def test_the_first_version_of_all_experts_is_proven_and_its_canary_agrees(rig: Rig) -> None:
    tokens = [(i * 11) % 90 + 4 for i in range(32)]
    rig.publish(1, Canary(tokens, logprobs(qwen3_moe(1), tokens), tolerance=1e-4))
    rig.run(rig.active(1))
    state = rig.client.state
    assert state.quarantined is None and state.version == 1
    assert 0 < state.canary_max_difference < 1e-4


@pytest.mark.parametrize("version", [1, 2])
def test_the_engine_samples_with_the_published_experts(rig: Rig, version: int) -> None:
    if version > 1:
        rig.publish(version)
        rig.run(rig.active(version))
    for i in range(4):
        got = rig.run(rig.engine.generate(prompt(i), 40))
        whole = prompt(i) + got.tokens
        assert worst(got.logprobs, logprobs(rig.models[version], whole)[11:]) < TOLERANCE
        assert worst(got.logprobs, logprobs(qwen3_moe(version + 1), whole)[11:]) > 0.1


def test_one_damaged_element_of_one_expert_is_caught_by_the_proof(rig: Rig) -> None:
    async def damaged() -> None:
        await rig.engine._llm.collective_rpc("damage_next_load", args=("w2_weight",))
        await asyncio.to_thread(rig.publish, 3)
        await rig.active(3)

    rig.run(damaged())
    state = rig.client.state
    assert state.quarantined is not None and "published" in state.quarantined
    assert state.version == 2, "the node never says that it runs the damaged version"
    with pytest.raises(SlipstreamError, match="quarantined"):
        rig.run(rig.engine.generate([5, 6], 4))
