"""From a critic's values to every token's advantage, and to the return that its value should have been.

    every replica: its microbatches, the values of the version that trains -> `estimated`: advantages and returns
                   the moments of its advantages -> those of all replicas -> `normalized`

Only tokens in the loss have either. The formulas are in gae.py; docs/critic.md says which tokens they skip.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.config.critic import BY_LENGTH, CriticConfig
from learner.backend_protocol import Microbatch
from learner.loss.gae import Moments, length_lambda, less_kl, moments, over_tokens, over_turns, whitening

LEVELS = {"token": over_tokens, "turn": over_turns}


def estimated(
    microbatches: Sequence[Microbatch], values: Sequence[Tensor], logprobs: Sequence[Tensor], config: CriticConfig
) -> list[Microbatch]:
    """The microbatches with values, returns and advantages.

    `values`: [T] of each, as ValueModel.values returns them. `logprobs`: [T] of each by the policy that begins the
    batch, which the divergence in the reward needs; () without it.
    """
    given = logprobs or [None] * len(microbatches)
    return [_estimate(*row, config) for row in zip(microbatches, values, given, strict=True)]


def _estimate(batch: Microbatch, values: Tensor, logprobs: Tensor | None, config: CriticConfig) -> Microbatch:
    mask = batch.loss_mask.numpy() > 0
    columns = [
        np.zeros(len(mask)) if column is None else column.double().numpy()
        for column in (batch.rewards, values, logprobs, batch.reference_logprobs)
    ]
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    ends = np.cumsum(batch.document_lengths).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        own = slice(start, end)
        rewards, before, policy, reference = (column[own] for column in columns)
        if config.kl_coefficient:
            rewards = less_kl(rewards, policy, reference, mask[own], config.kl_coefficient)
        lam = config.lam
        if lam == BY_LENGTH:
            lam = length_lambda(int(mask[own].sum()), config.lam_alpha)
        discounts = {"gamma": config.gamma, "lam": float(lam), "lam_values": config.lam_values}
        advantages[own], returns[own] = LEVELS[config.level](rewards, before, mask[own], **discounts)
    return replace(
        batch,
        values=values,
        advantages=torch.from_numpy(advantages.astype(np.float32)),
        returns=torch.from_numpy(returns.astype(np.float32)),
    )


def moments_of(microbatches: Sequence[Microbatch]) -> list[Moments]:
    """Those of a replica's advantages."""
    return [moments(batch.advantages.double().numpy(), batch.loss_mask.numpy() > 0) for batch in microbatches]


def normalized(microbatches: Sequence[Microbatch], parts: Iterable[Moments]) -> list[Microbatch]:
    """The microbatches with advantages of mean 0 and deviation 1; `parts`: the moments of every replica."""
    mean, deviation = whitening(parts)
    return [
        replace(batch, advantages=torch.where(batch.loss_mask > 0, (batch.advantages - mean) / deviation, 0))
        for batch in microbatches
    ]
