"""Policy objectives: per-token quantities to be maximised.

Adding one: write a function of (log_ratio, advantages, config), add it to OBJECTIVES and its name to
`common.config.LossConfig.objective`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import LossConfig

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Surrogate:
    """What an objective says of every token.

    Attributes:
        values: [T] objective, differentiable.
        clipped: [T] bool, where the clipped branch is the one taken, so that the token has no gradient.
    """

    values: Tensor
    clipped: Tensor


# (log_ratio [T], advantages [T], config) -> Surrogate
Objective = Callable[[Tensor, Tensor, LossConfig], Surrogate]


def ppo_clip(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    """min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) with r = exp(log_ratio).

    PPO (arXiv 1707.06347), equation 7; the two separate bounds are DAPO's clip-higher (arXiv 2503.14476),
    equation 10.

    Args:
        log_ratio: [T] logprobs - proximal_logprobs.
        advantages: [T].
        config: `clip_low` and `clip_high` are read.
    """
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages
    low = CLIP_LOW if config.clip_low is None else config.clip_low
    high = CLIP_HIGH if config.clip_high is None else config.clip_high
    clipped = torch.clamp(ratio, 1.0 - low, 1.0 + high) * advantages
    return Surrogate(torch.minimum(unclipped, clipped), (clipped < unclipped).detach())


OBJECTIVES: dict[str, Objective] = {"ppo_clip": ppo_clip}
