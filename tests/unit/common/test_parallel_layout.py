"""Layouts that cannot work are refused with the key and the number that do not fit."""

import msgspec
import pytest

from common.config.architecture import read_architecture
from common.config.parallel_layout import model_problems, world_problems
from common.config.schema import ParallelConfig

DENSE = {"model_type": "qwen3", "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4}
DENSE |= {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 64}
MIXED = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def found(shape: dict[str, object], **layout: object) -> list[str]:
    parallel = msgspec.convert(layout, ParallelConfig)
    wrong = model_problems(read_architecture(shape), parallel)
    return [f"{problem.key}: {problem.expected}; {problem.found}" for problem in wrong]


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        (DENSE, {"tensor": 8}, "learner.parallel.tensor: a divisor of the model's 12 attention heads; 8"),
        (DENSE, {"tensor": 3}, "learner.parallel.tensor: a divisor of the model's 4 key-value heads; 3"),
        ({**DENSE, "vocab_size": 129}, {"tensor": 2}, "a divisor of the model's 129 vocabulary entries; 2"),
        ({**DENSE, "intermediate_size": 65}, {"tensor": 2}, "a divisor of the model's 65 intermediate features; 2"),
        (DENSE, {"pipeline": 4}, "learner.parallel.pipeline: a divisor of the model's 6 layers; 4"),
        (DENSE, {"pipeline": 12}, "learner.parallel.pipeline: a divisor of the model's 6 layers; 12"),
        (DENSE, {"pipeline": 2, "virtual_pipeline": 2}, "virtual_pipeline: a divisor of a stage's 3 layers; 2"),
        (DENSE, {"first_stage_layers": 2}, "learner.parallel.first_stage_layers: none while pipeline is 1; 2"),
        (DENSE, {"last_stage_layers": 2}, "learner.parallel.last_stage_layers: none while pipeline is 1; 2"),
        (DENSE, {"pipeline": 3, "last_stage_layers": 1}, "stages that share 5 of the model's 6 layers evenly; 2"),
        (DENSE, {"pipeline": 3, "last_stage_layers": 6}, "stages that share 0 of the model's 6 layers evenly; 2"),
        (DENSE, {"pipeline": 2, "last_stage_layers": 2, "first_stage_layers": 3}, "share 1 of the model's 6 layers"),
        (DENSE, {"expert": 2}, "learner.parallel.expert: 1, since the model has no experts; 2"),
        (DENSE, {"expert_tensor": 2}, "learner.parallel.expert_tensor: 1, since the model has no experts; 2"),
        (MIXED, {"expert": 3}, "learner.parallel.expert: a divisor of the model's 8 experts; 3"),
        (MIXED, {"expert_tensor": 5}, "a divisor of the experts' 48 intermediate features; 5"),
        (MIXED, {"tensor": 2, "sequence": False}, "learner.parallel.sequence: true for a model with experts"),
    ],
)
def test_what_a_model_does_not_allow_is_named(
    shape: dict[str, object], layout: dict[str, object], message: str
) -> None:
    assert [line for line in found(shape, **layout) if message in line]


def test_what_a_model_allows_passes() -> None:
    for layout in ({}, {"tensor": 2}, {"tensor": 4, "context": 2}, {"tensor": 2, "sequence": False}):
        assert not found(DENSE, **layout)
    for layout in ({"expert": 8}, {"tensor": 2, "expert": 2, "expert_tensor": 2}, {"context": 3}):
        assert not found(MIXED, **layout)


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ({"tensor": 4}, "learner.world_size"),
        ({"context": 4}, "learner.world_size"),
        ({"expert": 2, "expert_tensor": 2}, "learner.world_size"),
        ({"virtual_pipeline": 2}, "learner.parallel.virtual_pipeline"),
    ],
)
def test_ranks_that_cannot_be_cut_are_named(layout: dict[str, int], key: str) -> None:
    assert [problem.key for problem in world_problems(6, ParallelConfig(**layout))] == [key]


def test_deepseeks_layout_of_16_stages_and_32_expert_ranks_needs_512_ranks_and_not_64() -> None:
    layout = ParallelConfig(pipeline=16, expert=32)
    assert [*world_problems(64, layout)] and not [*world_problems(512, layout)]
