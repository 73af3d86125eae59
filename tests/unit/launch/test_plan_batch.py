"""Step, window, weight plane and checkpoint arithmetic against sums by hand, and against the code that does it."""

import msgspec
import numpy as np
import pytest

from common.config.architecture import Architecture, Attention, Experts
from common.config.schema import BaseConfig, Config, SftConfig, SftLearnerConfig, SftTasksConfig
from common.rollouts import Group, Sample, VersionRun, encode_group
from common.staleness import Window
from common.weights.wire.layout import Layout
from common.wire_types import Array
from launch.plan.job_plan import (
    Publish,
    batch_of,
    bubble,
    engine_of,
    publish_of,
    source_bytes,
    window_of,
)
from launch.plan.layout import SPARSE, Sizes, hf_tensors, rank_groups
from tests.rigs.configs import architecture


def job(
    max_model_len: int = 1025, engine_devices: int = 1, learner: dict[str, object] | None = None, **sections: object
) -> Config:
    document = {
        "run": {"name": "r", "dir": "r", "steps": 1},
        "model": {"path": "m"},
        "tasks": {"environment": "gsm8k", "dataset": "d"},
        "learner": {"world_size": 4, "groups_per_step": 8, "micro_batch_tokens": 4096, **(learner or {})},
        "rollout": {
            "group_size": 4,
            "concurrency": 32,
            "engine": {"max_model_len": max_model_len, "tensor_parallel": engine_devices},
        },
        "staleness": {"max": 2},
    }
    return msgspec.convert({**document, **sections}, Config)


def batch(config: BaseConfig):
    return batch_of(config, Sizes.of(config.learner.world_size, config.learner.parallel))


def test_full_sequences_fill_microbatches_as_packing_does() -> None:
    from learner.batch.packing import Document, plan

    for length, ranks in ((1025, 4), (1500, 2), (4097, 1)):
        found = batch(job(max_model_len=length, learner={"world_size": ranks}))
        tokens = np.zeros(length, np.int32)
        documents = [Document(tokens, tokens.astype(np.uint8)) for _ in range(32)]
        assert found.microbatches == len(plan(documents, ranks, 4096)[0])
        assert (found.sequences, found.longest, found.tokens) == (32, length - 1, 32 * (length - 1))
    padded = batch(job(max_model_len=1000, learner={"parallel": {"context": 4}}))
    assert padded.longest == 1000, "999 tokens are padded to two chunks for each of four ranks"


def test_an_update_has_the_microbatches_of_its_groups_and_a_token_is_at_most_so_many_updates_old() -> None:
    several = {"epochs": 2, "minibatches": 3}
    whole, part = batch(job()), batch(job(learner=several))
    assert (whole.updates, part.updates, part.sequences, part.tokens) == (1, 6, whole.sequences, whole.tokens)
    three_groups = batch(job(learner={"groups_per_step": 3}))
    assert part.microbatches == three_groups.microbatches < whole.microbatches, "8 groups are 3, 3 and 2"
    updates = job(learner=several)
    assert window_of(updates, architecture("Qwen3-0.6B")).oldest_updates == 2 * 6 + 5
    bounded = msgspec.structs.replace(updates, staleness=msgspec.structs.replace(updates.staleness, max_updates=9))
    assert window_of(bounded, architecture("Qwen3-0.6B")).oldest_updates == 9


def test_supervised_documents_may_fill_a_microbatch() -> None:
    learner = SftLearnerConfig(world_size=2, sequences_per_step=10, micro_batch_tokens=100)
    found = batch(SftConfig(run=job().run, model=job().model, tasks=SftTasksConfig(dataset="d"), learner=learner))
    assert (found.longest, found.tokens, found.microbatches, found.tokens_per_rank) == (100, 1000, 5, 500)


@pytest.mark.parametrize(
    ("microbatches", "pipeline", "virtual", "expected"),
    [(8, 1, 1, 0.0), (8, 4, 1, 3 / 11), (8, 4, 3, 1 / 9), (1, 2, 1, 0.5)],
)
def test_bubble(microbatches: int, pipeline: int, virtual: int, expected: float) -> None:
    assert bubble(microbatches, pipeline, virtual) == pytest.approx(expected)


