"""Groups to move through brokers: 8 samples of 256 prompt tokens and a completion, as arrays, structs and lists."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from common.rollouts import Group, GroupMeta, Sample, VersionRun
from common.wire_types import Array

SAMPLES, PROMPT_TOKENS, VOCABULARY = 8, 256, 151_936
COMPLETION_TOKENS = {"1k": 1024, "8k": 8192, "tiny": 8}
DISTINCT_GROUPS = 16  # groups that a producer cycles through


class Episode(NamedTuple):
    """One sample: [T] int32, [T] uint8, [T] float32."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray


class ListSample(msgspec.Struct):
    """A sample as peers send it: numbers as lists."""

    tokens: list[int]
    loss_mask: list[int]
    behavior_logprobs: list[float]
    version: int
    reward: float
    stop_reason: str


class ListGroup(msgspec.Struct):
    serial: int
    samples: list[ListSample]


def make_episodes(seed: int, size: str) -> list[Episode]:
    """The samples of one group; token ids are spread like a tokenizer's, most log-probabilities lie near 0."""
    generator = np.random.default_rng(seed)
    completion = COMPLETION_TOKENS[size]
    total = PROMPT_TOKENS + completion
    episodes: list[Episode] = []
    for _ in range(SAMPLES):
        tokens = (np.minimum(generator.zipf(1.15, total), VOCABULARY) - 1).astype(np.int32)
        mask = np.ones(total, np.uint8)
        mask[:PROMPT_TOKENS] = 0
        scale = np.where(generator.random(total) < 0.6, 1e-3, 0.7)
        logprobs = (-generator.exponential(scale) * mask).astype(np.float32)
        episodes.append(Episode(tokens, mask, logprobs))
    return episodes


def structs(size: str) -> Iterator[tuple[Group, GroupMeta]]:
    """Endless groups as a node has them when their episodes are over, with their metadata; samples are made now."""
    samples = [[_sample(episode) for episode in make_episodes(seed, size)] for seed in range(DISTINCT_GROUPS)]
    tokens = SAMPLES * COMPLETION_TOKENS[size]
    meta = GroupMeta(version_min=3, version_max=4, reward_mean=0.5, sampled_tokens=tokens)
    return ((Group(serial, samples[serial % DISTINCT_GROUPS]), meta) for serial in itertools.count())


def lists(size: str) -> Iterator[ListGroup]:
    """Endless groups with lists of numbers; samples are made now."""
    groups = [make_episodes(seed, size) for seed in range(DISTINCT_GROUPS)]
    samples = [[ListSample(*(x.tolist() for x in one), 3, 1.0, "stop") for one in group] for group in groups]
    return (ListGroup(serial, samples[serial % DISTINCT_GROUPS]) for serial in itertools.count())


def arrays_of_structs(group: Group) -> list[Episode]:
    """The arrays that a learner computes with."""
    return [Episode(s.tokens.numpy(), s.loss_mask.numpy(), s.behavior_logprobs.numpy()) for s in group.samples]


def arrays_of_lists(samples: list[ListSample]) -> list[Episode]:
    kinds = (np.int32, np.uint8, np.float32)
    return [Episode(*map(np.asarray, (s.tokens, s.loss_mask, s.behavior_logprobs), kinds)) for s in samples]


def _sample(episode: Episode) -> Sample:
    return Sample(
        tokens=Array.of(episode.tokens, "int32"),
        loss_mask=Array.of(episode.loss_mask, "uint8"),
        behavior_logprobs=Array.of(episode.behavior_logprobs, "float32"),
        version_runs=[VersionRun(0, 3), VersionRun(len(episode.tokens) // 2, 4)],
        reward=1.0,
        stop_reason="stop",
    )
