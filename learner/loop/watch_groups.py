"""Which groups of a step contribute most to a metric that is too high, from what the lead rank has of each sample."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from common.rollouts import Group, Sample
from learner.batch.batch import TRUNCATED, TrainingBatch
from learner.batch.packing import Document

SHOWN = 5


def pull(document: Document, logprobs: np.ndarray, ages: np.ndarray) -> float:
    """sum |advantage| (1 - p): half the L1 norm of the gradient by the logits, at the sampler's probability p."""
    return abs(document.advantage) * float((1 - np.exp(logprobs)).sum())


def surprise(document: Document, logprobs: np.ndarray, ages: np.ndarray) -> float:
    """sum -log p: the sampled estimate of the entropy. Ratios and mismatches are largest at unlikely tokens, too."""
    return -float(logprobs.sum())


def rarest(document: Document, logprobs: np.ndarray, ages: np.ndarray) -> float:
    """-log p of the least likely token."""
    return -float(logprobs.min())


def age(document: Document, logprobs: np.ndarray, ages: np.ndarray) -> float:
    return float(ages.sum())


# The part of a document, from the log-probabilities and the staleness of its trained tokens.
OF_TOKENS: dict[str, Callable[[Document, np.ndarray, np.ndarray], float]] = {
    **dict.fromkeys(("loss", "grad_norm"), pull),
    **dict.fromkeys(("entropy", "ratio_mean", "ratio_p99", "mismatch_abs_mean", "drift_abs_mean", "kl_mean"), surprise),
    **dict.fromkeys(("correction_clip_fraction", "correction_masked_fraction", "objective_clip_fraction"), surprise),
    **dict.fromkeys(("ratio_max", "veto_fraction"), rarest),
    "staleness_mean": age,
}
OF_SAMPLES: dict[str, Callable[[Sample], float]] = {
    "truncated_fraction": lambda sample: sample.stop_reason in TRUNCATED,
    "samples_failed": lambda sample: sample.error is not None,
    "reward_mean": lambda sample: sample.reward if sample.error is None else 0.0,
    **dict.fromkeys(("length_mean", "length_max"), lambda sample: int((sample.loss_mask.numpy() > 0).sum())),
}
LARGEST = {"ratio_max", "veto_fraction", "length_max"}  # a group adds its largest part; elsewhere the sum


def largest(metric: str, batch: TrainingBatch, groups: Sequence[Group]) -> list[dict[str, float]]:
    """The groups with the largest contributions, largest first; [] for a metric that groups do not make."""
    parts: defaultdict[int, list[float]] = defaultdict(list)
    if metric in OF_TOKENS:
        for document in batch.documents:
            trained = document.loss_mask > 0
            assert document.behavior_logprobs is not None and document.staleness is not None
            figures = document.behavior_logprobs[trained], document.staleness[trained]
            parts[document.serial].append(OF_TOKENS[metric](document, *figures))
    elif metric in OF_SAMPLES:
        for group in groups:
            parts[group.serial] = [float(OF_SAMPLES[metric](sample)) for sample in group.samples]
    reduce = max if metric in LARGEST else sum
    found = sorted(((reduce(values), serial) for serial, values in parts.items()), reverse=True)
    return [{"serial": serial, "contribution": value} for value, serial in found[:SHOWN] if value > 0]
