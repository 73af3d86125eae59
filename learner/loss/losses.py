"""The losses: pure functions of log-probabilities, in whatever precision they come (tests use float64).

    r    = exp(logprobs - proximal_logprobs)
    w    = stop_gradient(exp(proximal_logprobs - behavior_logprobs))
    loss = -mean over loss tokens of
           correction(w) * objective(r, A) + entropy_coefficient * entropy - kl_coefficient * kl

This is decoupled PPO (Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3).
AReaL (arXiv 2505.24298, section 5.2) uses it for asynchronous RL on language models. The trust region is around the
proximal policy; the importance weight leads from the behavior policy to it. The parts are registries, one file each:
proximal, corrections, objectives, kl_estimators, reductions; docs/algorithms.md says when to use which.

Functions here return sums and denominators of one microbatch; the backend adds them over the global batch and
divides. The divergence and the entropy are means over the same tokens as the objective. Under `correction_normalize`
everything becomes a weighted mean: sum of w * (objective + ...) over sum of w.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.schema import LossConfig
from learner.backend_protocol import LossFunction, LossOutput, Microbatch
from learner.loss.corrections import CORRECTIONS, Corrected, veto
from learner.loss.kl_estimators import KL_ESTIMATORS
from learner.loss.objectives import OBJECTIVES, PolicyTokens, Surrogate
from learner.loss.proximal import PROXIMALS
from learner.loss.ratios import Documents, bounded_exp
from learner.loss.reductions import REDUCTIONS, Count
from learner.loss.token_diagnostics import token_counts, token_sums


@dataclass(frozen=True)
class _Terms:
    """Everything of one microbatch that is summed; [T] each."""

    documents: Documents
    corrected: Corrected
    vetoed: Tensor | None
    surrogate: Surrogate
    kl: Tensor | None
    entropy: Tensor | None


def policy_loss(config: LossConfig, max_tokens: int) -> LossFunction:
    """The reinforcement-learning loss for `config`.

    The returned function's sums and histograms are those of token_diagnostics.py, and the sums `entropy` and `kl` where
    they are computed, all over loss tokens. Maximum: `ratio`. Its gradient reaches `entropy` only if
    `entropy_coefficient` is positive.

    Args:
        config: chooses from the registries.
        max_tokens: rollout.max_tokens, for the reduction `fixed_length`.
    """
    proximal_of, correction, objective = PROXIMALS[config.proximal], CORRECTIONS[config.correction], config.objective

    def loss(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
        mask = batch.loss_mask > 0
        documents = Documents(batch.document_lengths, mask)
        behavior = _within(mask, batch.behavior_logprobs.to(logprobs.dtype))
        logprobs = _within(mask, logprobs)
        current = logprobs.detach()
        proximal = proximal_of(current, behavior, batch.staleness)
        log_weights, vetoed = proximal - behavior, None
        corrected = correction(log_weights, documents, config)
        if config.correction_veto is not None:
            corrected, vetoed = veto(corrected, log_weights, documents, config.correction_veto)
        tokens = PolicyTokens(logprobs, proximal, batch.advantages.to(logprobs.dtype), documents)
        surrogate = OBJECTIVES[objective](tokens, config)
        kl = _divergence(config, logprobs, mask, batch.reference_logprobs)
        terms = _Terms(documents, corrected, vetoed, surrogate, kl, None if entropy is None else _within(mask, entropy))
        return _output(config, max_tokens, terms, current - behavior, batch.staleness)

    return loss


def _output(config: LossConfig, max_tokens: int, terms: _Terms, drift: Tensor, staleness: Tensor | None) -> LossOutput:
    """Sums of the terms; drift: [T] logprobs - behavior_logprobs without gradient."""
    mask, corrected = terms.documents.mask, terms.corrected
    weights = _within(mask, corrected.weights)
    counted = (corrected.counted & mask).to(weights.dtype)
    worth = weights if config.correction_normalize else counted
    values = weights * terms.surrogate.values
    sums = token_sums(mask, drift, corrected, terms.vetoed, terms.surrogate.clipped)
    if terms.kl is not None:
        values = values - config.kl_coefficient * worth * terms.kl
        sums["kl"] = terms.kl.detach().sum()
    if terms.entropy is not None:
        sums["entropy"] = terms.entropy.detach().sum()
        if config.entropy_coefficient:
            values = values + config.entropy_coefficient * worth * terms.entropy
    count = Count(terms.documents, counted, worth, max_tokens, config.correction_normalize)
    reduced = REDUCTIONS[config.reduction](count)
    if reduced.share is not None:
        values = reduced.share * values
    return LossOutput(
        -_within(mask, values).sum(),
        sums,
        {"ratio": _within(mask, bounded_exp(drift)).max()},
        reduced.denominator,
        token_counts(mask, drift, staleness),
    )


def _divergence(config: LossConfig, logprobs: Tensor, mask: Tensor, reference: Tensor | None) -> Tensor | None:
    """[T] estimates of the divergence from the reference model, 0 outside the loss; None when it is not asked for."""
    if not config.kl_coefficient:
        return None
    if reference is None:
        raise ValueError("kl_coefficient is positive, but the microbatch has no reference_logprobs")
    return KL_ESTIMATORS[config.kl_estimator](_within(mask, reference.to(logprobs.dtype)) - logprobs)


def _within(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where the mask is, 0 elsewhere, with no gradient there."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """Supervised loss: -sum of the targets' log-probabilities over loss tokens. logprobs: [T]."""
    return LossOutput(-(logprobs * batch.loss_mask.to(logprobs.dtype)).sum())
