"""Where a token is exactly at the bound of an objective; numbers that a float has exactly."""

import math

import pytest
import torch
from torch import Tensor

from common.config.loss_keys import LossConfig
from learner.loss.objectives import OBJECTIVES
from learner.loss.types import Documents, PolicyTokens

HALF = -math.log(2.0)


def clipped(config: LossConfig, logprobs: float, proximal: float, advantage: float) -> tuple[bool, float]:
    """Whether the bound of the objective applies to one token, and its value."""
    one: list[Tensor] = [torch.tensor([value], dtype=torch.float64) for value in (logprobs, proximal, advantage)]
    tokens = PolicyTokens(*one, Documents((1,), torch.tensor([True])))
    found = OBJECTIVES[config.objective](tokens, config)
    return bool(found.clipped), float(found.values)


@pytest.mark.parametrize(("advantage", "logprobs", "proximal"), [(1.0, 0.0, HALF), (-1.0, HALF, 0.0), (0.0, HALF, 0.0)])
def test_a_probability_that_moved_by_just_the_bound_is_kept(advantage: float, logprobs: float, proximal: float) -> None:
    moved = math.exp(logprobs) - math.exp(proximal)
    at = LossConfig(objective="dppo_tv", clip_low=abs(moved), clip_high=abs(moved))
    assert clipped(at, logprobs, proximal, advantage) == (False, math.exp(logprobs - proximal) * advantage)
    less = LossConfig(objective="dppo_tv", clip_low=0.499, clip_high=0.499)
    assert clipped(less, logprobs, proximal, advantage) == (True, 0.0)
    assert clipped(less, proximal, logprobs, advantage)[0] is False, "it moved the other way"


@pytest.mark.parametrize("objective", ["ppo_clip", "cispo"])
def test_a_ratio_within_its_two_bounds_is_its_own_and_one_beyond_is_the_bound(objective: str) -> None:
    config = LossConfig(objective=objective, clip_low=0.25, clip_high=0.5)
    for ratio, applies, bound in ((0.7, True, 0.75), (0.8, False, 0.8), (1.4, False, 1.4), (1.6, True, 1.5)):
        advantage = 1.0 if ratio > 1 else -1.0
        found = clipped(config, math.log(ratio), 0.0, advantage)
        wanted = bound * advantage * (math.log(ratio) if objective == "cispo" else 1.0)
        assert (found[0], found[1]) == (applies, pytest.approx(wanted))
