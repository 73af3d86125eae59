"""Held-out problems: what nodes are asked, what they answer, and the estimates with their 95 % intervals."""

import math
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from common.wire_types import Finite, Seconds, Tally, Text, Version

Z = 1.959963984540054  # the normal quantile of a 95 % interval
ROUNDING = 1e-9  # a sum of rewards may be off by
MOST_SAMPLES = 1 << 16
UNSCORED = "scorer_error"  # the stop reason of a sample that no scorer could judge: it says nothing about the policy

Interval = tuple[float, float]


class EvaluationOrder(msgspec.Struct, frozen=True, gc=False):
    """A round: every token of its samples must come from this version of this start of the learner."""

    version: Version
    incarnation: int
    temperature: float  # 0 is greedy


class EvaluationResult(msgspec.Struct, frozen=True, gc=False):
    """The samples of one problem; the lists have one entry per sample. RUN/evaluation has one line for each problem."""

    problem: Tally  # counted over all datasets
    rewards: Annotated[
        list[Finite], Meta(max_length=MOST_SAMPLES)
    ]  # 0 for a sample that failed; those of UNSCORED count nowhere
    lengths: Annotated[list[Tally], Meta(max_length=MOST_SAMPLES)]  # sampled tokens
    stop_reasons: Annotated[list[Text], Meta(max_length=MOST_SAMPLES)]
    errors: Annotated[list[Text], Meta(max_length=MOST_SAMPLES)]  # '' for a sample that did not fail
    node_id: Text = ""  # '' for a problem that could not be finished
    version_min: Version = -1  # over the sampled tokens; -1: there is none
    version_max: Version = -1
    started_s: Finite = 0.0  # Unix time of the node
    seconds: Seconds = 0.0

    @property
    def scored(self) -> list[float]:
        """The rewards without those of samples that no scorer could judge."""
        return [r for r, stopped in zip(self.rewards, self.stop_reasons, strict=True) if stopped != UNSCORED]


class EvalResult(msgspec.Struct, frozen=True):
    """RUN/eval.json. Mean reward per problem: the accuracy, where rewards are 0 or 1."""

    greedy_accuracy: float
    sampled_accuracy: float  # one sample per problem at rollout.temperature and rollout.top_p
    problems: int
    failed: int = 0  # episodes, of both kinds, that failed; they count as reward 0, or are left out if UNSCORED
    datasets: dict[str, "EvalResult"] = {}  # each one, where there are several
    # The run's final model of this version was measured; None: another model was, unset: an earlier release wrote it.
    policy_version: int | UnsetType | None = UNSET


def dataset_names(datasets: Sequence[str]) -> list[str]:
    """A short name per dataset for files and metrics, for example addition-held_out; no two are equal."""
    names: list[str] = []
    for dataset in datasets:
        path = PurePath(dataset)
        name = re.sub(r"[^A-Za-z0-9_]+", "-", "-".join([path.parent.name, path.stem])).strip("-")
        while name in names:
            name += f"-{len(names) + 1}"
        names.append(name)
    return names


def pass_at(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct; Chen et al. 2021, equation 1.

    `correct` of `samples` were; k <= samples.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def succeeds(reward: float, success: float) -> bool:
    """Whether a reward is at least `success`, tasks.success; a sum of rewards may miss it by a rounding."""
    return reward >= success - ROUNDING


def mean_interval(values: Sequence[float]) -> tuple[float, Interval | None]:
    """(mean, 95 % interval) of one value per problem; problems are drawn independently.

    Wilson's interval (1927) where every value is 0 or 1, else the normal one of the mean. None: one value that is
    neither says nothing about its spread.
    """
    n = len(values)
    mean = math.fsum(values) / len(values)
    if set(values) <= {0.0, 1.0}:
        centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
        return mean, (max(0.0, centre - half), min(1.0, centre + half))
    if n == 1:
        return mean, None
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return mean, (mean - Z * error, mean + Z * error)


def pass_ks(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples`."""
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})
