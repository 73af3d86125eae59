"""Estimators of the divergence KL(policy || reference) from the tokens that were sampled.

Schulman, Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html, with r = p_reference / p.
"""

from collections.abc import Callable

from torch import Tensor

from learner.loss.ratios import bounded_exp

LARGEST = 10.0  # bounds k3, as in verl: a larger r would dominate every other token

KlEstimator = Callable[[Tensor], Tensor]  # log r = reference_logprobs - logprobs, [T] -> [T]


def k1(log_ratio: Tensor) -> Tensor:
    """-log r: unbiased, of either sign. Its gradient is zero in expectation, so it measures but does not restrain."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, low variance; on samples of the policy its gradient is that of the divergence."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """(r - 1) - log r, at most 10: unbiased but for the bound, never negative. GRPO (arXiv 2402.03300), equation 4."""
    return (bounded_exp(log_ratio) - 1 - log_ratio).clamp(max=LARGEST)


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}
