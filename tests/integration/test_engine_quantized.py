"""A real vLLM engine that rounds what the learner publishes, against Hugging Face with the same rounding.

One engine serves the file, then one of two workers. The last test of each breaks it.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from common.config.architecture import read_architecture
from common.errors import UsageError
from common.weights.wire.messages import Canary
from launch.plan.job_plan import engine_of
from tests.rigs.engines import VOCABULARY, EngineRig, exported, logprobs, make_model, nudged, prompt
from tests.rigs.waiting import until

ROUNDED = 0.3  # nats; mean |difference| to the weights before rounding
CLOSER = 0.75  # times as far is Hugging Face with the same rounding; the rest is bfloat16 in another order
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(values: torch.Tensor) -> torch.Tensor:
    """`values` [rows, n] as what FP8 with a scale for each row stands for."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def in_8_bits(model: Any) -> Any:
    """The model in bfloat16 whose projections round their weights by row, and their inputs by token."""
    after = copy.deepcopy(model).bfloat16()
    for layer in after.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            weight = rounded(layer.weight.data.float())
            layer.forward = lambda x, weight=weight: (rounded(x.float()) @ weight.t()).bfloat16()
    return after


def distance(got: list[float], model: Any, tokens: list[int], after: int) -> float:
    return fmean(abs(a - b) for a, b in zip(got, logprobs(model, tokens)[after:], strict=True))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), quantization="fp8_per_channel")
    yield made
    made.close()


def samples_with(rig: EngineRig, version: int) -> None:
    """See that this engine samples with its version's rounded weights, and says so of every token."""
    model = rig.models[version]
    close, far, before = [], [], []
    for i in range(4):
        got = rig.run(rig.engine.generate(prompt(i), 40))
        assert [run.version for run in got.version_runs] == [version]
        for found, one in ((close, in_8_bits(model)), (far, make_model(version + 1)), (before, model)):
            found.append(distance(got.logprobs, one, prompt(i) + got.tokens, 11))
    assert fmean(close) < CLOSER * fmean(before)
    assert fmean(before) < ROUNDED < 1 < fmean(far)


def canary(model: Any, tolerance: float = 0.5) -> Canary:
    tokens = [(i * 11) % 90 + 4 for i in range(32)]
    return Canary(tokens, logprobs(model, tokens), tolerance=tolerance)


def test_a_version_in_float32_is_rounded_proven_and_sampled_with(rig: EngineRig) -> None:
    rig.put(1, canary(make_model(1)))
    state = rig.client.state
    assert state.excluded is None and state.version == 1
    assert 0.01 < state.canary_max_difference < 2
    samples_with(rig, 1)


def test_the_plan_counts_the_bytes_of_the_live_parameters(rig: EngineRig) -> None:
    document = json.loads((Path(rig.config.model.path) / "config.json").read_text())
    planned = engine_of(rig.config, read_architecture(document)).weight_bytes
    padding = (128 - VOCABULARY) * document["hidden_size"] * 2  # rows of the embedding in bfloat16
    assert rig.run(rig.engine.parameter_bytes()) == planned + padding


def test_a_small_step_arrives_as_a_delta_and_is_rounded(rig: EngineRig) -> None:
    rig.put(2, model=nudged(rig.models[1]))
    until(lambda: rig.publisher.stats().version_active == 2)
    assert rig.publisher.stats().publish_bytes < 0.15 * sum(tensor.nbytes for _, tensor in exported(rig.models[2]))
    samples_with(rig, 2)


@pytest.mark.parametrize(("version", "recompute"), [(3, False), (4, True)])
def test_tokens_on_both_sides_of_a_flip_are_of_their_version(rig: EngineRig, version: int, recompute: bool) -> None:
    rig.engine.weights.recompute = recompute
    for i, got in enumerate(rig.flip_in_flight(version, requests=4, tokens=300)):
        assert [run.version for run in got.version_runs] == [version - 1, version]
        b, whole = got.version_runs[1].start, prompt(i) + got.tokens
        old, new = rig.models[version - 1], rig.models[version]
        assert distance(got.logprobs[:b], old, whole[: 12 + b], 11) < ROUNDED
        assert distance(got.logprobs[b:], old, whole, 11 + b) > 1
        after = distance(got.logprobs[b:], new, whole, 11 + b)
        assert (after < ROUNDED) is recompute, "kept keys and values are of the old version"


def test_one_damaged_bit_of_a_rounded_weight_is_caught(rig: EngineRig) -> None:
    rig.put_damaged(5, "down_proj.weight")
    rig.is_excluded(4, "model.layers.0.mlp.down_proj.weight")


def test_two_workers_round_as_one_and_a_damaged_scale_is_caught(tmp_path_factory: pytest.TempPathFactory) -> None:
    rig = EngineRig(tmp_path_factory.mktemp("engine"), quantization="fp8_per_channel", tensor_parallel=2)
    try:
        rig.put(1, canary(make_model(1)))
        assert rig.client.state.excluded is None and rig.client.state.version == 1
        samples_with(rig, 1)
        rig.put_damaged(2, "qkv_proj.weight_scale")
        rig.is_excluded(1, "self_attn.v_proj.weight")
    finally:
        rig.close()


def test_an_engine_that_rounds_nothing_does_not_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    """int8_per_channel_weight_only is a kind that vLLM takes and ignores; the config refuses it before."""
    with pytest.raises(UsageError) as refused:
        EngineRig(tmp_path_factory.mktemp("engine"), quantization="int8_per_channel_weight_only")
    assert "rollout.engine.quantization" in str(refused.value)
