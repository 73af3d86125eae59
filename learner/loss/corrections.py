"""Off-policy corrections: what becomes of the weight w = exp(proximal_logprobs - behavior_logprobs).

The weight is the token's own (`correction_level: token`), the product over the loss tokens of its document
(`sequence`) or their geometric mean (`geometric`).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from common.config.loss import correction_bounds
from common.config.loss_keys import LossConfig
from learner.loss.ratios import Documents, bounded_exp
from learner.loss.types import Corrected, Correction


def none(log_weights: Tensor, documents: Documents, config: LossConfig) -> Corrected:
    """No correction: every token counts 1, however far the policy has moved since it was sampled."""
    nowhere = torch.zeros_like(documents.mask)
    return Corrected(torch.ones_like(log_weights), nowhere, nowhere, documents.mask)


def tis(log_weights: Tensor, documents: Documents, config: LossConfig) -> Corrected:
    """Truncated importance sampling: clamp(w, correction_low, correction_cap), of tokens or of documents.

    Source: Ionides, Truncated Importance Sampling (2008), section 2. Yao et al., Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training (2025), apply it to the mismatch between sampler and trainer.
    """
    low, cap = correction_bounds(config)
    ratio, outside = _bounded(log_weights, documents, config)
    return Corrected(ratio.clamp(low, cap), outside, torch.zeros_like(outside), documents.mask)


def icepop(log_weights: Tensor, documents: Documents, config: LossConfig) -> Corrected:
    """The token's weight where the level's ratio is within [correction_low, correction_cap], else 0.

    IcePop, Ring-1T (arXiv 2510.18855), the masking function M of its objective, for tokens. With ratios of
    documents it is NeMo-RL's seq-mask-tis: a document stays or goes as a whole, its tokens keep their own weights.
    Rejected tokens still count in the denominator, as in both.
    """
    _, rejected = _bounded(log_weights, documents, config)
    weights = bounded_exp(log_weights).masked_fill(rejected, 0.0)
    return Corrected(weights, torch.zeros_like(rejected), rejected, documents.mask)


def mis(log_weights: Tensor, documents: Documents, config: LossConfig) -> Corrected:
    """Masked importance sampling: the level's ratio itself where it is within the bounds, else out of the loss.

    Source: Liu, Li et al., When Speed Kills Stability (2025), sequence and geometric masks. Rejected tokens do not
    count in the denominator either, as in slime.
    """
    ratio, rejected = _bounded(log_weights, documents, config)
    weights = ratio.masked_fill(rejected, 0.0)
    return Corrected(weights, torch.zeros_like(rejected), rejected, documents.mask & ~rejected)


def _bounded(log_weights: Tensor, documents: Documents, config: LossConfig) -> tuple[Tensor, Tensor]:
    """([T] the level's ratio, [T] bool where it is out of bounds)."""
    if config.correction_level != "token":
        reduce = documents.sums if config.correction_level == "sequence" else documents.means
        log_weights = documents.spread(reduce(log_weights))
    low, cap = correction_bounds(config)
    ratio = bounded_exp(log_weights)
    return ratio, (ratio < low) | (ratio > cap)


def veto(corrected: Corrected, log_weights: Tensor, documents: Documents, least: float) -> tuple[Corrected, Tensor]:
    """(the rest, [T] bool: tokens of the vetoed documents), those with a loss token of weight below `least`.

    slime's and verl's veto: one token that the policy would hardly ever write makes the whole sample unusable.
    """
    impossible = (log_weights < math.log(least)).to(log_weights.dtype)
    vetoed = documents.spread(documents.sums(impossible) > 0)
    kept = replace(
        corrected,
        weights=corrected.weights.masked_fill(vetoed, 0.0),
        truncated=corrected.truncated & ~vetoed,
        rejected=corrected.rejected & ~vetoed,
        counted=corrected.counted & ~vetoed,
    )
    return kept, vetoed


CORRECTIONS: dict[str, Correction] = {"none": none, "tis": tis, "icepop": icepop, "mis": mis}
