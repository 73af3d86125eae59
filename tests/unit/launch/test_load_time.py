"""Seconds of a start, against sums by hand and the figures that they are made of."""

import pytest
from msgspec.structs import replace

from bench.figures import result
from common.config.architecture import Architecture, Attention, Experts
from common.config.schema import ParallelConfig
from launch.plan.layout import Sizes
from launch.plan.load_time import GB_S, start_of
from launch.plan.memory import resident

SPARSE = Architecture(
    kind="qwen3_moe", layers=4, hidden=8, ffn=16, vocabulary=32, tied=False, positions=64,
    attention=Attention(4, 2, 2, qk_norm=True), experts=Experts(count=8, per_token=2, ffn=16), moe_layers=(True,) * 4,
)  # fmt: skip
DENSE = replace(SPARSE, kind="qwen3", experts=None, moe_layers=(False,) * 4)
WAYS = ("safetensors", "converted")


def test_the_speeds_are_those_of_the_committed_result() -> None:
    rows = {(row["ranks"], row["way"]): row["gb_s"] for row in result("load_weights")["rows"]}
    assert rows == {(n, way): gb for n, both in GB_S.items() for way, gb in zip(WAYS, both, strict=True)}


@pytest.mark.parametrize(("tensor", "pays"), [(1, False), (2, True), (4, True)])
def test_a_converted_folder_of_a_dense_model_pays_only_where_ranks_share_matrices(tensor: int, pays: bool) -> None:
    parallel = ParallelConfig(tensor=tensor)
    found = start_of(resident(DENSE, parallel, Sizes.of(4, parallel), "bfloat16"), parallel, "bfloat16")
    assert (found.converted_s < found.safetensors_s) == pays


def test_with_one_rank_a_matrix_the_times_are_those_of_its_row() -> None:
    parallel = ParallelConfig()
    found = start_of(resident(DENSE, parallel, Sizes.of(1, parallel), "bfloat16"), parallel, "bfloat16")
    assert found.converted_s / found.safetensors_s == pytest.approx(0.924 / 0.342, rel=0.01)


def test_a_rank_reads_its_stage_from_safetensors_and_its_share_of_a_converted_folder() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=2, expert=2)
    stages = [*resident(SPARSE, parallel, Sizes.of(4, parallel), "bfloat16")]
    attention = 2 * (8 * 8 + 8 * (8 + 2 * 2 * 2))  # output projection, and queries, keys and values, of two layers
    experts = 2 * 4 * 3 * 16 * 8  # half of them
    table = 32 * 8
    other = 2 * (2 * 8 + 8 * 8) + 8  # two norms and a router for each layer; the last stage has the final norm
    other += 2 * 2 * 2  # norms of queries and keys
    found = start_of(stages, parallel, "bfloat16")
    whole = 2 * (attention + table + experts + other) / 1e9
    share = 2 * ((attention + table) // 2 + experts + other) / 1e9
    safetensors, converted = GB_S[2]
    assert abs(found.safetensors_s - whole / safetensors) < 1e-12
    assert abs(found.converted_s - share / converted) < 1e-12
