"""Objectives against values computed by hand."""

import math
from typing import get_args, get_type_hints

import msgspec
import pytest
import torch
from torch import Tensor

from common.config.loss_defaults import CLIP_BOUNDS
from common.config.schema import LossConfig
from learner.loss.objectives import OBJECTIVES, PolicyTokens, Surrogate, cispo, dppo_tv, gspo, ppo_clip
from learner.loss.ratios import Documents


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(logprobs: Tensor, proximal: Tensor, advantages: Tensor, lengths: tuple[int, ...] = ()) -> PolicyTokens:
    mask = torch.ones(len(logprobs), dtype=torch.bool)
    return PolicyTokens(logprobs, proximal, advantages, Documents(lengths or (len(logprobs),), mask))


def clip(ratio: Tensor, advantages: Tensor, **changes: object) -> Surrogate:
    config = msgspec.structs.replace(LossConfig(), **changes)
    return ppo_clip(tokens(ratio.log(), torch.zeros_like(ratio), advantages), config)


def test_ppo_clip_takes_the_lower_branch_on_every_side() -> None:
    found = clip(tensor(0.5, 0.5, 1.0, 1.1, 2.0, 2.0), tensor(1.0, -1.0, 3.0, 1.0, 1.0, -1.0))
    torch.testing.assert_close(found.values, tensor(0.5, -0.8, 3.0, 1.1, 1.28, -2.0))
    assert found.clipped.tolist() == [False, True, False, False, True, False]


def test_low_and_high_bounds_are_separate() -> None:
    found = clip(tensor(0.5, 2.0), tensor(-1.0, 1.0), clip_low=0.1, clip_high=0.5)
    torch.testing.assert_close(found.values, tensor(-0.9, 1.5))


def test_the_dual_clip_bounds_the_loss_where_the_advantage_is_negative() -> None:
    found = clip(tensor(2.0, 5.0, 5.0), tensor(-2.0, -2.0, 2.0), clip_dual=3.0)
    torch.testing.assert_close(found.values, tensor(-4.0, -6.0, 2.56))
    assert found.clipped.tolist() == [False, True, True]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = tensor(1.0, -1.0, 2.0).requires_grad_()
    config = LossConfig(clip_dual=3.0)
    ppo_clip(tokens(logprobs, torch.zeros(3).double(), tensor(1.0, -1.0, -1.0)), config).values.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(0.0, 0.0, 0.0))


def test_cispo_keeps_the_gradient_of_a_token_whose_weight_it_clips() -> None:
    logprobs = tensor(-0.1, -2.0, -3.0).requires_grad_()
    proximal, advantages = tensor(-3.1, -2.5, -1.0), tensor(2.0, -1.0, 1.0)
    found = cispo(tokens(logprobs, proximal, advantages), LossConfig(objective="cispo"))
    weights = [5.0, math.exp(0.5), math.exp(-2.0)]  # e^3 is clipped at 1 + 4, nothing below
    torch.testing.assert_close(found.values.detach(), tensor(*weights) * advantages * logprobs.detach())
    found.values.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(*weights) * advantages)
    assert found.clipped.tolist() == [True, False, False]


def test_gspo_gives_all_tokens_of_a_document_the_geometric_mean_of_their_ratios() -> None:
    logprobs, proximal = tensor(-1.0, -2.0, -3.0), tensor(-1.2, -2.1, -2.0)
    config = LossConfig(objective="gspo", clip_low=0.5, clip_high=0.5)
    found = gspo(tokens(logprobs, proximal, tensor(1.0, 1.0, 1.0), (2, 1)), config)
    torch.testing.assert_close(found.values, tensor(math.exp(0.15), math.exp(0.15), math.exp(-1.0)))


def test_gspo_clips_whole_documents() -> None:
    logprobs, proximal = tensor(-1.0, -2.0, -3.0), tensor(-1.001, -2.0, -3.0)
    found = gspo(tokens(logprobs, proximal, tensor(1.0, 1.0, 1.0), (2, 1)), LossConfig(objective="gspo"))
    assert found.clipped.tolist() == [True, True, False]
    torch.testing.assert_close(found.values, tensor(1.0004, 1.0004, 1.0))


def test_dppo_tv_drops_tokens_whose_probability_went_too_far_already() -> None:
    before = tensor(0.5, 0.5, 0.5, 0.5, 0.001)
    now = tensor(0.75, 0.75, 0.25, 0.25, 0.1)
    logprobs = now.log().requires_grad_()
    found = dppo_tv(tokens(logprobs, before.log(), tensor(1.0, -1.0, 1.0, -1.0, 1.0)), LossConfig(objective="dppo_tv"))
    assert found.clipped.tolist() == [True, False, False, True, False]  # the last: ratio 100, but only 0.099 apart
    torch.testing.assert_close(found.values, tensor(0.0, -1.5, 0.5, 0.0, 100.0))
    found.values.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(0.0, -1.5, 0.5, 0.0, 100.0))


@pytest.mark.parametrize("objective", [ppo_clip, dppo_tv])
def test_gradient_agrees_with_finite_differences(objective) -> None:
    logprobs = tensor(-0.7, -0.1, -0.05, -0.9, -1.6).requires_grad_()
    proximal, advantages = tensor(-0.2, -0.4, -0.06, -0.7, -2.2), tensor(-1.0, 0.7, -0.3, 1.0, 2.0)
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    assert torch.autograd.gradcheck(lambda x: objective(tokens(x, proximal, advantages), config).values, (logprobs,))


def test_every_objective_is_in_the_config_and_has_bounds() -> None:
    assert set(get_args(get_type_hints(LossConfig)["objective"])) == set(OBJECTIVES) == set(CLIP_BOUNDS)
