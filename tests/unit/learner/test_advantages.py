"""Group-relative advantages against values computed by hand."""

import math

import numpy as np
import pytest

from learner.advantages import ADVANTAGES, STD_EPS, grpo


def all_valid(rewards: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(rewards), np.ones(len(rewards), dtype=bool)


def test_without_deviation_it_is_the_distance_from_the_group_mean() -> None:
    rewards, valid = all_valid([1.0, 0.0, 0.0, 3.0])
    np.testing.assert_allclose(grpo(rewards, valid, False), [0.0, -1.0, -1.0, 2.0], atol=1e-15)


def test_with_deviation_it_is_divided_by_the_sample_standard_deviation() -> None:
    rewards, valid = all_valid([1.0, 0.0, 0.0, 3.0])
    deviation = math.sqrt((0 + 1 + 1 + 4) / 3)
    expected = np.array([0.0, -1.0, -1.0, 2.0]) / (deviation + STD_EPS)
    np.testing.assert_allclose(grpo(rewards, valid, True), expected, rtol=1e-14)


def test_equal_rewards_give_zero_and_no_division_by_zero() -> None:
    rewards, valid = all_valid([1.0] * 8)
    np.testing.assert_array_equal(grpo(rewards, valid, True), np.zeros(8))


def test_a_failed_sample_enters_neither_mean_nor_deviation_and_gets_zero() -> None:
    rewards = np.array([1.0, 100.0, 0.0, 2.0])
    valid = np.array([True, False, True, True])
    without = grpo(rewards[valid], np.ones(3, dtype=bool), True)
    found = grpo(rewards, valid, True)
    assert found[1] == 0.0
    np.testing.assert_array_equal(found[valid], without)


@pytest.mark.parametrize("valid", [[True, False, False], [False, False, False]])
def test_a_single_reward_has_nothing_to_be_compared_with(valid: list[bool]) -> None:
    np.testing.assert_array_equal(grpo(np.array([1.0, 0.0, 0.0]), np.array(valid), False), np.zeros(3))


def test_the_config_names_only_registered_estimators() -> None:
    from typing import get_args, get_type_hints

    from common.config import LossConfig

    assert set(get_args(get_type_hints(LossConfig)["advantage"])) == set(ADVANTAGES)
