"""The rewards of a group as an advantage estimator sees them."""

from collections.abc import Sequence

import numpy as np

from common.rollouts import Group
from learner.loss.types import GroupRewards


def rewards_of(group: Group, sampled: Sequence[int], success: float) -> GroupRewards:
    """`sampled`: tokens of each sample that did not fail, in order; `success`: tasks.success."""
    good = np.array([sample.error is None for sample in group.samples])
    samples = [sample for sample in group.samples if sample.error is None]

    def column(values: Sequence[float]) -> np.ndarray:
        out = np.full(len(good), np.nan)
        out[good] = values
        return out

    lengths = np.zeros(len(good), dtype=np.int64)
    lengths[good] = sampled
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    parts = {name: column([sample.metrics.get(name, np.nan) for sample in samples]) for name in names}
    return GroupRewards(column([sample.reward for sample in samples]), lengths, parts, success)
