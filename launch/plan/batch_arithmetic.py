"""The arithmetic of a step: its largest batch, the idle time of the pipeline, and the window."""

import msgspec

from common.config.schema import Config, SftConfig
from launch.plan.architecture import Architecture
from launch.plan.process_groups import Sizes

WIRE_BYTES_PER_TOKEN = 4 + 1 + 4  # token int32, loss mask uint8, log-probability float32 (common.rollouts.Sample)
ROUTED_BYTES = 2  # int16 per MoE layer and chosen expert


class Batch(msgspec.Struct, frozen=True):
    """One optimizer step when every sequence is as long as it may be.

    Attributes:
        sequences: samples, or documents in supervised tuning.
        longest: positions of one sequence, padding of context parallelism included.
        places: positions of all sequences.
        places_per_rank: positions on the data-parallel rank with the most.
        microbatches: on every data-parallel rank.
        bubble: share of a step that a pipeline stage idles, with that many microbatches.
        bubble_short: the same when sequences are a quarter as long.
    """

    sequences: int
    longest: int
    places: int
    places_per_rank: int
    microbatches: int
    bubble: float
    bubble_short: float


class Window(msgspec.Struct, frozen=True):
    """The groups that the staleness bound allows to be outstanding: B (k + 1) (common/staleness.py).

    Attributes:
        bytes: size of their samples when every one has the maximum length.
        group_bytes: size of one such group, which travels as one message.
        node_groups: groups that one node generates at once.
    """

    groups: int
    samples: int
    tokens: int
    bytes: int
    group_bytes: int
    node_groups: int


def batch_of(config: Config | SftConfig, sizes: Sizes) -> Batch:
    """The arithmetic of one step, as learner.batch.packing does it."""
    learner = config.learner
    if isinstance(config, Config):
        sequences = config.learner.groups_per_step * config.rollout.group_size
        longest = config.rollout.engine.max_model_len - 1  # inputs are all tokens but the last
    else:
        sequences, longest = config.learner.sequences_per_step, learner.micro_batch_tokens
    multiple = 2 * learner.parallel.context if learner.parallel.context > 1 else 1
    longest = -(-longest // multiple) * multiple
    fit = max(1, learner.micro_batch_tokens // longest)
    microbatches = -(-sequences // (fit * sizes.data))
    short = -(-sequences // (max(1, 4 * learner.micro_batch_tokens // longest) * sizes.data))
    return Batch(
        sequences=sequences,
        longest=longest,
        places=sequences * longest,
        places_per_rank=-(-sequences // sizes.data) * longest,
        microbatches=microbatches,
        bubble=bubble(microbatches, learner.parallel.pipeline, learner.parallel.virtual_pipeline),
        bubble_short=bubble(short, learner.parallel.pipeline, learner.parallel.virtual_pipeline),
    )


def bubble(microbatches: int, pipeline: int, virtual: int) -> float:
    """Idle share of a step: (p - 1) / v over m + (p - 1) / v (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    idle = (pipeline - 1) / virtual
    return idle / (microbatches + idle)


def window_of(config: Config, model: Architecture, lookahead_groups: int) -> Window:
    """The largest number of groups between the oldest step that waits and the newest leased task.

    Args:
        lookahead_groups: that a node leases beyond its concurrency.
    """
    groups = config.learner.groups_per_step * (config.staleness.max + 1)
    size, longest = config.rollout.group_size, config.rollout.engine.max_model_len
    per_token = WIRE_BYTES_PER_TOKEN
    if config.learner.moe.replay_routing and model.experts is not None:
        per_token += sum(model.moe_layers) * model.experts.per_token * ROUTED_BYTES
    group_bytes = size * longest * per_token
    return Window(
        groups=groups,
        samples=groups * size,
        tokens=groups * size * longest,
        bytes=groups * group_bytes,
        group_bytes=group_bytes,
        node_groups=min(groups, config.rollout.concurrency_bounds[1] // size + lookahead_groups),
    )
