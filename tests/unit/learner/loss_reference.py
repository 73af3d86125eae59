"""The loss written out by hand: loops over documents and tokens, float64, one formula after the other.

Nothing here comes from the implementation but its config. Terms without a gradient are computed from `fixed`,
plain numbers. So the result is an ordinary function of `logprobs`, which finite differences can check.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.config.loss_keys import LossConfig
from learner.backend_protocol import Microbatch

CLIP = {"ppo_clip": (0.2, 0.28), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4)}
CLIP |= {"dppo_tv": (0.2, 0.2), "dppo_kl": (0.05, 0.05), "clip_cov": (0.2, 0.2)}
TAU_LOW = 1.05  # default of sapo
CORRECTION = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 5.0),
    ("icepop", "token"): (0.5, 5.0),
    ("icepop", "sequence"): (0.2, 5.0),
    ("icepop", "geometric"): (0.999, 1.002),
    ("mis", "token"): (0.5, 2.0),
    ("mis", "sequence"): (0.2, 5.0),
    ("mis", "geometric"): (0.99, 1.01),
}


@dataclass(frozen=True)
class Case:
    """Some documents, one token after the other; [T] each, float64."""

    lengths: tuple[int, ...]
    mask: list[int]
    advantages: list[float]
    behavior: list[float]
    staleness: list[int]
    logprobs: list[float]
    reference: list[float]
    entropy: list[float]
    marked: list[int] = field(default_factory=list)  # [] for none
    begin: list[float] | None = None  # log-probabilities of the policy that began the batch, where it is another one

    def documents(self) -> list[list[int]]:
        """Positions of the loss tokens of each document."""
        out, start = [], 0
        for length in self.lengths:
            out.append([t for t in range(start, start + length) if self.mask[t]])
            start += length
        return out

    def microbatch(self) -> Microbatch:
        n = len(self.mask)
        ids = torch.zeros(n, dtype=torch.int64)
        return Microbatch(
            ids,
            ids,
            torch.arange(n),
            self.lengths,
            double(self.mask),
            double(self.advantages),
            double(self.behavior),
            torch.tensor(self.staleness, dtype=torch.int32),
            double(self.reference),
            marked=torch.tensor(self.marked or [0] * n) > 0,
            proximal_logprobs=None if self.begin is None else double(self.begin),
        )

    def parts(self) -> list["Case"]:
        """Every document as a case of its own."""
        out, start = [], 0
        for n in self.lengths:
            span = slice(start, start + n)
            names = ("mask", "advantages", "behavior", "staleness", "logprobs", "reference", "entropy", "marked")
            begin = None if self.begin is None else self.begin[span]
            out.append(Case((n,), *(getattr(self, name)[span] for name in names), begin=begin))
            start += n
        return out


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def proximal_of(config: LossConfig, case: Case, t: int) -> float:
    begin = (case.logprobs if case.begin is None else case.begin)[t]
    if config.proximal == "recompute":
        return begin
    if config.proximal == "behavior" or case.staleness[t] <= 1:
        return case.behavior[t]
    age = case.staleness[t]
    return (case.behavior[t] + (age - 1) * begin) / age


def weights_of(config: LossConfig, case: Case) -> tuple[dict[int, float], set[int]]:
    """(weight of every loss token, tokens that means are taken over)."""
    weights, counted = {}, set()
    for tokens in case.documents():
        own = {t: math.exp(proximal_of(config, case, t) - case.behavior[t]) for t in tokens}
        vetoed = config.correction_veto is not None and any(w < config.correction_veto for w in own.values())
        for t in tokens:
            product = math.prod(own.values())
            level = {"token": own[t], "sequence": product, "geometric": product ** (1 / len(tokens))}
            ratio = level[config.correction_level]
            weights[t], kept = 1.0, True
            if config.correction != "none":
                low, cap = CORRECTION[config.correction, config.correction_level]
                low = low if config.correction_low is None else config.correction_low
                cap = cap if config.correction_cap is None else config.correction_cap
                inside = low <= ratio <= cap
                if config.correction == "tis":
                    weights[t] = max(low, min(cap, ratio))
                elif config.correction == "icepop":
                    weights[t] = own[t] if inside else 0.0
                else:
                    weights[t], kept = (ratio, True) if inside else (0.0, False)
            if vetoed:
                weights[t] = 0.0
            if kept and not vetoed:
                counted.add(t)
    return weights, counted


def objective_of(config: LossConfig, case: Case, tokens: list[int], t: int, logprob: Tensor) -> Tensor:
    low, high = CLIP.get(config.objective, (0.0, 0.0))
    low = low if config.clip_low is None else config.clip_low
    high = high if config.clip_high is None else config.clip_high
    advantage, prox = case.advantages[t], proximal_of(config, case, t)
    fixed = math.exp(case.logprobs[t] - prox)
    if config.objective == "cispo":
        return min(max(fixed, 1 - low), 1 + high) * advantage * logprob
    if config.objective == "dppo_tv":
        difference = math.exp(case.logprobs[t]) - math.exp(prox)
        dropped = difference > high if advantage > 0 else difference < -low
        return logprob * 0 if dropped else torch.exp(logprob - prox) * advantage
    if config.objective == "dppo_kl":
        p, q = math.exp(case.logprobs[t]), math.exp(prox)
        others = math.log(max(1 - q, 1e-6)) - math.log(max(1 - p, 1e-6))
        far = q * math.log(q / p) + (1 - q) * others
        dropped = (p > q and far > high) if advantage > 0 else (p < q and far > low)
        return logprob * 0 if dropped else torch.exp(logprob - prox) * advantage
    if config.objective == "gmpo":
        moved = {u: case.logprobs[u] - proximal_of(config, case, u) for u in tokens}
        kept = {u: min(x, high) if case.advantages[u] > 0 else max(x, -low) for u, x in moved.items()}
        own = torch.exp(logprob - case.logprobs[t]) if kept[t] == moved[t] else logprob * 0 + 1
        return math.exp(sum(kept.values()) / len(tokens)) * own * advantage
    marked = bool(case.marked and case.marked[t])
    if marked and config.objective in ("clip_cov", "m2po"):
        return logprob * 0
    ratio = torch.exp(logprob - prox)
    if config.objective == "gspo":
        mean = sum(case.logprobs[u] - proximal_of(config, case, u) for u in tokens) / len(tokens)
        ratio = math.exp(mean) * torch.exp(logprob - case.logprobs[t])
    if config.objective == "sapo":
        tau = config.objective_options.get("tau_high", 1.0) if advantage > 0 else TAU_LOW
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if config.objective in ("kl_cov", "m2po"):
        pull = config.objective_options.get("coefficient", 1.0) * torch.abs(logprob - prox)
        return ratio * advantage - (pull if marked else 0.0)
    bounded = min(max(ratio.item(), 1 - low), 1 + high) * advantage
    value = ratio * advantage if ratio.item() * advantage <= bounded else logprob * 0 + bounded
    if config.clip_dual is not None and advantage < 0 and value.item() < config.clip_dual * advantage:
        return logprob * 0 + config.clip_dual * advantage
    return value


def divergence_of(config: LossConfig, reference: float, logprob: Tensor) -> Tensor:
    log_ratio = reference - logprob
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(log_ratio) - 1 - log_ratio}[config.kl_estimator]


def reference_loss(config: LossConfig, max_tokens: int, case: Case, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """The loss of all documents of `case`, divided; logprobs, entropy: [T] float64, differentiable."""
    weights, counted = weights_of(config, case)
    total, divisor = logprobs.sum() * 0, 0.0
    for tokens in case.documents():
        here = [t for t in tokens if t in counted]
        for t in tokens:
            worth = weights[t] if config.correction_normalize else float(t in counted)
            term = weights[t] * objective_of(config, case, tokens, t, logprobs[t])
            if config.kl_coefficient:
                term = term - config.kl_coefficient * worth * divergence_of(config, case.reference[t], logprobs[t])
            term = term + config.entropy_coefficient * worth * entropy[t]
            term = term - config.log_ratio_penalty * worth * (logprobs[t] - case.behavior[t]) ** 2
            share = 1 / len(here) if config.reduction == "sequence_mean" and here else 1.0
            total = total - share * term
            if config.reduction == "token_mean":
                divisor += worth
        if config.reduction != "token_mean" and tokens:
            mean = sum(weights[t] for t in here) / len(here) if here else 0.0
            whole = 1.0 if here or config.reduction == "fixed_length" else 0.0
            size = max_tokens if config.reduction == "fixed_length" else 1
            divisor += size * (mean if config.correction_normalize else whole)
    return total / divisor if divisor else total
