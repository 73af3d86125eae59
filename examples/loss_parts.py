"""One part of the loss of each kind, as a user would bring it along; docs/losses.md.

learner:
  loss:
    objective: examples.loss_parts:topr
    objective_options: {most: 1.0}
    advantage: examples.loss_parts:over_median
    correction: examples.loss_parts:v_trace
    reduction: examples.loss_parts:root_of_length
    kl_estimator: examples.loss_parts:both_ways
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learner.loss.types import (
    Corrected,
    Count,
    Documents,
    GroupRewards,
    LossConfig,
    PolicyTokens,
    Surrogate,
    bounded_exp,
)


def topr(tokens: PolicyTokens, config: LossConfig, *, most: float = 1.0) -> Surrogate:
    """A logprobs where A > 0, else sg[min(r, most)] A logprobs: bad tokens fade out as they become rare.

    Tapered Off-Policy REINFORCE (arXiv 2503.14286), per token.
    """
    ratio = bounded_exp((tokens.logprobs - tokens.proximal_logprobs).detach())
    good = tokens.advantages > 0
    weight = torch.where(good, torch.ones_like(ratio), ratio.clamp(max=most))
    return Surrogate(weight * tokens.advantages * tokens.logprobs, ~good & (ratio > most))


def over_median(groups: Sequence[GroupRewards], *, scale: float = 1.0) -> list[np.ndarray]:
    """scale (r - median of the group): one very large reward does not make all others look bad."""
    found = []
    for group in groups:
        good = ~np.isnan(group.totals)
        middle = np.median(group.totals[good]) if good.any() else 0.0
        found.append(np.where(good, scale * (group.totals - middle), 0.0))
    return found


def v_trace(log_weights: Tensor, documents: Documents, config: LossConfig) -> Corrected:
    """min(w, 1): a token never counts more than when it is fresh. IMPALA (arXiv 1802.01561), section 4.1."""
    cut = log_weights > 0
    nowhere = torch.zeros_like(cut)
    return Corrected(bounded_exp(log_weights).clamp(max=1.0), cut, nowhere, documents.mask)


def root_of_length(count: Count) -> tuple[Tensor | None, Tensor]:
    """Documents weigh by the root of their tokens: between `token_mean` and `sequence_mean`."""
    tokens = count.documents.sums(count.counted).clamp(min=1)
    share = count.counted / count.documents.spread(tokens).sqrt()
    return share, (share * count.worth).sum()


def both_ways(log_ratio: Tensor) -> Tensor:
    """(r - 1) log r: its mean estimates KL(policy || reference) + KL(reference || policy), never below 0."""
    return (bounded_exp(log_ratio) - 1) * log_ratio
