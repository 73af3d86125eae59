"""The losses: pure functions of log-probabilities, in whatever precision they come (tests use float64).

    r    = exp(logprobs - proximal_logprobs)
    w    = stop_gradient(exp(proximal_logprobs - behavior_logprobs))
    loss = -mean over loss tokens of
           correction(w) * objective(r, A) + entropy_coefficient * entropy - kl_coefficient * kl
           - log_ratio_penalty * (logprobs - behavior_logprobs)^2 - distillation

This is decoupled PPO (Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3).
AReaL (arXiv 2505.24298, section 5.2) uses it for asynchronous RL on language models. The trust region is around the
proximal policy; the importance weight leads from the behavior policy to it. The parts are registries.
Corrections and objectives have files of their own. Proximal policies, estimators and reductions are below.
docs/algorithms.md says when to use which, docs/losses.md how to bring one along, and CONTRIBUTING.md how to add one.
The squared log-ratio is the penalty of prime-rl's default loss, which takes 1e-3.

The divergence, the penalty and the entropy are means over the same tokens as the objective. Under
`correction_normalize` everything becomes a weighted mean: sum of w * (objective + ...) over sum of w.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.config.loss import MARK_OPTIONS, MARKING
from common.config.loss_keys import LossConfig
from learner.backend_protocol import LossFunction, LossOutput, Microbatch
from learner.loss.corrections import CORRECTIONS, veto
from learner.loss.distillation import Teaching
from learner.loss.objectives import OBJECTIVES
from learner.loss.plugins import part
from learner.loss.ratios import Documents, bounded_exp, within
from learner.loss.token_diagnostics import token_counts, token_sums
from learner.loss.types import Correction, Count, KlEstimator, Objective, PolicyTokens, Reduction

# ---------------------------------------------------------------- divergence from the reference
# Estimators of KL(policy || reference) from the tokens that were sampled, with r = p_reference / p. Schulman,
# Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html.

LARGEST = 10.0  # bounds k3, as in verl: a larger r would dominate every other token


def k1(log_ratio: Tensor) -> Tensor:
    """-log r: unbiased, of either sign. Its gradient is zero in expectation, so it measures but does not restrain."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, low variance; on samples of the policy its gradient is that of the divergence."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """(r - 1) - log r, at most 10: unbiased but for the bound, never negative. GRPO (arXiv 2402.03300), equation 4."""
    return (bounded_exp(log_ratio) - 1 - log_ratio).clamp(max=LARGEST)


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}


# ---------------------------------------------------------------- proximal policy
# The policy that the trust region surrounds and that importance weights lead to. Version s begins step s, and a token
# of staleness d was sampled by version s - d. With one update per batch the forward pass that trains version s also
# evaluates it. With several, a pass before the first update has frozen its log-probabilities. So all updates of the
# batch have the same proximal policy and the same w.
#
# - `recompute`: version s. r is the change within the batch, and 1 in the first update. w carries the way to version s.
# - `behavior`: version s - d as the sampler computed it. w is 1 and r = pi / behavior carries the whole way.
# - `loglinear`: version s - 1, estimated. r is the change of the last version and of the batch, w the way up to it.

# (version s's logprobs [T] without gradient, behavior_logprobs [T], staleness [T] or None) -> [T]
Proximal = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def recompute(begin: Tensor, behavior: Tensor, staleness: Tensor | None) -> Tensor:
    """Decoupled PPO (arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, section 5.2)."""
    return begin


def behavior(begin: Tensor, behavior: Tensor, staleness: Tensor | None) -> Tensor:
    """The policy that sampled the token: the plain objective, as PPO has it."""
    return behavior


def loglinear(begin: Tensor, behavior: Tensor, staleness: Tensor | None) -> Tensor:
    """AReaL's interpolation: log p_prox = log p_behavior + a (log p_s - log p_behavior).

    With k updates per version, version s - 1 is k (d - 1) of the k d updates after the sampler's version. For any k
    a = (d - 1) / d, and 0 for tokens of this very version. docs/corrections.md derives it. It also says why `begin` is
    the other end, and not the policy in training. (AReaL, docs/algorithms/prox_approx.md, areal/trainer/ppo/actor.py.)
    It assumes that every version moved log p equally far.
    """
    if staleness is None:
        raise ValueError("proximal: loglinear needs the staleness of every token")
    age = staleness.clamp(min=1).to(begin.dtype)
    return behavior + (age - 1) / age * (begin - behavior)


PROXIMALS: dict[str, Proximal] = {"recompute": recompute, "behavior": behavior, "loglinear": loglinear}


# ---------------------------------------------------------------- reductions


def token_mean(count: Count) -> tuple[Tensor | None, Tensor]:
    """Every token of the global batch weighs the same: DAPO (arXiv 2503.14476), section 3.3."""
    return None, count.worth.sum()


def sequence_mean(count: Count) -> tuple[Tensor | None, Tensor]:
    """Every document with a counted token weighs the same: GRPO (arXiv 2402.03300), equation 3."""
    share = _share_of_document(count)
    return share, (share * count.worth).sum()


def fixed_length(count: Count) -> tuple[Tensor | None, Tensor]:
    """The sum over tokens, divided by documents x rollout.max_tokens: a token's weight depends on no length.

    Dr. GRPO (arXiv 2503.20783), section 3.2 and its listing. Documents without any loss token are left out. Under
    `correction_normalize` a document counts with the mean weight of its tokens.
    """
    if count.normalized:
        return None, count.max_tokens * (_share_of_document(count) * count.worth).sum()
    return None, count.max_tokens * (count.documents.counts > 0).sum().to(count.worth.dtype)