def test_the_window_is_that_of_the_staleness_rule_with_groups_as_large_as_on_the_wire() -> None:
    found, n = window_of(job(), architecture("Qwen3-0.6B")), 1025
    assert found.groups == Window(8, 2, 0, 0, ()).end(0) == 24
    assert (found.samples, found.tokens) == (96, 96 * n)
    assert found.node_groups == 32 // 4 + 2
    assert found.oldest_updates == 2
    sample = Sample(
        tokens=Array.of(np.ones(n), "int32"),
        loss_mask=Array.of(np.ones(n), "uint8"),
        behavior_logprobs=Array.of(np.ones(n), "float32"),
        version_runs=[VersionRun(0, 0)],
        reward=1.0,
        stop_reason="stop",
    )
    assert found.group_bytes == pytest.approx(len(encode_group(Group(0, [sample] * 4))), rel=0.05)
    told = {"teacher": "t", "objective": "forward_kl", "top_k": 5}
    taught = msgspec.structs.replace(
        sample,
        loss_mask=Array.of([1] * n, "uint8"),
        teacher_logprobs=Array.of([0] * n, "float32"),
        teacher_top_ids=Array.of([0] * (5 * n), "int32"),
        teacher_top_logprobs=Array.of([0] * (5 * n), "float32"),
    )
    scorers = {"t": {"url": "http://t/v1", "model": "t", "kind": "teacher"}}
    distilled = job(learner={"loss": {"distillation": told}}, scorers=scorers)
    all_sampled = msgspec.structs.replace(distilled.rollout, max_tokens=2 * n)
    distilled = msgspec.structs.replace(distilled, rollout=all_sampled)
    bytes_of_group = window_of(distilled, architecture("Qwen3-0.6B")).group_bytes
    assert bytes_of_group == pytest.approx(len(encode_group(Group(0, [taught] * 4))), rel=0.05)
    replayed = window_of(job(learner={"moe": {"replay_routing": True}}), architecture("Mixtral-8x7B-v0.1"))
    routing = 4 * n * 32 * 2 * 2  # two bytes for each of 32 layers and 2 experts
    assert replayed.group_bytes - found.group_bytes == routing


# A layer has q, k, v and o of 64 x 64, two norms of 64 and a router of 4 x 64. An expert has three matrices of 64 x 32.
MOE = Architecture(
    kind="mixtral",
    layers=2,
    hidden=64,
    ffn=32,
    vocabulary=100,
    tied=False,
    positions=128,
    attention=Attention(heads=4, kv_heads=4, head_dim=16),
    experts=Experts(count=4, per_token=2, ffn=32),
    moe_layers=(True, True),
)
TABLE, NORM, EXPERT = 100 * 64 * 2, 64 * 2, 3 * 64 * 32 * 2  # bytes in bfloat16, each tensor a multiple of 64
LAYER = 4 * 64 * 64 * 2 + 2 * NORM + 4 * 64 * 2  # without experts
CUT: dict[str, object] = {"world_size": 8, "parallel": {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}}


def relay(model: Architecture, gpus_per_node: int = 8, link_gbit: float = 100) -> Publish:
    return publish_of(job(learner=CUT, weights={"transport": "relay"}), model, gpus_per_node, link_gbit)


def test_over_the_relay_the_owners_of_a_part_send_it_each() -> None:
    layout = Layout.of([(name, "bfloat16", shape) for name, shape in hf_tensors(MOE)])
    parts = source_bytes(layout, MOE, job(learner=CUT).learner)
    assert parts == {
        0: TABLE + LAYER + 2 * EXPERT,  # stage 0 has ranks 0-3; expert-parallel ranks 0 and 1 have two experts each
        1: 2 * EXPERT,
        4: LAYER + 2 * EXPERT + NORM + TABLE,
        5: 2 * EXPERT,
    }
    assert sum(parts.values()) == layout.total_bytes
    found = relay(MOE)
    assert (found.sources, found.largest_source_bytes) == (4, parts[4])
    assert found.largest_machine_bytes == found.bytes == layout.total_bytes, "all ranks are on one machine"
    assert relay(MOE, gpus_per_node=4).largest_machine_bytes == parts[4] + parts[5]
    assert relay(MOE, gpus_per_node=1).largest_machine_bytes == parts[4]


def test_experts_cut_by_tensor_parallelism_come_from_the_first_rank_that_has_a_share() -> None:
    cut: dict[str, object] = {
        "parallel": {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 2, "sequence": True}
    }
    layout = Layout.of([(name, "bfloat16", shape) for name, shape in hf_tensors(MOE)])
    learner = job(learner={"world_size": 8, **cut}).learner
    assert [*source_bytes(layout, MOE, learner)] == [0, 2, 4, 6]
    groups = rank_groups(Sizes.of(8, learner.parallel), ("expert_tensor", "expert_data"), SPARSE)
    assert sorted(group[0] for group in groups) == [0, 2, 4, 6]


