"""How many bytes of groups a broker may have, when the config does not say."""

import json
from pathlib import Path

import pytest

from common.config.architecture import read_architecture
from common.config.group_size import (
    LEAST_KEPT_BYTES,
    UNKNOWN_ROUTING,
    WIRE_BYTES_PER_TOKEN,
    group_bytes,
    most_kept_bytes,
    routing_bytes,
)
from common.config.loading import load_config
from common.config.schema import Config
from common.rollouts import Group, Sample, VersionRun, encode_group
from common.wire_types import Array
from tests.rigs.processes import ROOT

LONG = ["learner.groups_per_step=512", "rollout.engine.max_model_len=32768", "rollout.group_size=16"]


def job(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "llama-3.1-70b.yaml", list(overrides))


def test_the_default_has_room_for_the_window_and_the_steps_between_checkpoints() -> None:
    config = job(*LONG, "learner.checkpoint.every=10", "staleness.max=3")
    each = 16 * 32768 * WIRE_BYTES_PER_TOKEN
    assert group_bytes(config, 0) == each
    assert most_kept_bytes(config) == (10 + 1 + 3 + 1) * 512 * each > LEAST_KEPT_BYTES


def test_short_samples_keep_the_least_bound_and_a_given_one_is_taken() -> None:
    small = job("learner.groups_per_step=1", "rollout.engine.max_model_len=4096")
    assert most_kept_bytes(small) == LEAST_KEPT_BYTES
    assert most_kept_bytes(job(*LONG, "broker.max_bytes=5000000000")) == 5_000_000_000


def test_without_a_store_the_memory_is_all_there_is() -> None:
    assert most_kept_bytes(job(*LONG, "broker.durability=memory", "broker.memory_bytes=3000000000")) == 3_000_000_000


def test_replayed_experts_count_by_the_model_or_by_more_than_any_model_has(tmp_path: Path) -> None:
    folder = ROOT / "configs/models/DeepSeek-V3"
    words = [*LONG, "learner.moe.replay_routing=true"]
    unknown, known = (most_kept_bytes(job(*words, f"model.path={path}")) for path in (tmp_path, folder))
    per_token = routing_bytes(read_architecture(json.loads((folder / "config.json").read_bytes())))
    assert per_token == 58 * 8 * 2, "MoE layers, experts a token, int16"
    assert known / unknown == (WIRE_BYTES_PER_TOKEN + per_token) / (WIRE_BYTES_PER_TOKEN + UNKNOWN_ROUTING)


def test_the_size_of_a_group_is_that_of_its_encoding() -> None:
    config = job("rollout.group_size=4", "rollout.engine.max_model_len=4096")
    samples = [
        Sample(
            tokens=Array.of([0] * 4096, "int32"),
            loss_mask=Array.of([0] * 4096, "uint8"),
            behavior_logprobs=Array.of([0] * 4096, "float32"),
            version_runs=[VersionRun(0, 0)],
            reward=0.0,
            stop_reason="length",
        )
        for _ in range(4)
    ]
    assert len(encode_group(Group(serial=0, samples=samples))) == pytest.approx(group_bytes(config, 0), rel=0.02)
