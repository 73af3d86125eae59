"""Advantage estimators: the rewards of a whole step in, one number per sample out.

Every estimator gives 0 to samples that failed, and leaves them out of means and deviations. It also gives 0 where
fewer than two rewards can be compared.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import comb

import numpy as np

from common.config.loss import DEFAULT_K
from common.errors import UsageError, meant
from learner.loss.types import AdvantageEstimator, GroupRewards

STD_EPS = 1e-6
GDPO_EPS = 1e-4  # as in TRL
ROUNDING = 1e-9


def grpo(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the sample's group, with the sample's deviation (n - 1).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.
    """
    return [_within(group, lambda kept: (kept - kept.mean()) / (kept.std(ddof=1) + STD_EPS)) for group in groups]


def dr_grpo(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """A_i = r_i - mean(r) over the sample's group. Its loss goes with `reduction: fixed_length`.

    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2: dividing by the deviation gives more weight
    to questions that are nearly solved or nearly hopeless.
    """
    return [_within(group, lambda kept: kept - kept.mean()) for group in groups]


def rloo(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """A_i = r_i - mean of the other rewards of the group: the RLOO estimator of Back to Basics (arXiv 2402.14740).

    It is n / (n - 1) times dr_grpo, which makes the estimate of the policy gradient unbiased.
    """
    return [_within(group, lambda kept: (kept - kept.mean()) * (len(kept) / (len(kept) - 1))) for group in groups]


def reinforce_pp(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """A_i = (r_i - mean(R)) / (std(R) + 1e-6), R all rewards of the step. Groups may have one sample.

    This is REINFORCE++ (arXiv 2501.03262) with global advantage normalisation, without a baseline per prompt and
    without the KL term in the reward.
    """
    return _normalised([group.totals for group in groups], STD_EPS)


def opo(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """A_i = r_i - sum(l r) / sum(l) over the sample's group, with l the sampled tokens of each sample.

    On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585), section 3. It is the baseline of least variance if the
    squared norm of a sample's gradient grows like its length.
    """
    return [_within(group, partial(_against_tokens, group.lengths[_good(group)])) for group in groups]


def maxrl(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """A_i = (r_i - mean(r)) / mean(r) over the sample's group; 0 where the mean is not above 0.

    Maximum Likelihood Reinforcement Learning (arXiv 2602.02710). With rewards of 0 and 1 it estimates the gradient of
    the log of the success rate, from the successes alone. So hard prompts count most. With rewards from 0 on no
    advantage exceeds n - 1. Raises UsageError for a negative one.
    """
    return [_within(group, _over_mean) for group in groups]


def pass_at_k(groups: Sequence[GroupRewards], *, k: float = DEFAULT_K) -> list[np.ndarray]:
    """The advantage of a sample where a draw of `k` samples of its group counts as soon as one of them succeeds.

    With n samples and f failures among them, P = 1 - C(f, k) / C(n, k) and s = sqrt(P (1 - P)):
    A = (1 - P) / s of a success, (1 - P - C(f - 1, k - 1) / C(n - 1, k - 1)) / s of a failure. All are 0 where s is.
    Pass@k Training (arXiv 2508.10751), its analytical derivation. A success has a reward of `tasks.success` or more.
    """
    return [_within(group, partial(_pass_at, int(k), group.success)) for group in groups]


def gdpo(groups: Sequence[GroupRewards], **weights: float) -> list[np.ndarray]:
    """Several rewards, each normalised within its group, then summed, then normalised over the step.

    S_i = sum over names of weight (r_i - mean(r)) / (std(r) + 1e-4) and A_i = (S_i - mean(S)) / (std(S) + 1e-4).
    GDPO (arXiv 2601.05242), section 3: a sum that is normalised as a whole cannot tell many combinations of
    rewards apart. Raises UsageError for a reward that a sample has not.
    """
    return _normalised([_summed(group, weights) for group in groups], GDPO_EPS)


def _summed(group: GroupRewards, weights: dict[str, float]) -> np.ndarray:
    """[G] S_i of gdpo, NaN where the sample failed."""
    total = np.where(_good(group), 0.0, np.nan)
    for name, weight in weights.items():
        if name not in group.parts or (np.isnan(group.parts[name]) & _good(group)).any():
            hint = meant(name, group.parts, f"they have {', '.join(sorted(group.parts)) or 'none'}")
            raise UsageError(f"learner.loss.advantage: gdpo, but samples have no reward '{name}'; {hint}")
        part = GroupRewards(np.where(_good(group), group.parts[name], np.nan), group.lengths)
        total += weight * _within(part, lambda kept: (kept - kept.mean()) / (kept.std(ddof=1) + GDPO_EPS))
    return total


def gae(groups: Sequence[GroupRewards]) -> list[np.ndarray]:
    """0 of every sample: each token gets an advantage of its own from a critic's values; learner/loss/estimates.py."""
    return [np.zeros(len(group.totals)) for group in groups]


def _over_mean(kept: np.ndarray) -> np.ndarray:
    """[n] advantages of maxrl. A sum of turns' rewards may be rounded to a little less than 0."""
    if (least := kept.min()) < -ROUNDING:
        hint = "it divides by the mean of a group's rewards, so none may be negative; docs/algorithms.md"
        raise UsageError(f"learner.loss.advantage: maxrl, but a sample has the reward {least:g}; {hint}")
    kept = kept.clip(min=0.0)
    mean = kept.mean()
    return (kept - mean) / mean if mean > 0 else np.zeros(len(kept))


def _against_tokens(lengths: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[n] advantages of opo."""
    return kept - np.average(kept, weights=np.maximum(lengths, 1))


def _pass_at(k: int, success: float, kept: np.ndarray) -> np.ndarray:
    """[n] advantages of pass_at_k."""
    succeeds = kept >= success
    n = len(kept)
    failures = n - int(succeeds.sum())
    none = comb(failures, k) / comb(n, k) if k <= n else 0.0  # the probability that no sample of k succeeds
    deviation = (none * (1 - none)) ** 0.5
    if deviation == 0:
        return np.zeros(n)
    beside = comb(failures - 1, k - 1) / comb(n - 1, k - 1)  # the same of a failure's k - 1 companions
    return np.where(succeeds, none, none - beside) / deviation


def _normalised(groups: Sequence[np.ndarray], eps: float) -> list[np.ndarray]:
    """(x - mean) / (deviation + eps) over all numbers of all groups; 0 for NaN."""
    found = np.concatenate([np.zeros(0), *(group[~np.isnan(group)] for group in groups)])
    if len(found) < 2:
        return [np.zeros(len(group)) for group in groups]
    mean = found.mean()
    deviation = found.std(ddof=1) + eps
    return [np.nan_to_num((group - mean) / deviation, nan=0.0) for group in groups]


def _good(group: GroupRewards) -> np.ndarray:
    """[G] bool, the samples that did not fail."""
    return ~np.isnan(group.totals)


def _within(group: GroupRewards, estimate: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[G] `estimate` of the rewards in their places, 0 elsewhere."""
    out = np.zeros(len(group.totals))
    valid = _good(group)
    if valid.sum() >= 2:
        out[valid] = estimate(group.totals[valid])
    return out


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "opo": opo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "gae": gae,
}
