"""Step, window, weight plane and checkpoint arithmetic against sums by hand, and against the code that does it."""

import msgspec
import numpy as np
import pytest

from common.config.schema import Config, SftConfig, SftLearnerConfig, SftTasksConfig
from common.rollouts import Group, Sample, VersionRun, encode_group
from common.staleness import window_end
from common.wire_types import Array
from launch.plan.job_plan import batch_of, bubble, engine_of, publish_of, window_of
from launch.plan.process_groups import Sizes
from tests.launch_rig import architecture


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


def batch(config: Config | SftConfig):
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
    found, n = window_of(job(), architecture("Qwen3-0.6B"), 2), 1025
    assert found.groups == window_end(0, 8, 2) == 24
    assert (found.samples, found.tokens) == (96, 96 * n)
    assert found.node_groups == 32 // 4 + 2
    sample = Sample(
        tokens=Array.of(np.ones(n), "int32"),
        loss_mask=Array.of(np.ones(n), "uint8"),
        behavior_logprobs=Array.of(np.ones(n), "float32"),
        version_runs=[VersionRun(0, 0)],
        reward=1.0,
        stop_reason="stop",
    )
    assert found.group_bytes == pytest.approx(len(encode_group(Group(0, [sample] * 4))), rel=0.05)
    replayed = window_of(job(learner={"moe": {"replay_routing": True}}), architecture("Mixtral-8x7B-v0.1"), 2)
    routing = 4 * n * 32 * 2 * 2  # two bytes for each of 32 layers and 2 experts
    assert replayed.group_bytes - found.group_bytes == routing


def test_a_publish_is_the_weights_in_their_dtype_and_an_engine_has_its_share_of_them_and_of_the_cache() -> None:
    found = publish_of(job(weights={"bucket_mib": 256, "timeout_s": 10}), architecture("Qwen3-0.6B"))
    assert found.bytes == 596_049_920 * 2  # every tensor of this model is a multiple of the alignment
    assert found.buckets == 5
    assert found.tensors == 310
    assert found.bytes_per_s == found.bytes / 10
    found = engine_of(job(engine_devices=2), architecture("Qwen3-0.6B"))
    assert found.weight_bytes == 596_049_920
    assert found.cache_bytes_per_token == 2 * 4 * 128 * 28 * 2  # keys and values, 4 of 8 heads, 28 layers, 2 bytes
    assert found.cache_tokens(80e9, 0.9) == int((72e9 - 596_049_920) / found.cache_bytes_per_token)
    assert found.cache_tokens(0.5e9, 0.9) == 0
    latent = engine_of(job(), architecture("DeepSeek-V3"))
    assert latent.cache_bytes_per_token == (512 + 64) * 61 * 2
