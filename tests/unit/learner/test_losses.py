"""The loss formula in float64 against values computed by hand, and its gradient against finite differences."""

import dataclasses
import math
from typing import get_args, get_type_hints

import msgspec
import pytest
import torch
from torch import Tensor

from common.config import LossConfig
from learner.backend import Microbatch
from learner.corrections import CORRECTIONS, none, tis
from learner.losses import cross_entropy, policy_loss
from learner.objectives import OBJECTIVES, ppo_clip

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28, correction_cap=2.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def microbatch(mask: Tensor, advantages: Tensor, behavior: Tensor, staleness: Tensor | None = None) -> Microbatch:
    n = len(mask)
    zeros = torch.zeros(n, dtype=torch.int64)
    return Microbatch(zeros, zeros, torch.arange(n), (n,), mask, advantages, behavior, staleness)


def with_(**changes: object) -> LossConfig:
    return msgspec.structs.replace(CONFIG, **changes)


# ---------------------------------------------------------------- objective


def test_ppo_clip_takes_the_lower_branch_on_every_side() -> None:
    ratio = tensor(0.5, 0.5, 1.0, 1.1, 2.0, 2.0)
    advantages = tensor(1.0, -1.0, 3.0, 1.0, 1.0, -1.0)
    found = ppo_clip(ratio.log(), advantages, CONFIG)
    torch.testing.assert_close(found.values, tensor(0.5, -0.8, 3.0, 1.1, 1.28, -2.0))
    assert found.clipped.tolist() == [False, True, False, False, True, False]


def test_low_and_high_bounds_are_separate() -> None:
    config = with_(clip_low=0.1, clip_high=0.5)
    found = ppo_clip(tensor(0.5, 2.0).log(), tensor(-1.0, 1.0), config)
    torch.testing.assert_close(found.values, tensor(-0.9, 1.5))


def test_ppo_clip_gradient_agrees_with_finite_differences() -> None:
    log_ratio = tensor(-0.7, -0.1, 0.05, 0.2, 0.6).requires_grad_()
    advantages = tensor(-1.0, 0.7, -0.3, 1.0, 2.0)
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, advantages, CONFIG).values, (log_ratio,))


def test_a_clipped_token_has_no_gradient() -> None:
    log_ratio = tensor(1.0, -1.0).requires_grad_()
    ppo_clip(log_ratio, tensor(1.0, -1.0), CONFIG).values.sum().backward()
    torch.testing.assert_close(log_ratio.grad, tensor(0.0, 0.0))


# ---------------------------------------------------------------- correction


def test_truncation_caps_large_weights_and_keeps_small_ones() -> None:
    found = tis(tensor(0.1, 1.0, 2.0, 2.5, math.inf), CONFIG)
    torch.testing.assert_close(found.weights, tensor(0.1, 1.0, 2.0, 2.0, 2.0))
    assert found.changed.tolist() == [False, False, False, True, True]


def test_the_off_switch_weighs_every_token_one() -> None:
    found = none(tensor(0.1, 7.0), CONFIG)
    torch.testing.assert_close(found.weights, tensor(1.0, 1.0))
    assert not found.changed.any()


# ---------------------------------------------------------------- whole loss


def test_recompute_is_the_truncated_weight_times_the_advantage() -> None:
    logprobs, behavior = tensor(-1.0, -2.0, -0.5), tensor(-1.5, -1.0, -2.5)
    batch = microbatch(tensor(1.0, 1.0, 1.0), tensor(2.0, -1.0, 0.5), behavior)
    out = policy_loss(CONFIG)(logprobs, None, batch)
    weights = [math.exp(0.5), math.exp(-1.0), 2.0]  # the third, e^2, is truncated
    assert out.loss_sum.item() == pytest.approx(-(weights[0] * 2.0 - weights[1] + weights[2] * 0.5), rel=1e-14)


def test_recompute_gradient_is_the_weighted_policy_gradient() -> None:
    logprobs = tensor(-1.0, -2.0, -0.5).requires_grad_()
    behavior, advantages = tensor(-1.5, -1.0, -2.5), tensor(2.0, -1.0, 0.5)
    policy_loss(CONFIG)(logprobs, None, microbatch(torch.ones(3), advantages, behavior)).loss_sum.backward()
    expected = -tensor(math.exp(0.5), math.exp(-1.0), 2.0) * advantages
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-14, atol=0)


