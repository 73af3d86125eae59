"""The types of the parts of a loss, for ours and for anybody's; docs/losses.md has an example of each part.

A part is a function. `learner.loss.objective`, `advantage`, `correction`, `reduction` and `kl_estimator` take its name,
or 'module:function'. Everything that it needs can be imported from here.

    T: places of a microbatch, whose documents are packed end to end.    D: its documents, in this order.
    G: samples of one task.

A microbatch is an arbitrary part of a batch. So no part may divide by the tokens or the documents that it sees. The
backend adds the sums and the denominators of all microbatches of all ranks, and divides once. The loss is computed in
the dtype of the log-probabilities, float32 in training and float64 in tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from common.config.loss import clip_bounds, correction_bounds
from common.config.loss_keys import LossConfig
from learner.loss.ratios import Documents, bounded_exp, within

__all__ = [
    "AdvantageEstimator",
    "Corrected",
    "Correction",
    "Count",
    "Documents",
    "GroupRewards",
    "KlEstimator",
    "LossConfig",
    "Objective",
    "PolicyTokens",
    "Reduction",
    "Surrogate",
    "bounded_exp",
    "clip_bounds",
    "correction_bounds",
    "within",
]

# ---------------------------------------------------------------- advantages


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of one task's samples; [G] arrays in the order of the samples, read-only."""

    totals: np.ndarray  # [G] float64, the rewards; NaN where the sample failed
    lengths: np.ndarray  # [G] int64, sampled tokens of the sample, over all of its paths
    # [G] float64 each, the numbers that the environment reported, by name; NaN where a sample has none of this name
    parts: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    success: float = 1.0  # tasks.success: a sample with this reward or more is a success

    @classmethod
    def of(cls, totals: np.ndarray) -> "GroupRewards":
        """Samples of one token each with these rewards [G]."""
        return cls(np.asarray(totals, dtype=np.float64), np.ones(len(totals), dtype=np.int64))


# (the groups of one step, of one source; advantage_options by keyword) -> [G] float64 of each group. A sample that
# failed gets 0 and enters no mean. The order of the groups has no meaning.
AdvantageEstimator = Callable[..., list[np.ndarray]]

# ---------------------------------------------------------------- objectives


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens as an objective sees them; log-probabilities are 0 outside the loss."""

    logprobs: Tensor  # [T] of the policy in training, differentiable
    proximal_logprobs: Tensor  # [T] of the policy that the trust region surrounds, without gradient
    advantages: Tensor  # [T]
    documents: Documents  # where documents begin and end, and which tokens are in the loss (`documents.mask`, [T] bool)
    marked: Tensor | None = None  # [T] bool, tokens that whole_batch.py has chosen; None without such an objective


@dataclass(frozen=True)
class Surrogate:
    """The result of an objective. Values outside the loss are not read."""

    values: Tensor  # [T], to be maximised, differentiable
    clipped: Tensor  # [T] bool, where the objective's bound applies; a metric counts them


# (tokens, config; objective_options by keyword) -> Surrogate
Objective = Callable[..., Surrogate]

# ---------------------------------------------------------------- corrections


@dataclass(frozen=True)
class Corrected:
    """The result of a correction."""

    weights: Tensor  # [T] factor of the token's objective, without gradient
    truncated: Tensor  # [T] bool, where the weight was moved to a bound
    rejected: Tensor  # [T] bool, where it was set to 0 because it was out of bounds
    counted: Tensor  # [T] bool, tokens that means are taken over


# (log of the tokens' weights [T] without gradient, 0 outside the loss; documents; config) -> Corrected
Correction = Callable[[Tensor, Documents, LossConfig], Corrected]

# ---------------------------------------------------------------- divergence from the reference

KlEstimator = Callable[[Tensor], Tensor]  # log r = reference_logprobs - logprobs, [T] -> [T], each from its own token

# ---------------------------------------------------------------- reductions
# A reduction gives every token a share of the sum, and the microbatch's part of the denominator. The backend adds both
# over all microbatches of all data-parallel ranks and then divides. So the result does not depend on packing.


@dataclass(frozen=True)
class Count:
    """The tokens that a reduction counts."""

    documents: Documents
    counted: Tensor  # [T] float, 1 for tokens that means are taken over, else 0
    worth: Tensor  # [T] float, a token's part of the denominator: `counted`, or under `correction_normalize` its weight
    max_tokens: int  # rollout.max_tokens
    normalized: bool  # whether `worth` are weights


# -> ([T] factor of each token's term in the sum, None for 1; scalar denominator)
Reduction = Callable[[Count], tuple[Tensor | None, Tensor]]
