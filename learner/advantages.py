"""Advantage estimators: the rewards of one group in, one number per sample out.

Adding one: write a function of (rewards, valid, divide_by_std), add it to ADVANTAGES and its name to
`common.config.LossConfig.advantage`.
"""

from collections.abc import Callable

import numpy as np

STD_EPS = 1e-6

# (rewards [G] float64, valid [G] bool, divide_by_std) -> [G] float64
AdvantageEstimator = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]


def grpo(rewards: np.ndarray, valid: np.ndarray, divide_by_std: bool) -> np.ndarray:
    """Group-relative advantage: A_i = r_i - mean(r), optionally / (std(r) + eps).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; without the division it is the
    estimator that Dr. GRPO (arXiv 2503.20783) argues for. The standard deviation is the sample one
    (divides by n - 1). Samples that failed enter neither mean nor deviation.

    Args:
        rewards: [G] one reward per sample.
        valid: [G] bool, False where the sample failed.
        divide_by_std: divide by the standard deviation of the group.

    Returns:
        [G] float64; 0 where the sample failed, and everywhere when fewer than two are left: one reward
        has nothing to be compared with.
    """
    values = np.asarray(rewards, dtype=np.float64)
    out = np.zeros_like(values)
    kept = values[valid]
    if len(kept) < 2:
        return out
    centred = kept - kept.mean()
    out[valid] = centred / (kept.std(ddof=1) + STD_EPS) if divide_by_std else centred
    return out


ADVANTAGES: dict[str, AdvantageEstimator] = {"grpo": grpo}