def test_virtual_stages_belong_to_the_stage_that_has_them_and_tied_embeddings_to_the_first() -> None:
    dense = msgspec.structs.replace(MOE, layers=4, tied=True, experts=None, moe_layers=(False,) * 4)
    layer = 4 * 64 * 64 * 2 + 2 * NORM + EXPERT  # a dense feed-forward is as large as one expert
    layout = Layout.of([(name, "bfloat16", shape) for name, shape in hf_tensors(dense)])
    learner = job(learner={"parallel": {"pipeline": 2, "virtual_pipeline": 2}}).learner
    parts = source_bytes(layout, dense, learner)
    assert parts == {0: TABLE + 2 * layer, 2: 2 * layer + NORM}
    assert sum(parts.values()) == layout.total_bytes


def test_gaps_of_alignment_are_sent_too() -> None:
    odd = msgspec.structs.replace(MOE, hidden=60, vocabulary=99)
    layout = Layout.of([(name, "bfloat16", shape) for name, shape in hf_tensors(odd)])
    assert layout.total_bytes > sum(entry.size_bytes for entry in layout.entries)
    assert sum(source_bytes(layout, odd, job(learner=CUT).learner).values()) == layout.total_bytes


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_without_the_relay_the_first_rank_sends_the_whole_model(transport: str) -> None:
    found = publish_of(job(learner=CUT, weights={"transport": transport}), MOE, 4, 100)
    assert (found.sources, found.largest_source_bytes, found.largest_machine_bytes) == (1, found.bytes, found.bytes)
    assert found.publish_s == found.send_s == found.bytes / 12.5e9


def test_adapters_come_from_the_first_rank_alone_and_take_as_long_as_their_bytes() -> None:
    adapted = {**CUT, "lora": {"rank": 8, "targets": ["linear_qkv"]}}
    weights = {"transport": "relay", "encoding": "adapter"}
    found = publish_of(job(learner=adapted, weights=weights), MOE, 4, 8)
    assert found.adapter_bytes == 2 * 3 * 2 * 8 * (64 + 64), "A and B of q, k and v in two layers"
    assert (found.sources, found.largest_source_bytes, found.largest_machine_bytes) == (1, found.bytes, found.bytes)
    assert found.send_s == found.adapter_bytes / 1e9
    assert found.publish_s == pytest.approx(found.adapter_bytes / 1e9 * (1 + 1 / 64))


def test_a_publish_takes_as_long_as_a_node_receives_and_a_little_for_the_depth_of_the_chain() -> None:
    found = relay(MOE, gpus_per_node=4, link_gbit=8)  # 1e9 bytes/s
    assert found.send_s == found.largest_machine_bytes / 1e9
    assert found.publish_s == pytest.approx(found.bytes / 1e9 * (1 + 1 / 64))
    assert relay(MOE, gpus_per_node=4, link_gbit=16).publish_s == found.publish_s / 2


def test_a_publish_is_the_weights_in_their_dtype_and_an_engine_has_its_share_of_them_and_of_the_cache() -> None:
    found = publish_of(job(weights={"bucket_mib": 256, "timeout_s": 20}), architecture("Qwen3-0.6B"), 8, 100)
    assert found.bytes == 596_049_920 * 2  # every tensor of this model is a multiple of the alignment
    assert found.buckets == 5
    assert found.tensors == 310
    assert found.bytes_per_s == found.bytes / 20
    found = engine_of(job(engine_devices=2), architecture("Qwen3-0.6B"))
    assert found.weight_bytes == 596_049_920
    assert found.cache_bytes_per_token == 2 * 4 * 128 * 28 * 2  # keys and values, 4 of 8 heads, 28 layers, 2 bytes
    assert found.cache_tokens(80e9, 0.9) == int((72e9 - 596_049_920) / found.cache_bytes_per_token)
    assert found.cache_tokens(0.5e9, 0.9) == 0
    bounded = msgspec.structs.replace(found, cache_bytes=2**30)
    assert bounded.cache_tokens(80e9, 0.9) == int(2**30 / found.cache_bytes_per_token)
    latent = engine_of(job(), architecture("DeepSeek-V3"))
    assert latent.cache_bytes_per_token == (512 + 64) * 61 * 2


def test_a_rounded_engine_has_a_byte_an_element_of_its_projections_and_a_scale_for_each_row() -> None:
    model = architecture("Qwen3-0.6B")
    plain = job(rollout={"engine": {"max_model_len": 2048}})
    rounded = job(rollout={"engine": {"max_model_len": 2048, "quantization": "fp8_per_channel"}})
    rows, elements = 28 * (2048 + 2 * 1024 + 1024 + 2 * 3072 + 1024), 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    assert engine_of(rounded, model).weight_bytes == engine_of(plain, model).weight_bytes - elements + 4 * rows
    assert engine_of(rounded, model).cache_bytes_per_token == engine_of(plain, model).cache_bytes_per_token
