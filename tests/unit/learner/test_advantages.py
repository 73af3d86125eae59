"""Advantages against values computed by hand, sample by sample."""

import itertools
import math

import numpy as np
import pytest

from learner.loss.advantages import ADVANTAGES, STD_EPS, dr_grpo, grpo, reinforce_pp, rloo


def group(rewards: list[float], valid: list[bool] | None = None) -> np.ndarray:
    return np.where([True] * len(rewards) if valid is None else valid, rewards, np.nan)


REWARDS = [1.0, 0.0, 0.0, 3.0]
BY_HAND = {
    dr_grpo: [0.0, -1.0, -1.0, 2.0],
    grpo: np.array([0.0, -1.0, -1.0, 2.0]) / (math.sqrt((0 + 1 + 1 + 4) / 3) + STD_EPS),
    rloo: [r - sum(REWARDS[:i] + REWARDS[i + 1 :]) / 3 for i, r in enumerate(REWARDS)],
}


@pytest.mark.parametrize("estimator", BY_HAND)
def test_advantages_compare_with_the_group_alone(estimator) -> None:
    one, two = group(REWARDS), group([7.0, 9.0])
    together = estimator([one, two])
    np.testing.assert_allclose(together[0], BY_HAND[estimator], rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(together[0], estimator([one])[0])
    np.testing.assert_array_equal(together[1], estimator([two])[0])


def test_reinforce_pp_normalises_over_the_rewards_of_all_groups() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0, 2.0]
    mean = sum(rewards) / 5
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    expected = [(r - mean) / (deviation + STD_EPS) for r in rewards]
    for ends in ([0, 3, 5], range(6)):  # it needs no second sample of a prompt
        found = reinforce_pp([group(rewards[start:end]) for start, end in itertools.pairwise(ends)])
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-14)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_failed_sample_enters_no_mean_and_no_deviation_and_gets_zero(name: str) -> None:
    estimator, valid = ADVANTAGES[name], [True, False, True, True]
    found = estimator([group([1.0, 100.0, 0.0, 2.0], valid)])[0]
    assert found[1] == 0.0
    np.testing.assert_array_equal(found[valid], estimator([group([1.0, 0.0, 2.0])])[0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_where_nothing_can_be_compared_or_all_is_equal_there_is_no_advantage(name: str) -> None:
    assert ADVANTAGES[name]([]) == []
    only_one, none = [True, False, False], [False, False, False]
    for found in (group([1.0] * 8), group([1.0, 0.0, 0.0], only_one), group([1.0, 0.0, 0.0], none)):
        np.testing.assert_array_equal(ADVANTAGES[name]([found])[0], np.zeros(len(found)))
