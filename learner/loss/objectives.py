"""Policy objectives: per-token quantities to be maximised."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.loss import clip_bounds
from common.config.schema import LossConfig
from learner.loss.ratios import Documents, bounded_exp


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens as an objective sees them; log-probabilities are 0 outside the loss."""

    logprobs: Tensor  # [T] of the policy in training, differentiable
    proximal_logprobs: Tensor  # [T] of the policy that the trust region surrounds, without gradient
    advantages: Tensor  # [T]
    documents: Documents  # where documents begin and end, and which tokens are in the loss


@dataclass(frozen=True)
class Surrogate:
    values: Tensor  # [T], differentiable
    clipped: Tensor  # [T] bool, where the objective's bound applies


Objective = Callable[[PolicyTokens, LossConfig], Surrogate]


def ppo_clip(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - proximal_logprobs).

    PPO (arXiv 1707.06347), equation 7; the two separate bounds are DAPO's clip-higher (arXiv 2503.14476),
    equation 10. With `clip_dual` c, the value is at least c A where A < 0: the dual-clip PPO of Ye et al. (arXiv
    1912.09729). It bounds the loss of tokens that have become far more probable. Clipped tokens have no gradient.
    """
    return _clip(tokens.logprobs - tokens.proximal_logprobs, tokens.advantages, config)


def gspo(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """ppo_clip with one ratio per document, the geometric mean of its tokens' ratios.

    GSPO (arXiv 2507.18071), equations 5 to 7, in the token form of equations 13 and 14. Every token has the value of
    the document's ratio and its own gradient: s_t = sg[s] * exp(logprobs - sg[logprobs]). Where all tokens of a
    document have one advantage and one weight, its gradient is that of equation 5.
    """
    documents = tokens.documents
    log_ratio = (tokens.logprobs - tokens.proximal_logprobs).detach()
    mean = documents.spread(documents.means(log_ratio))
    return _clip(mean + (tokens.logprobs - tokens.logprobs.detach()), tokens.advantages, config)


def cispo(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """sg[clip(r, 1 - clip_low, 1 + clip_high)] * A * logprobs: the weight is clipped, no token loses its gradient.

    CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    low, high = clip_bounds(config)
    ratio = bounded_exp((tokens.logprobs - tokens.proximal_logprobs).detach())
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return Surrogate(weight * tokens.advantages * tokens.logprobs, weight != ratio)


def dppo_tv(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """r A, or 0 where the token's probability p has gone too far already in the direction in which A pushes it.

    Dropped: p - p_proximal > clip_high where A > 0, p - p_proximal < -clip_low elsewhere. This is
    DPPO's mask (arXiv 2602.04879) by total variation of the sampled token against the rest. Bounds and signs are
    prime-rl's, without its additional penalty 1e-3 (log r)^2.
    """
    low, high = clip_bounds(config)
    with torch.no_grad():
        difference = tokens.logprobs.exp() - tokens.proximal_logprobs.exp()
        dropped = torch.where(tokens.advantages > 0, difference > high, difference < -low)
    values = bounded_exp(tokens.logprobs - tokens.proximal_logprobs) * tokens.advantages
    return Surrogate(torch.where(dropped, torch.zeros_like(values), values), dropped)


def _clip(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    low, high = clip_bounds(config)
    ratio = bounded_exp(log_ratio)
    unclipped = ratio * advantages
    bounded = torch.clamp(ratio, 1.0 - low, 1.0 + high) * advantages
    values = torch.minimum(unclipped, bounded)
    clipped = (bounded < unclipped).detach()
    if config.clip_dual is not None:
        least = config.clip_dual * advantages
        below = ((advantages < 0) & (values < least)).detach()
        values = torch.where(below, least, values)
        clipped = clipped | below
    return Surrogate(values, clipped)


OBJECTIVES: dict[str, Objective] = {"ppo_clip": ppo_clip, "cispo": cispo, "gspo": gspo, "dppo_tv": dppo_tv}
