"""Seconds of a start, against sums by hand and the figures that they are made of."""

from bench.figures import result
from common.config.architecture import Architecture, Attention, Experts
from common.config.schema import ParallelConfig
from launch.plan.layout import Sizes
from launch.plan.load_time import CONVERTED_GB_S, SAFETENSORS_GB_S, start_of
from launch.plan.memory import resident

SPARSE = Architecture(
    kind="qwen3_moe", layers=4, hidden=8, ffn=16, vocabulary=32, tied=False, positions=64,
    attention=Attention(4, 2, 2, qk_norm=True), experts=Experts(count=8, per_token=2, ffn=16), moe_layers=(True,) * 4,
)  # fmt: skip


def test_the_speeds_are_those_of_the_committed_result_with_two_ranks() -> None:
    rows = {row["way"]: row["gb_s"] for row in result("load_weights")["rows"] if row["ranks"] == 2}
    assert rows == {"safetensors": SAFETENSORS_GB_S, "converted": CONVERTED_GB_S}


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
    assert abs(found.safetensors_s - whole / SAFETENSORS_GB_S) < 1e-12
    assert abs(found.converted_s - share / CONVERTED_GB_S) < 1e-12
