"""The losses: pure functions of log-probabilities, in whatever precision they come (tests use float64).

    r    = exp(logprobs - proximal_logprobs)
    w    = stop_gradient(exp(proximal_logprobs - behavior_logprobs))
    loss = -mean over loss tokens of correction(w) * objective(r, A)  -  entropy_coefficient * entropy

This is decoupled PPO (Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3;
for asynchronous RL on language models AReaL, arXiv 2505.24298, section 5.2): the trust region is around the
proximal policy, the importance weight leads from the behavior policy to it. The mean runs over all loss
tokens of the global batch (token-mean, DAPO, arXiv 2503.14476, section 3.3); functions here return sums
and the backend divides.

Which policy is proximal:

- `recompute`: the policy at the start of the step. A batch here is exactly one optimizer step, so that policy is
  the one of this very forward pass and proximal = stop_gradient(logprobs): no second pass. Then r is 1 in
  value (its gradient is that of logprobs), no clipping happens, and w carries all of the correction.
- `behavior`: the policy that sampled the token. Then w = 1, and clipping bounds the whole way from behavior to
  current policy: the plain clipped objective.
"""

import torch
from torch import Tensor

from common.config import LossConfig
from learner.backend import LossFunction, LossOutput, Microbatch
from learner.corrections import CORRECTIONS
from learner.objectives import OBJECTIVES


def policy_loss(config: LossConfig) -> LossFunction:
    """The reinforcement-learning loss for `config`.

    The returned function's sums, all over loss tokens: `ratio` (exp(logprobs - behavior_logprobs)),
    `correction_clipped` and `objective_clipped` (tokens), `mismatch` (|proximal - behavior|; policy drift and
    numerical mismatch together), `mismatch_fresh` and `fresh_tokens` (the same over tokens sampled at the
    version that trains, where the mismatch is purely numerical), `entropy`. Maximum: `ratio`.
    """
    objective = OBJECTIVES[config.objective]
    correction = CORRECTIONS[config.correction]

    def loss(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
        mask = batch.loss_mask > 0
        zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
        behavior = torch.where(mask, batch.behavior_logprobs.to(logprobs.dtype), zero)
        logprobs = torch.where(mask, logprobs, zero)
        current = logprobs.detach()
        proximal = current if config.proximal == "recompute" else behavior
        corrected = correction(torch.exp(proximal - behavior), config)
        surrogate = objective(logprobs - proximal, batch.advantages.to(logprobs.dtype), config)
        objective_sum = torch.where(mask, corrected.weights * surrogate.values, zero).sum()
        loss_sum = -objective_sum
        drift = current - behavior
        ratio = torch.exp(drift)
        sums = {
            "ratio": torch.where(mask, ratio, zero).sum(),
            "correction_clipped": (corrected.changed & mask).sum().to(logprobs.dtype),
            "objective_clipped": (surrogate.clipped & mask).sum().to(logprobs.dtype),
            "mismatch": drift.abs().sum(),
        }
        if batch.staleness is not None:
            fresh = mask & (batch.staleness == 0)
            sums["mismatch_fresh"] = torch.where(fresh, drift.abs(), zero).sum()
            sums["fresh_tokens"] = fresh.sum().to(logprobs.dtype)
        if entropy is not None:
            entropy_sum = torch.where(mask, entropy, zero).sum()
            sums["entropy"] = entropy_sum.detach()
            if config.entropy_coefficient:
                loss_sum = loss_sum - config.entropy_coefficient * entropy_sum
        return LossOutput(loss_sum, sums, {"ratio": torch.where(mask, ratio, zero).max()})

    return loss


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """Supervised loss: -sum of the targets' log-probabilities over loss tokens. logprobs: [T]."""
    return LossOutput(-(logprobs * batch.loss_mask.to(logprobs.dtype)).sum())
