"""How many rewards an advantage estimator needs before it compares any."""

import numpy as np
import pytest

from learner.loss.advantages import ADVANTAGES

NAN = float("nan")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_two_rewards_of_a_group_are_compared_and_one_is_not(name: str) -> None:
    estimate = ADVANTAGES[name]
    one, two = estimate([np.array([NAN, 5.0]), np.array([1.0, NAN, 3.0])])
    scale = {"grpo": 1 / np.sqrt(2), "dr_grpo": 1.0, "rloo": 2.0}[name]
    np.testing.assert_array_equal(one, [0, 0])
    np.testing.assert_allclose(two, [-scale, 0, scale], rtol=1e-5)


def test_global_normalisation_compares_two_rewards_of_the_step_and_leaves_one_alone() -> None:
    estimate = ADVANTAGES["reinforce_pp"]
    first, second, third = estimate([np.array([1.0]), np.array([NAN]), np.array([NAN, 3.0])])
    np.testing.assert_allclose([*first, *second, *third], [-np.sqrt(0.5), 0, 0, np.sqrt(0.5)], rtol=1e-5)
    for alone in ([np.array([4.0])], [np.array([NAN, 4.0]), np.array([NAN])], [np.array([NAN])]):
        assert [each.tolist() for each in estimate(alone)] == [[0.0] * len(each) for each in alone]