def test_behavior_as_proximal_is_the_plain_clipped_objective() -> None:
    logprobs, behavior = tensor(-1.0, -1.0, -1.0), tensor(-1.1, -1.7, -0.4)
    batch = microbatch(torch.ones(3), tensor(1.0, 1.0, -1.0), behavior)
    out = policy_loss(with_(proximal="behavior"))(logprobs, None, batch)
    expected = -(math.exp(0.1) + 1.28 - 0.8)
    assert out.loss_sum.item() == pytest.approx(expected, rel=1e-14)
    assert out.sums["objective_clipped"].item() == 2
    assert out.sums["correction_clipped"].item() == 0


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_gradient_agrees_with_finite_differences(proximal: str, correction: str) -> None:
    config = with_(proximal=proximal, correction=correction, entropy_coefficient=0.1)
    base = tensor(-1.0, -2.0, -0.5, -3.0)
    behavior = tensor(-1.05, -1.2, -2.5, -3.1)
    batch = microbatch(tensor(1.0, 1.0, 0.0, 1.0), tensor(2.0, -1.0, 0.5, 0.3), behavior)
    fixed = torch.exp(base - behavior)
    weights = CORRECTIONS[correction](fixed, config).weights if proximal == "recompute" else torch.ones(4).double()

    def reference(logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The formula with the proximal policy held fixed, as the stop-gradient says."""
        proximal_logprobs = base if proximal == "recompute" else behavior
        ratio = torch.exp(logprobs - proximal_logprobs)
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
        objective = torch.minimum(ratio * batch.advantages, clipped)
        return -(batch.loss_mask * (weights * objective + config.entropy_coefficient * entropy)).sum()

    logprobs, entropy = base.clone().requires_grad_(), tensor(1.0, 2.0, 3.0, 4.0).requires_grad_()
    assert torch.autograd.gradcheck(reference, (logprobs, entropy))
    expected = torch.autograd.grad(reference(logprobs, entropy), (logprobs, entropy))
    loss = policy_loss(config)(logprobs, entropy, batch).loss_sum
    torch.testing.assert_close(loss, reference(logprobs, entropy), rtol=1e-13, atol=1e-13)
    for found, wanted in zip(torch.autograd.grad(loss, (logprobs, entropy)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_masked_tokens_change_nothing_even_when_their_numbers_are_absurd() -> None:
    logprobs = tensor(-1.0, -math.inf, -1.0).requires_grad_()
    batch = microbatch(tensor(1.0, 0.0, 0.0), tensor(1.0, 5.0, 5.0), tensor(-1.0, 0.0, -math.inf))
    out = policy_loss(with_(entropy_coefficient=0.5))(logprobs, tensor(1.0, math.nan, 9.0), batch)
    out.loss_sum.backward()
    assert out.loss_sum.item() == pytest.approx(-1.0 - 0.5)
    torch.testing.assert_close(logprobs.grad, tensor(-1.0, 0.0, 0.0))
    assert all(math.isfinite(value.item()) for value in [*out.sums.values(), *out.maxima.values()])


def test_the_entropy_bonus_lowers_the_loss() -> None:
    batch = microbatch(torch.ones(2), tensor(0.0, 0.0), tensor(-1.0, -1.0))
    out = policy_loss(with_(entropy_coefficient=0.25))(tensor(-1.0, -1.0), tensor(2.0, 4.0), batch)
    assert out.loss_sum.item() == pytest.approx(-0.25 * 6)
    assert out.sums["entropy"].item() == 6


def test_sums_are_what_they_are_called() -> None:
    logprobs, behavior = tensor(-1.0, -2.0, -0.5, -9.0), tensor(-1.5, -1.0, -2.5, 0.0)
    staleness = torch.tensor([0, 0, 1, 0])
    batch = microbatch(tensor(1.0, 1.0, 1.0, 0.0), torch.zeros(4), behavior, staleness)
    out = policy_loss(CONFIG)(logprobs, None, batch)
    assert out.sums["ratio"].item() == pytest.approx(math.exp(0.5) + math.exp(-1) + math.exp(2))
    assert out.maxima["ratio"].item() == pytest.approx(math.exp(2))
    assert out.sums["correction_clipped"].item() == 1
    assert out.sums["mismatch"].item() == pytest.approx(0.5 + 1.0 + 2.0)
    assert out.sums["mismatch_fresh"].item() == pytest.approx(0.5 + 1.0)
    assert out.sums["fresh_tokens"].item() == 2


def test_one_gradient_step_raises_the_probability_of_rewarded_tokens() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)[:, 2]
    batch = microbatch(torch.ones(1), tensor(1.0), logprobs.detach())
    policy_loss(CONFIG)(logprobs, None, batch).loss_sum.backward()
    after = torch.log_softmax(logits - 0.1 * logits.grad, -1)[0, 2]
    assert after > logprobs[0]


def test_cross_entropy_sums_over_loss_tokens_only() -> None:
    batch = dataclasses.replace(microbatch(tensor(1.0, 0.0, 1.0), torch.zeros(3), torch.zeros(3)))
    assert cross_entropy(tensor(-1.0, -5.0, -2.0), None, batch).loss_sum.item() == pytest.approx(3.0)


def test_the_config_names_only_registered_functions() -> None:
    hints = get_type_hints(LossConfig)
    assert set(get_args(hints["objective"])) == set(OBJECTIVES)
    assert set(get_args(hints["correction"])) == set(CORRECTIONS)
