"""Advantage estimators: the rewards of a whole step in, one number per sample out.

Every estimator gives 0 to samples that failed, and leaves them out of means and deviations. It also gives 0 where
fewer than two rewards can be compared.
"""

from collections.abc import Callable, Sequence

import numpy as np

STD_EPS = 1e-6


# rewards of all groups of one optimizer step, [G] float64 each, NaN where the sample failed -> [G] float64 of each
AdvantageEstimator = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def grpo(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the sample's group, with the sample's deviation (n - 1).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.
    """
    return [_within(group, lambda kept: (kept - kept.mean()) / (kept.std(ddof=1) + STD_EPS)) for group in groups]


def dr_grpo(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A_i = r_i - mean(r) over the sample's group. Its loss goes with `reduction: fixed_length`.

    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2: dividing by the deviation gives more weight
    to questions that are nearly solved or nearly hopeless.
    """
    return [_within(group, lambda kept: kept - kept.mean()) for group in groups]


def rloo(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A_i = r_i - mean of the other rewards of the group: the RLOO estimator of Back to Basics (arXiv 2402.14740).

    It is n / (n - 1) times dr_grpo, which makes the estimate of the policy gradient unbiased.
    """
    return [_within(group, lambda kept: (kept - kept.mean()) * (len(kept) / (len(kept) - 1))) for group in groups]


def reinforce_pp(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A_i = (r_i - mean(R)) / (std(R) + 1e-6), R all rewards of the step. Groups may have one sample.

    This is REINFORCE++ (arXiv 2501.03262) with global advantage normalisation, without a baseline per prompt and
    without the KL term in the reward.
    """
    rewards = np.concatenate([np.zeros(0), *(group[~np.isnan(group)] for group in groups)])
    if len(rewards) < 2:
        return [np.zeros(len(group)) for group in groups]
    mean = rewards.mean()
    deviation = rewards.std(ddof=1) + STD_EPS
    return [np.nan_to_num((group - mean) / deviation, nan=0.0) for group in groups]


def _within(group: np.ndarray, estimate: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[G] `estimate` of the rewards in their places, 0 elsewhere."""
    out = np.zeros(len(group))
    valid = ~np.isnan(group)
    if valid.sum() >= 2:
        out[valid] = estimate(group[valid])
    return out


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
}
