"""Which groups of a step contribute most to a metric that is too high, from what the lead rank has of each sample."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from common.rollouts import Group, Sample
from learner.batch.batch import TRUNCATED, TrainingBatch

SHOWN = 5
# From |advantage|, log-probabilities and staleness of a sample's trained tokens; docs/watch.md says what it means.
OF_TOKENS: dict[str, Callable[[float, np.ndarray, np.ndarray], float]] = {
    "grad_norm": lambda advantage, logprobs, age: advantage * (1 - np.exp(logprobs)).sum(),
    "entropy": lambda advantage, logprobs, age: -logprobs.sum(),
    "ratio_max": lambda advantage, logprobs, age: -logprobs.min(),
    "staleness_mean": lambda advantage, logprobs, age: age.sum(),
}
OF_SAMPLES: dict[str, Callable[[Sample], float]] = {
    "truncated_fraction": lambda sample: sample.stop_reason in TRUNCATED,
    "samples_failed": lambda sample: sample.error is not None,
    "reward_mean": lambda sample: sample.reward if sample.error is None else 0.0,
    "length_mean": lambda sample: (sample.loss_mask.numpy() > 0).sum(),
}
LIKE = {
    **{"loss": "grad_norm", "veto_fraction": "ratio_max", "length_max": "length_mean"},
    **dict.fromkeys(("ratio_mean", "ratio_p99", "mismatch_abs_mean", "drift_abs_mean", "kl_mean"), "entropy"),
    **dict.fromkeys(("correction_clip_fraction", "correction_masked_fraction", "objective_clip_fraction"), "entropy"),
}
LARGEST = {"ratio_max", "veto_fraction", "length_max"}  # a group counts by its largest part, elsewhere by the sum


def largest(metric: str, batch: TrainingBatch, groups: Sequence[Group]) -> list[dict[str, float]]:
    """The groups with the largest contributions, largest first; [] for a metric that groups do not make."""
    kind, parts = LIKE.get(metric, metric), defaultdict[int, list[float]](list)
    for document in batch.documents if kind in OF_TOKENS else ():
        trained = document.loss_mask > 0
        assert document.behavior_logprobs is not None and document.staleness is not None
        figures = abs(document.advantage), document.behavior_logprobs[trained], document.staleness[trained]
        parts[document.serial].append(float(OF_TOKENS[kind](*figures)))
    for group in groups if kind in OF_SAMPLES else ():
        parts[group.serial] = [float(OF_SAMPLES[kind](sample)) for sample in group.samples]
    reduce = max if metric in LARGEST else sum
    found = sorted(((reduce(values), serial) for serial, values in parts.items()), reverse=True)
    return [{"serial": serial, "contribution": value} for value, serial in found[:SHOWN] if value > 0]