def _share_of_document(count: Count) -> Tensor:
    """[T] 1 / counted tokens of the token's document, 0 for tokens that do not count."""
    tokens = count.documents.sums(count.counted)
    return count.counted / count.documents.spread(tokens).clamp(min=1)


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "fixed_length": fixed_length,
}


# ---------------------------------------------------------------- losses


def policy_loss(config: LossConfig, max_tokens: int) -> LossFunction:
    """The reinforcement-learning loss; `max_tokens` is rollout.max_tokens, for the reduction `fixed_length`.

    Its sums are those of token_diagnostics.py, and `entropy`, `kl` and `batch_kl` where they are computed, all over
    loss tokens. `batch_kl` is k3 of the policy that began the batch and the one in training, where these are two.
    Its gradient reaches `entropy` only if `entropy_coefficient` is positive.
    """
    return partial(_policy_loss, Parts.of(config), config, max_tokens)


@dataclass(frozen=True)
class Parts:
    """The functions that a config names, with their options."""

    objective: Objective
    correction: Correction
    kl_estimator: KlEstimator
    reduction: Reduction

    @classmethod
    def of(cls, config: LossConfig) -> "Parts":
        """Raises ConfigError for an import path that leads nowhere."""
        marks = MARK_OPTIONS if config.objective in MARKING else ()  # options of the choice in whole_batch.py
        options = {name: value for name, value in config.objective_options.items() if name not in marks}
        return cls(
            part("objective", config.objective, OBJECTIVES, options),
            part("correction", config.correction, CORRECTIONS),
            part("kl_estimator", config.kl_estimator, KL_ESTIMATORS),
            part("reduction", config.reduction, REDUCTIONS),
        )


def _policy_loss(
    parts: Parts, config: LossConfig, max_tokens: int, logprobs: Tensor, entropy: Tensor | None, batch: Microbatch
) -> LossOutput:
    mask = batch.loss_mask > 0
    documents = Documents(batch.document_lengths, mask)
    behavior = within(mask, batch.behavior_logprobs.to(logprobs.dtype))
    logprobs = within(mask, logprobs)
    current = logprobs.detach()
    vetoed = None
    drift = current - behavior
    frozen = None if batch.proximal_logprobs is None else within(mask, batch.proximal_logprobs.to(logprobs.dtype))
    begin = current if frozen is None else frozen
    begun = None if frozen is None else frozen - behavior
    proximal = PROXIMALS[config.proximal](begin, behavior, batch.staleness)
    corrected = parts.correction(proximal - behavior, documents, config)
    if config.correction_veto is not None:
        corrected, vetoed = veto(corrected, proximal - behavior, documents, config.correction_veto)
    advantages = batch.advantages.to(logprobs.dtype)
    teaching = None if config.distillation is None else Teaching(config.distillation, batch, current, mask)
    if teaching is not None:
        advantages = teaching.advantages(advantages)
    if config.objective in MARKING and batch.marked is None:
        raise ValueError(f"objective: {config.objective}, but the microbatch has no marks of the whole batch")
    tokens = PolicyTokens(logprobs, proximal, advantages, documents, batch.marked)
    surrogate = parts.objective(tokens, config)
    sums = token_sums(mask, drift, corrected, vetoed, surrogate.clipped, begun)
    sums |= token_counts(mask, drift, batch.staleness, begun)
    if frozen is not None:
        sums["batch_kl"] = k3(current - frozen).sum()
    weights = within(mask, corrected.weights)
    counted = (corrected.counted & mask).to(weights.dtype)
    worth = weights if config.correction_normalize else counted
    values = weights * surrogate.values
    if teaching is not None:
        values = values - teaching.cost(logprobs - proximal, weights=weights, worth=worth)
        sums |= teaching.sums
    coefficient = config.kl_coefficient if batch.kl_coefficients is None else batch.kl_coefficients.to(logprobs.dtype)
    if config.kl_coefficient and batch.reference_logprobs is None:
        raise ValueError("kl_coefficient is positive, but the microbatch has no reference_logprobs")
    if batch.reference_logprobs is not None:
        reference = within(mask, batch.reference_logprobs.to(logprobs.dtype))
        kl = parts.kl_estimator(reference - logprobs)
        values = values - coefficient * worth * kl
        sums["kl"] = kl.detach().sum()
    if config.log_ratio_penalty:
        values = values - config.log_ratio_penalty * worth * (logprobs - behavior).square()
    if entropy is not None:
        entropy = within(mask, entropy)
        sums["entropy"] = entropy.detach().sum()
        if config.entropy_coefficient:
            values = values + config.entropy_coefficient * worth * entropy
    count = Count(documents, counted, worth, max_tokens, config.correction_normalize)
    share, denominator = parts.reduction(count)
    if share is not None:
        values = share * values
    ages = torch.zeros_like(drift) if batch.staleness is None else batch.staleness.to(drift.dtype)
    maxima = {"ratio": within(mask, bounded_exp(drift)).max(), "age": within(mask, ages).max()}
    return LossOutput(-within(mask, values).sum(), sums, maxima, denominator)


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """Supervised loss: -sum of the targets' log-probabilities over loss tokens. logprobs: [T]."""
    return LossOutput(-(logprobs * batch.loss_mask.to(logprobs.dtype)).sum())
