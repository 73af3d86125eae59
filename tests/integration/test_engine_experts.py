"""The real vLLM engine with a mixture of experts, fed over the real weight plane, against transformers in float32.

One engine per architecture; tests run in order, and the last one of an engine breaks it or shuts it down.
"""

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import transformers

from common.config.schema import MoeConfig
from common.errors import SlipstreamError
from rollout_fleet.engine import engine
from rollout_fleet.episode.sampler_protocol import Generation
from tests.rigs.engines import SHAPE, EngineRig, logprobs, prompt, worst


def qwen3_moe(seed: int) -> Any:
    """Tiny Qwen3-MoE, the middle layer dense; different seeds disagree by nats."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=128, num_hidden_layers=3, mlp_only_layers=[1],
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def glm4_moe(seed: int) -> Any:
    """Tiny GLM-4.5: sigmoid routers with a bias that moves their choice, shared experts, first layer dense."""
    torch.manual_seed(seed)
    config = transformers.Glm4MoeConfig(
        **SHAPE, intermediate_size=128, num_hidden_layers=3,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1, n_group=1,
        topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True,
    )  # fmt: skip
    model = transformers.Glm4MoeForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_(0, 0.3)
    return model


def mixtral(seed: int) -> Any:
    """Tiny Mixtral, whose files name experts and projections in a way of their own."""
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        **SHAPE, intermediate_size=96, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), qwen3_moe, MoeConfig(replay_routing=True))
    yield made
    made.close()


@pytest.fixture(scope="module", params=[glm4_moe, mixtral], ids=lambda make: make.__name__)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("other"), request.param, MoeConfig(replay_routing=True))
    yield made
    made.close()


def test_the_first_version_of_all_experts_is_proven_and_its_canary_agrees(rig: EngineRig) -> None:
    rig.put_first()


@pytest.mark.parametrize("version", [1, 2])
def test_the_engine_samples_with_the_published_experts(rig: EngineRig, version: int) -> None:
    if version > 1:
        rig.put(version)
    got = rig.samples_with(version)
    assert worst(got.logprobs, logprobs(qwen3_moe(version + 1), prompt(0) + got.tokens)[11:]) > 0.1


def routing(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), MoE layers, experts per token] that `model` chooses, each token's in rising order."""
    seen: list[torch.Tensor] = []
    gates = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: seen.append(out[2])) for gate in gates]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).sort(-1).values


def agrees(rig: EngineRig, got: Generation, start: list[int], version: int) -> bool:
    """Whether the routing of everything that was fed is that of Hugging Face under the weights of `version`."""
    assert got.routed_experts is not None
    found = torch.from_numpy(got.routed_experts).sort(-1).values
    expected = routing(rig.models[version], (start + got.tokens)[:-1])
    return torch.equal(found.long(), expected)


def test_the_routing_of_every_fed_token_comes_back(rig: EngineRig) -> None:
    async def together() -> list[Generation]:
        return await asyncio.gather(*[rig.engine.generate(prompt(i), 30 + i) for i in range(6)])

    for i, got in enumerate(rig.run(together())):
        assert got.routed_experts is not None and got.routed_experts.shape == (12 + len(got.tokens) - 1, 2, 2)
        assert agrees(rig, got, prompt(i), 2)


def test_a_cached_prefix_keeps_its_routing(rig: EngineRig) -> None:
    start = [(i * 13) % 90 + 4 for i in range(300)]  # more than two cache blocks
    first = rig.run(rig.engine.generate(start, 40))
    second = rig.run(rig.engine.generate(start + first.tokens, 40))  # the next turn
    assert agrees(rig, first, start, 2) and agrees(rig, second, start + first.tokens, 2)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_flip_in_flight_leaves_the_routing_that_each_token_was_sampled_with(rig: EngineRig, recompute: bool) -> None:
    rig.engine.weights.recompute = recompute
    old, new = rig.engine.weights.version, rig.engine.weights.version + 1
    done = rig.flip_in_flight(new, requests=8, tokens=400)
    rig.engine.weights.recompute = False
    across = [(i, got) for i, got in enumerate(done) if len(got.version_runs) == 2]
    assert across, "the flip came after the end of every request"
    for i, got in across:
        boundary = got.version_runs[1].start
        assert got.routed_experts is not None and len(got.routed_experts) == 12 + len(got.tokens) - 1
        before = torch.from_numpy(got.routed_experts)[: 12 + boundary - 1].sort(-1).values.long()
        assert torch.equal(before, routing(rig.models[old], prompt(i) + got.tokens[: boundary - 1]))
        if recompute:  # the new side's keys and values are of the new weights alone
            after = torch.from_numpy(got.routed_experts)[12 + boundary - 1 :].sort(-1).values.long()
            whole = routing(rig.models[new], (prompt(i) + got.tokens)[:-1])
            assert torch.equal(after, whole[12 + boundary - 1 :])


def test_one_damaged_element_of_one_expert_is_caught_by_the_proof(rig: EngineRig) -> None:
    rig.put_damaged(5, "w2_weight")
    rig.is_excluded(4, "published")


def test_other_mixtures_are_published_proven_and_sampled_from_too(other: EngineRig) -> None:
    other.put(1)
    assert other.client.state.excluded is None
    assert agrees(other, other.samples_with(1), prompt(0), 1)


def test_a_shutdown_ends_requests_with_its_reason(other: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of any other engine; the rig checks that it is not read as the death of the engine.

    vLLM kills an engine that needs too long with its children, and fails at one that ends by itself just then.
    """
    if other.make is mixtral:
        monkeypatch.setattr(engine, "SHUTDOWN_S", 0.0)
        monkeypatch.setattr("vllm.v1.utils.kill_process_tree", Mock(side_effect=psutil.NoSuchProcess(1)))
    if other.engine.weights.version < 0:
        other.put(1)

    async def ended() -> list[object]:
        requests = [asyncio.create_task(other.engine.generate(prompt(i), 480)) for i in range(8)]
        await other.sampling(8)
        await other.engine.shutdown()
        return await asyncio.gather(*requests, return_exceptions=True)

    with other.engine.stopping_at():
        outcomes = other.run(ended())
    assert all(isinstance(outcome, SlipstreamError) and "shut down" in str(outcome) for outcome in outcomes), outcomes
