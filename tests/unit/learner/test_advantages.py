"""Advantages against values computed by hand, sample by sample."""

import itertools
import math

import numpy as np
import pytest

from learner.loss.advantages import ADVANTAGES, STD_EPS, dr_grpo, grpo, reinforce_pp, rloo

WITHIN_GROUPS = [grpo, dr_grpo, rloo]


def group(rewards: list[float], valid: list[bool] | None = None) -> np.ndarray:
    return np.where([True] * len(rewards) if valid is None else valid, rewards, np.nan)


def test_dr_grpo_is_the_distance_from_the_group_mean() -> None:
    np.testing.assert_allclose(dr_grpo([group([1.0, 0.0, 0.0, 3.0])]), [[0.0, -1.0, -1.0, 2.0]], atol=1e-15)


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    deviation = math.sqrt((0 + 1 + 1 + 4) / 3)
    expected = np.array([0.0, -1.0, -1.0, 2.0]) / (deviation + STD_EPS)
    np.testing.assert_allclose(grpo([group([1.0, 0.0, 0.0, 3.0])])[0], expected, rtol=1e-14)


def test_rloo_compares_each_reward_with_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.5, 0.0, 3.0]
    expected = [r - sum(rewards[:i] + rewards[i + 1 :]) / 3 for i, r in enumerate(rewards)]
    np.testing.assert_allclose(rloo([group(rewards)])[0], expected, rtol=1e-14)


def test_reinforce_pp_normalises_over_the_rewards_of_all_groups() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0, 2.0]
    mean = sum(rewards) / 5
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    expected = [(r - mean) / (deviation + STD_EPS) for r in rewards]
    for ends in ([0, 3, 5], range(6)):  # it needs no second sample of a prompt
        found = reinforce_pp([group(rewards[start:end]) for start, end in itertools.pairwise(ends)])
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-14)


@pytest.mark.parametrize("estimator", WITHIN_GROUPS)
def test_groups_do_not_see_each_other(estimator) -> None:
    one, two = group([1.0, 0.0, 5.0]), group([7.0, 9.0])
    together = estimator([one, two])
    np.testing.assert_array_equal(together[0], estimator([one])[0])
    np.testing.assert_array_equal(together[1], estimator([two])[0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_zero_and_no_division_by_zero(name: str) -> None:
    np.testing.assert_array_equal(ADVANTAGES[name]([group([1.0] * 8)])[0], np.zeros(8))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_failed_sample_enters_no_mean_and_no_deviation_and_gets_zero(name: str) -> None:
    estimator, valid = ADVANTAGES[name], [True, False, True, True]
    found = estimator([group([1.0, 100.0, 0.0, 2.0], valid)])[0]
    assert found[1] == 0.0
    np.testing.assert_array_equal(found[valid], estimator([group([1.0, 0.0, 2.0])])[0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_where_nothing_can_be_compared_there_is_no_advantage(name: str) -> None:
    assert ADVANTAGES[name]([]) == []
    for valid in ([True, False, False], [False, False, False]):
        np.testing.assert_array_equal(ADVANTAGES[name]([group([1.0, 0.0, 0.0], valid)])[0], np.zeros(3))
