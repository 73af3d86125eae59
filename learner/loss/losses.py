"""The losses: pure functions of log-probabilities, in whatever precision they come (tests use float64).

    r    = exp(logprobs - proximal_logprobs)
    w    = stop_gradient(exp(proximal_logprobs - behavior_logprobs))
    loss = -mean over loss tokens of
           correction(w) * objective(r, A) + entropy_coefficient * entropy - kl_coefficient * kl

This is decoupled PPO (Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3).
AReaL (arXiv 2505.24298, section 5.2) uses it for asynchronous RL on language models. The trust region is around the
proximal policy; the importance weight leads from the behavior policy to it. The parts are registries, one file each:
proximal, corrections, objectives, kl_estimators, reductions. docs/algorithms.md says when to use which, and
CONTRIBUTING.md how to add one.

The divergence and the entropy are means over the same tokens as the objective. Under `correction_normalize`
everything becomes a weighted mean: sum of w * (objective + ...) over sum of w.
"""

from functools import partial

from torch import Tensor

from common.config.schema import LossConfig
from learner.backend_protocol import LossFunction, LossOutput, Microbatch
from learner.loss.corrections import CORRECTIONS, veto
from learner.loss.kl_estimators import KL_ESTIMATORS
from learner.loss.objectives import OBJECTIVES, PolicyTokens
from learner.loss.proximal import PROXIMALS
from learner.loss.ratios import Documents, bounded_exp, within
from learner.loss.reductions import REDUCTIONS, Count
from learner.loss.token_diagnostics import token_counts, token_sums


def policy_loss(config: LossConfig, max_tokens: int) -> LossFunction:
    """The reinforcement-learning loss; `max_tokens` is rollout.max_tokens, for the reduction `fixed_length`.

    Its sums are those of token_diagnostics.py, and `entropy` and `kl` where they are computed, all over loss tokens.
    Its gradient reaches `entropy` only if `entropy_coefficient` is positive.
    """
    return partial(_policy_loss, config, max_tokens)


def _policy_loss(
    config: LossConfig, max_tokens: int, logprobs: Tensor, entropy: Tensor | None, batch: Microbatch
) -> LossOutput:
    mask = batch.loss_mask > 0
    documents = Documents(batch.document_lengths, mask)
    behavior = within(mask, batch.behavior_logprobs.to(logprobs.dtype))
    logprobs = within(mask, logprobs)
    current = logprobs.detach()
    vetoed = None
    drift = current - behavior
    proximal = PROXIMALS[config.proximal](current, behavior, batch.staleness)
    corrected = CORRECTIONS[config.correction](proximal - behavior, documents, config)
    if config.correction_veto is not None:
        corrected, vetoed = veto(corrected, proximal - behavior, documents, config.correction_veto)
    tokens = PolicyTokens(logprobs, proximal, batch.advantages.to(logprobs.dtype), documents)
    surrogate = OBJECTIVES[config.objective](tokens, config)
    sums = token_sums(mask, drift, corrected, vetoed, surrogate.clipped) | token_counts(mask, drift, batch.staleness)
    weights = within(mask, corrected.weights)
    counted = (corrected.counted & mask).to(weights.dtype)
    worth = weights if config.correction_normalize else counted
    values = weights * surrogate.values
    if config.kl_coefficient:
        if batch.reference_logprobs is None:
            raise ValueError("kl_coefficient is positive, but the microbatch has no reference_logprobs")
        reference = within(mask, batch.reference_logprobs.to(logprobs.dtype))
        kl = KL_ESTIMATORS[config.kl_estimator](reference - logprobs)
        values = values - config.kl_coefficient * worth * kl
        sums["kl"] = kl.detach().sum()
    if entropy is not None:
        entropy = within(mask, entropy)
        sums["entropy"] = entropy.detach().sum()
        if config.entropy_coefficient:
            values = values + config.entropy_coefficient * worth * entropy
    count = Count(documents, counted, worth, max_tokens, config.correction_normalize)
    share, denominator = REDUCTIONS[config.reduction](count)
    if share is not None:
        values = share * values
    maxima = {"ratio": within(mask, bounded_exp(drift)).max()}
    return LossOutput(-within(mask, values).sum(), sums, maxima, denominator)


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """Supervised loss: -sum of the targets' log-probabilities over loss tokens. logprobs: [T]."""
    return LossOutput(-(logprobs * batch.loss_mask.to(logprobs.dtype)).sum())
