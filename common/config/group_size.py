"""Bytes of a group as it travels and lies in the broker, and how many of them a job may have there."""

from pathlib import Path

import msgspec

from common.config.architecture import Architecture, UnknownArchitecture, read_architecture
from common.config.schema import Config

WIRE_BYTES_PER_TOKEN = 4 + 1 + 4  # token int32, loss mask uint8, log-probability float32 (common.rollouts.Sample)
TAUGHT_BYTES = 4  # float32 by the teacher
TOP_BYTES = 4 + 4  # int32 and float32 for each of the teacher's top_k tokens in the place of a sampled one
ROUTED_BYTES = 2  # int16 per MoE layer and chosen expert
UNKNOWN_ROUTING = 1 << 10  # bytes a token of a model that cannot be read here; DeepSeek V3 has 928
LEAST_KEPT_BYTES = 4 << 30


def group_bytes(config: Config, routing: int) -> int:
    """Largest size of one group, with `routing` bytes a token if the job replays it."""
    size = config.rollout.group_size
    longest = config.rollout.engine.max_model_len
    told = config.learner.loss.distillation
    per_token = WIRE_BYTES_PER_TOKEN + routing * config.learner.moe.replay_routing + TAUGHT_BYTES * (told is not None)
    top = 0 if told is None else min(config.rollout.max_tokens, longest) * told.wanted * TOP_BYTES
    return size * (longest * per_token + top)


def routing_bytes(model: Architecture) -> int:
    """Bytes a token of the experts that it passed."""
    return 0 if model.experts is None else sum(model.moe_layers) * model.experts.per_token * ROUTED_BYTES


def most_kept_bytes(config: Config) -> int:
    """broker.max_bytes. Its default never makes nodes wait before the staleness bound does.

    Uncommitted groups belong to the steps since the last checkpoint, the one that is being written, or the window. A
    job of short samples gets LEAST_KEPT_BYTES. Without a store all groups are in memory.
    """
    broker = config.broker
    if broker.max_bytes is not None:
        return broker.max_bytes
    if broker.durability == "memory":
        return broker.memory_bytes
    try:
        document = msgspec.json.decode(Path(config.model.path, "config.json").read_bytes(), type=dict[str, object])
        routing = routing_bytes(read_architecture(document))
    except (OSError, ValueError, UnknownArchitecture):  # the broker's machine needs no model
        routing = UNKNOWN_ROUTING
    steps = config.learner.checkpoint.every + 1 + config.staleness.max + 1
    return max(LEAST_KEPT_BYTES, steps * config.learner.groups_per_step * group_bytes(config, routing))
