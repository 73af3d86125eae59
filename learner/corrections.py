"""Off-policy corrections: what becomes of the weight w = exp(proximal_logprobs - behavior_logprobs).

Adding one: write a function of (weights, config), add it to CORRECTIONS and its name to
`common.config.LossConfig.correction`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import LossConfig

TOKEN_CAP = 2.0


@dataclass(frozen=True)
class Corrected:
    """What a correction makes of every token's weight.

    Attributes:
        weights: [T] factor of the token's objective.
        changed: [T] bool, where the factor is not the importance weight itself.
    """

    weights: Tensor
    changed: Tensor


# (weights [T] without gradient, config) -> Corrected
Correction = Callable[[Tensor, LossConfig], Corrected]


def none(weights: Tensor, config: LossConfig) -> Corrected:
    """No correction: every token counts 1, however far the policy has moved since it was sampled."""
    return Corrected(torch.ones_like(weights), torch.zeros_like(weights, dtype=torch.bool))


def tis(weights: Tensor, config: LossConfig) -> Corrected:
    """Truncated importance sampling per token: min(w, correction_cap).

    Ionides, Truncated Importance Sampling (2008), section 2; for the mismatch between sampler and trainer Yao et
    al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025). Truncation from
    above bounds the variance; small weights stay, so tokens that the policy has left fade out.

    Args:
        weights: [T] importance weights; infinite ones are truncated like any other.
        config: `correction_cap` is read.
    """
    cap = TOKEN_CAP if config.correction_cap is None else config.correction_cap
    return Corrected(weights.clamp(max=cap), weights > cap)


CORRECTIONS: dict[str, Correction] = {"none": none, "tis": tis}
