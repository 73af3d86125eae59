"""The teacher's part of the loss, in float64, against divergences of whole distributions and their autograd."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config.loss_keys import DistillationConfig, LossConfig
from learner.backend_protocol import LossOutput, Microbatch
from learner.loss.losses import policy_loss
from tests.unit.learner.test_losses import CASE, MAX_TOKENS

VOCABULARY = 9
PLACES = 4


def config(objective: Any, coefficient: float = 1.0, **keys: Any) -> LossConfig:
    top_k = keys.pop("top_k", None)
    told = DistillationConfig(teacher="t", objective=objective, coefficient=coefficient, top_k=top_k)
    return LossConfig(**{"correction": "none", **keys}, distillation=told)


def distributions() -> tuple[Tensor, Tensor]:
    """([PLACES, VOCABULARY] logits of the policy, log-probabilities of the teacher)."""
    random = torch.Generator().manual_seed(7)
    policy, teacher = torch.randn(2, PLACES, VOCABULARY, generator=random, dtype=torch.float64) * 2
    return policy.requires_grad_(), teacher.log_softmax(1)


def microbatch(targets: Tensor, behavior: Tensor, **fields: Any) -> Microbatch:
    n = len(targets)
    zeros = torch.zeros(n, dtype=torch.float64)
    return Microbatch(
        targets, targets, torch.arange(n), (n,), torch.ones(n), zeros, behavior.detach(), zeros.int(), **fields
    )


def every_token(
    logits: Tensor, teacher: Tensor, told: LossConfig, behavior: Tensor, begin: Tensor | None = None
) -> Tensor:
    """The loss of all tokens in all places, each as often as `behavior`, a log-distribution, samples it.

    `begin`: log-distribution of the policy that began the batch, in a later update.
    """
    total = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        targets = torch.full((PLACES,), token)
        frozen = None if begin is None else begin[:, token]
        batch = microbatch(targets, behavior[:, token], teacher_logprobs=teacher[:, token], proximal_logprobs=frozen)
        shares = behavior[:, token].exp()
        for place in range(PLACES):
            one = replace(batch, loss_mask=torch.eye(PLACES)[place])
            out = policy_loss(told, MAX_TOKENS)(logits.log_softmax(1)[:, token], None, one)
            total = total + shares[place].detach() * out.loss_sum
    return total


@pytest.mark.parametrize("objective", ["reverse_kl", "advantage"])
@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_the_mean_gradient_over_sampled_tokens_is_that_of_the_divergence_from_the_teacher(
    objective: str, proximal: str, stale: bool, later: bool
) -> None:
    """This is the policy in training, also when an older one sampled the tokens."""
    logits, teacher = distributions()
    log_p = logits.log_softmax(1)
    wanted = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), logits)[0]
    older = (logits.detach() + (0.3 * torch.sin(logits.detach() * 5) if stale else 0)).log_softmax(1)
    # bounds that never act, because their part in the objective is not what is tested
    told = config(objective, proximal=proximal, clip_low=0.999, clip_high=100.0)
    if proximal == "recompute":
        told = config(objective, correction="tis", correction_cap=100.0, clip_low=0.999, clip_high=100.0)
    begin = (logits.detach() + 0.2 * torch.cos(logits.detach() * 3)).log_softmax(1) if later else None
    found = torch.autograd.grad(every_token(logits, teacher, told, older, begin), logits)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def forward(logits: Tensor, teacher: Tensor, top_k: int, **keys: Any) -> LossOutput:
    told = config("forward_kl", top_k=top_k, **keys)
    top, ids = teacher.topk(top_k, 1)
    log_p = logits.log_softmax(1)
    fields = {"teacher_top_ids": ids, "teacher_top_logprobs": top, "top_logprobs": log_p.gather(1, ids)}
    batch = microbatch(ids[:, 0], log_p[:, 0], teacher_logprobs=top[:, 0], **fields)
    return policy_loss(told, MAX_TOKENS)(log_p[:, 0], None, batch)


def test_with_all_tokens_the_forward_divergence_is_the_whole_one() -> None:
    logits, teacher = distributions()
    out = forward(logits, teacher, VOCABULARY)
    wanted = (teacher.exp() * (teacher - logits.log_softmax(1))).sum()
    torch.testing.assert_close(out.loss_sum, wanted)
    assert out.sums["teacher_tail"] == 0
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (out.loss_sum, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("top_k", [1, 3, VOCABULARY - 1])
def test_the_tokens_beyond_the_top_k_are_one_class_of_the_forward_divergence(top_k: int) -> None:
    logits, teacher = distributions()
    out = forward(logits, teacher, top_k, coefficient=0.7)
    wanted = torch.zeros((), dtype=torch.float64)
    tails = 0.0
    for q, log_p in zip(teacher.exp(), logits.log_softmax(1), strict=True):
        order = q.argsort(descending=True)
        first, rest = order[:top_k], order[top_k:]
        wanted = wanted + sum(q[v] * (q[v].log() - log_p[v]) for v in first)
        wanted = wanted + q[rest].sum() * (q[rest].sum().log() - log_p.exp()[rest].sum().log())
        tails += q[rest].sum().item()
    torch.testing.assert_close(out.loss_sum, 0.7 * wanted)
    assert out.sums["teacher_tail"].item() == pytest.approx(tails)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (out.loss_sum, 0.7 * wanted)]
    torch.testing.assert_close(*gradients)


def test_a_policy_that_has_left_the_teachers_tokens_has_a_finite_loss_and_gradient() -> None:
    """Their probabilities, and those of all others, may vanish in float32."""
    teacher = torch.tensor([[0.0, -40.0, -40.0], [-0.7, -0.7, -40.0]])
    logits = torch.tensor([[-90.0, 0.0, 0.0], [90.0, 90.0, 0.0]], requires_grad=True)
    log_p = logits.log_softmax(1)
    top, ids = teacher.topk(2, 1)
    fields = {"teacher_top_ids": ids, "teacher_top_logprobs": top, "top_logprobs": log_p.gather(1, ids)}
    batch = microbatch(ids[:, 0], log_p[:, 0], teacher_logprobs=top[:, 0], **fields)
    out = policy_loss(config("forward_kl", top_k=2), MAX_TOKENS)(log_p[:, 0], None, batch)
    out.loss_sum.backward()
    assert torch.isfinite(out.loss_sum)
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_a_teachers_advantage_is_added_to_that_of_the_rewards_before_the_objective_bounds_it() -> None:
    batch = CASE.microbatch()
    random = torch.Generator().manual_seed(1)
    logprobs = torch.tensor(CASE.logprobs, dtype=torch.float64)
    teacher = logprobs + torch.randn(len(logprobs), generator=random, dtype=torch.float64)
    told = config("advantage", 0.4, proximal="behavior")
    found = policy_loss(told, MAX_TOKENS)(logprobs, None, replace(batch, teacher_logprobs=teacher))
    shifted = replace(batch, advantages=batch.advantages - 0.4 * (logprobs - teacher) * batch.loss_mask)
    plain = policy_loss(LossConfig(correction="none", proximal="behavior"), MAX_TOKENS)(logprobs, None, shifted)
    assert plain.sums["objective_clipped"] > 0
    torch.testing.assert_close(found.loss_sum, plain.loss_sum)
    torch.testing.assert_close(found.sums["objective_clipped"], plain.sums["objective_clipped"])
    gap = ((logprobs - teacher) * batch.loss_mask).sum()
    torch.testing.assert_close(found.sums["teacher_kl"], gap)


@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "advantage"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
def test_the_teachers_term_joins_that_of_the_rewards(objective: str, reduction: str) -> None:
    """Where nothing is bounded, the loss of both is the sum of the loss of each."""
    batch = CASE.microbatch()
    logprobs = torch.tensor(CASE.logprobs, dtype=torch.float64, requires_grad=True)
    random = torch.Generator().manual_seed(2)
    top = torch.randn(len(logprobs), 3, generator=random, dtype=torch.float64).log_softmax(1) - 0.2
    fields = {"teacher_top_ids": torch.zeros(len(top), 3).long(), "teacher_top_logprobs": top}
    fields |= {"teacher_logprobs": top[:, 0], "top_logprobs": logprobs[:, None] - torch.arange(1.0, 4.0)}

    def loss(told: LossConfig, **changes: Any) -> Tensor:
        out = policy_loss(told, MAX_TOKENS)(logprobs, None, replace(batch, **changes))
        assert out.denominator is not None
        return out.loss_sum / out.denominator

    keys: dict[str, Any] = {"reduction": reduction, "correction": "tis", "correction_cap": 50.0}
    top_k = 3 if objective == "forward_kl" else None
    taught = config(objective, 0.3, top_k=top_k, **keys)
    both = loss(taught, **fields)
    alone = loss(taught, **fields, advantages=torch.zeros_like(batch.advantages))
    torch.testing.assert_close(both, alone + loss(LossConfig(**keys)))
    gradient = Callable[[Tensor], Tensor]
    of: gradient = lambda value: torch.autograd.grad(value, logprobs, retain_graph=True)[0]  # noqa: E731
    torch.testing.assert_close(of(both), of(alone) + of(loss(LossConfig(**keys))))
    assert of(alone).abs().sum() > 0


def test_a_filler_without_a_teacher_has_the_same_sums() -> None:
    blank = replace(CASE.microbatch(), loss_mask=torch.zeros(len(CASE.mask)))
    logprobs = torch.tensor(CASE.logprobs, dtype=torch.float64)
    for objective in ("reverse_kl", "forward_kl", "advantage"):
        out = policy_loss(config(objective), MAX_TOKENS)(logprobs, None, blank)
        assert out.sums["teacher_kl"] == out.sums["teacher_tail"] == out.loss_sum == 0
