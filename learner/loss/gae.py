"""Advantages and returns of one document from rewards and a critic's values, in float64.

    step s:   a loss place, or a turn of them              V_s: value of the state before it
    d_s     = r_s + gamma V_{s+1} - V_s                     V after the last step is 0
    A_s     = d_s + gamma lam A_{s+1}
    return  = A_s, computed with lam_values, + V_s          the critic's target

Generalized Advantage Estimation (arXiv 1506.02438), equation 16. Two values of lambda are Decoupled GAE: VC-PPO (arXiv
2503.01491) and VAPO (arXiv 2504.05118), section 4.1. docs/critic.md says when to use which.

Places outside the loss mask, such as prompts and environment text, are skipped: the next step is the next sampled one.
A reward at such a place belongs to the step before it. It is dropped if there is none, since no trained token earned
it. An episode that a limit cut ends at its last step like any other, because its reward is known.
"""

import math
from collections.abc import Iterable

import numpy as np

WHITENING_EPS = 1e-6  # as in reinforce_pp

Moments = tuple[int, float, float]  # loss places, the sum of their advantages, and the sum of the squares


def over_tokens(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float, lam: float, lam_values: float
) -> tuple[np.ndarray, np.ndarray]:
    """([L] advantages, [L] returns), 0 outside `mask`; a step is a loss place.

    `rewards`, `values`: [L] numbers of a document's places, values before the place's token. `mask`: [L] bool, its
    places in the loss. `gamma`, `lam` and `lam_values` lie in [0, 1].
    """
    return _over(mask, rewards, values, mask, gamma=gamma, lam=lam, lam_values=lam_values)


def over_turns(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float, lam: float, lam_values: float
) -> tuple[np.ndarray, np.ndarray]:
    """As `over_tokens`, but a step is a turn: loss places without others between them. Its value is its first place's.

    All places of a turn have the turn's advantage and return. Turn-PPO (arXiv 2512.17008) has this chain of steps.
    """
    first = mask.copy()
    first[1:] &= ~mask[:-1]
    return _over(first, rewards, values, mask, gamma=gamma, lam=lam, lam_values=lam_values)


def length_lambda(tokens: int, alpha: float) -> float:
    """1 - 1 / (alpha tokens), and 0 where that is negative or there is no token.

    VAPO (arXiv 2504.05118), section 4.2, with alpha = 0.05. The terms of an advantage have the weights 1, lam, lam^2,
    ..., which sum to 1 / (1 - lam). That is `alpha tokens` then: the same share of every answer, however long it is.
    """
    return max(0.0, 1.0 - 1.0 / (alpha * tokens)) if tokens else 0.0


def less_kl(
    rewards: np.ndarray, logprobs: np.ndarray, reference_logprobs: np.ndarray, mask: np.ndarray, coefficient: float
) -> np.ndarray:
    """[L] rewards - coefficient (logprobs - reference_logprobs), the latter at loss places alone.

    The term is `k1` of KL(policy || reference) for each token. Ziegler et al., Fine-Tuning Language Models from Human
    Preferences (arXiv 1909.08593), equation 2.
    """
    return rewards - coefficient * np.where(mask, logprobs - reference_logprobs, 0.0)


def moments(advantages: np.ndarray, mask: np.ndarray) -> Moments:
    """Those of one document, for `whitening`; both [L]."""
    kept = advantages[mask]
    return len(kept), float(kept.sum()), float((kept**2).sum())


def whitening(parts: Iterable[Moments]) -> tuple[float, float]:
    """(mean, deviation + 1e-6) over the loss places of all documents: (A - mean) / deviation is whitened.

    The deviation divides by n - 1, as in reinforce_pp. The result does not depend on the order of the parts. Without
    two places there is nothing to compare: the deviation is 1 then.
    """
    found = list(parts)
    count = sum(places for places, _, _ in found)
    mean = math.fsum(total for _, total, _ in found) / max(count, 1)
    if count < 2:
        return mean, 1.0
    variance = (math.fsum(squares for _, _, squares in found) - count * mean**2) / (count - 1)
    return mean, math.sqrt(max(variance, 0.0)) + WHITENING_EPS


def _over(
    begins: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float,
    lam: float,
    lam_values: float,
) -> tuple[np.ndarray, np.ndarray]:
    """`begins`: [L] bool, the first place of each step; every other place belongs to the step before it."""
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    first = np.flatnonzero(begins)
    if len(first):
        before = values[first].astype(np.float64)
        paid = np.add.reduceat(rewards.astype(np.float64), first)
        surprises = paid + gamma * np.append(before[1:], 0.0) - before
        step = np.cumsum(begins)[mask] - 1
        advantages[mask] = _discounted(surprises, gamma * lam)[step]
        returns[mask] = (_discounted(surprises, gamma * lam_values) + before)[step]
    return advantages, returns


def _discounted(terms: np.ndarray, factor: float) -> np.ndarray:
    """[n] sum over k of factor^k terms[s + k].

    Each pass doubles the number of terms that a sum has, so it takes log2(n) of them.
    """
    sums = terms.copy()
    reach = 1
    while reach < len(sums):
        sums[:-reach] += factor**reach * sums[reach:]
        reach *= 2
    return sums
