"""Policy objectives: per-token quantities to be maximised."""

import torch
from torch import Tensor

from common.config.loss import clip_bounds
from common.config.loss_keys import LossConfig
from learner.loss.ratios import bounded_exp
from learner.loss.types import Objective, PolicyTokens, Surrogate

LEAST_REST = 1e-6  # float32 cannot tell smaller probabilities of all other tokens from 1 - p


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


def dppo_kl(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """As dppo_tv, measured by the divergence of two classes: the sampled token and all others.

    With q = p_proximal, D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) in nats. Dropped: D > clip_high where A > 0
    and p > q, D > clip_low where A <= 0 and p < q. DPPO (arXiv 2602.04879), its Binary-KL. A change of 0.01 counts more
    near 0 and near 1 than at 0.5, where dppo_tv counts them alike.
    """
    low, high = clip_bounds(config)
    with torch.no_grad():
        near, far = tokens.proximal_logprobs, tokens.logprobs
        rest = [(1 - x.exp()).clamp(min=LEAST_REST).log() for x in (near, far)]
        divergence = near.exp() * (near - far) + (1 - near.exp()) * (rest[0] - rest[1])
        up = tokens.advantages > 0
        dropped = torch.where(up, (far > near) & (divergence > high), (far < near) & (divergence > low))
    values = bounded_exp(tokens.logprobs - tokens.proximal_logprobs) * tokens.advantages
    return Surrogate(torch.where(dropped, torch.zeros_like(values), values), dropped)


def sapo(tokens: PolicyTokens, config: LossConfig, *, tau_high: float = 1.0, tau_low: float = 1.05) -> Surrogate:
    """(4 / tau) sigmoid(tau (r - 1)) A, with tau = tau_high where A > 0, else tau_low: no bound, but a soft gate.

    SAPO (arXiv 2511.20347), equations 5 and 6. At r = 1 its gradient is that of r A, and it fades on both sides; a
    larger tau fades sooner. TRL has the same defaults.
    """
    up = tokens.advantages > 0
    tau = torch.full_like(tokens.advantages, tau_low).masked_fill(up, tau_high)
    ratio = bounded_exp(tokens.logprobs - tokens.proximal_logprobs)
    values = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * tokens.advantages
    return Surrogate(values, torch.zeros_like(up))


def gmpo(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """A times the geometric mean of the document's ratios, each bounded in the logarithm: [-clip_low, clip_high].

    As in ppo_clip the bound counts only where it makes the objective smaller: above where A > 0, below elsewhere. GMPO
    (arXiv 2507.20673), equation 4. Tokens have the document's value and their own gradient, as in gspo, so that with
    `reduction: sequence_mean` the gradient is the paper's. Unlike gspo it bounds tokens and not documents.
    """
    low, high = clip_bounds(config)
    log_ratio = tokens.logprobs - tokens.proximal_logprobs
    bounded = log_ratio.clamp(-low, high)
    up = tokens.advantages > 0
    kept = torch.where(up, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    mean = tokens.documents.spread(tokens.documents.means(kept.detach()))
    values = bounded_exp(mean + (kept - kept.detach())) * tokens.advantages
    return Surrogate(values, (kept != log_ratio).detach())


def clip_cov(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """ppo_clip, without the marked tokens: few of those that lower the entropy most, drawn over the whole batch.

    Clip-Cov, The Entropy Mechanism of RL (arXiv 2505.22617), section 4.2. whole_batch.py marks.
    """
    found = _clip(tokens.logprobs - tokens.proximal_logprobs, tokens.advantages, config)
    marked = _marked(tokens)
    return Surrogate(found.values.masked_fill(marked, 0.0), found.clipped | marked)


def kl_cov(tokens: PolicyTokens, config: LossConfig, *, coefficient: float = 1.0) -> Surrogate:
    """r A, and of the marked tokens r A - coefficient |log r|: those of the whole batch that lower the entropy most.

    KL-Cov, The Entropy Mechanism of RL (arXiv 2505.22617), section 4.2; |log r| as in verl. whole_batch.py marks.
    """
    log_ratio = tokens.logprobs - tokens.proximal_logprobs
    marked = _marked(tokens)
    pull = torch.where(marked, log_ratio.abs(), torch.zeros_like(log_ratio))
    return Surrogate(bounded_exp(log_ratio) * tokens.advantages - coefficient * pull, marked)


def m2po(tokens: PolicyTokens, config: LossConfig) -> Surrogate:
    """r A, without the marked tokens: the fewest that bring the batch's mean of (log r)^2 down to `moment`.

    M2PO (arXiv 2510.01161), section 4. No ratio is clipped, so that very stale tokens still teach. whole_batch.py
    marks.
    """
    values = bounded_exp(tokens.logprobs - tokens.proximal_logprobs) * tokens.advantages
    marked = _marked(tokens)
    return Surrogate(values.masked_fill(marked, 0.0), marked)


def _marked(tokens: PolicyTokens) -> Tensor:
    """[T] bool, the tokens that the whole batch's statistics chose."""
    return torch.zeros_like(tokens.documents.mask) if tokens.marked is None else tokens.marked


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


OBJECTIVES: dict[str, Objective] = {
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "m2po": m2po,
}
