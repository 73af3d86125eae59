"""Measurements of a microbatch's tokens besides the loss: sums and counts that add over microbatches and ranks.

Quantiles do not add, so the ratios exp(logprobs - behavior_logprobs) are counted in fixed bins. With l the log-ratio,
bins have equal width in x = sign(l) log(1 + |l| / 1e-3). A quantile read from the counts is right to half a bin up to
|l| = 20. That is 4 % of |l|, or 4e-5 nat if that is more.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common.metrics import AGE_CLASSES
from learner.loss.ratios import LOG_BOUND, bounded_exp
from learner.loss.types import Corrected

LINEAR_BELOW = 1e-3  # |log-ratio| up to which bins are of about equal width
HALF_BINS = 120  # on either side of the bin around 0
BIN_WIDTH = math.log1p(LOG_BOUND / LINEAR_BELOW) / HALF_BINS


def token_sums(
    mask: Tensor,
    drift: Tensor,
    corrected: Corrected,
    vetoed: Tensor | None,
    clipped: Tensor,
    begun: Tensor | None = None,
) -> dict[str, Tensor]:
    """Scalar sums over loss tokens, in the dtype of `drift`; `correction_masked` does not count the veto's tokens.

    `drift`: [T] logprobs - behavior_logprobs without gradient, 0 outside the loss. `begun`: the same of the policy that
    began the batch, if that is another one; its distance is `mismatch`. `corrected` is after the veto.
    """
    flags = {
        "correction_clipped": corrected.truncated,
        "correction_masked": corrected.rejected,
        "vetoed": torch.zeros_like(mask) if vetoed is None else vetoed,
        "objective_clipped": clipped,
    }
    numbers = {
        "ratio": bounded_exp(drift),
        "mismatch": (drift if begun is None else begun).abs(),
        "weight": corrected.weights,
        "weight_squared": corrected.weights.square(),
    }
    rows = torch.stack([*numbers.values(), *(flag.to(drift.dtype) for flag in flags.values())])
    return dict(zip([*numbers, *flags], (rows * mask).sum(1).unbind(), strict=True))


def token_counts(
    mask: Tensor, drift: Tensor, staleness: Tensor | None, begun: Tensor | None = None
) -> dict[str, Tensor]:
    """Vectors: `ratio_bins` [241] counts of loss tokens; by class of age [6] `mismatch_by_age` and `tokens_by_age`.

    Also the scalar `age`, the sum of the staleness. `staleness`: [T] int, None counts as 0. `drift`, `begun` as in
    `token_sums`.
    """
    ones = mask.to(drift.dtype)
    drift = drift.nan_to_num(0.0, LOG_BOUND, -LOG_BOUND)  # the loss tells of NaN; here it would be no place
    x = drift.sign() * torch.log1p(drift.abs().clamp(max=LOG_BOUND) / LINEAR_BELOW)
    place = (x / BIN_WIDTH).round().long() + HALF_BINS
    ages = torch.zeros_like(place) if staleness is None else staleness.long()
    age = torch.bucketize(ages, _later_classes(place.device), right=True)
    mismatch = drift if begun is None else begun.nan_to_num(0.0, LOG_BOUND, -LOG_BOUND)
    return {
        "ratio_bins": ones.new_zeros(2 * HALF_BINS + 1).index_add_(0, place, ones),
        "mismatch_by_age": ones.new_zeros(len(AGE_CLASSES)).index_add_(0, age, mismatch.abs() * ones),
        "tokens_by_age": ones.new_zeros(len(AGE_CLASSES)).index_add_(0, age, ones),
        "age": (ages * ones).sum(),
    }


@lru_cache
def _later_classes(device: torch.device) -> Tensor:
    return torch.tensor(AGE_CLASSES[1:], device=device)


def ratio_quantile(counts: Sequence[float], share: float) -> float:
    """The ratio that `share` of the tokens do not exceed, from `ratio_bins`; 0 of no tokens."""
    if not any(counts):
        return 0.0
    up_to = np.cumsum(counts)
    step = int(np.searchsorted(up_to, share * up_to[-1])) - HALF_BINS
    return math.exp(math.copysign(LINEAR_BELOW * math.expm1(abs(step) * BIN_WIDTH), step))
