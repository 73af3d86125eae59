"""How many rewards an advantage estimator needs before it compares any."""

import numpy as np
import pytest

from learner.loss.advantages import ADVANTAGES
from learner.loss.types import GroupRewards

NAN = float("nan")


def groups(*rewards: list[float]) -> list[GroupRewards]:
    return [GroupRewards.of(np.array(own)) for own in rewards]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_two_rewards_of_a_group_are_compared_and_one_is_not(name: str) -> None:
    estimate = ADVANTAGES[name]
    one, two = estimate(groups([NAN, 5.0], [1.0, NAN, 3.0]))
    scale = {"grpo": 1 / np.sqrt(2), "dr_grpo": 1.0, "rloo": 2.0}[name]
    np.testing.assert_array_equal(one, [0, 0])
    np.testing.assert_allclose(two, [-scale, 0, scale], rtol=1e-5)


def test_global_normalisation_compares_two_rewards_of_the_step_and_leaves_one_alone() -> None:
    estimate = ADVANTAGES["reinforce_pp"]
    first, second, third = estimate(groups([1.0], [NAN], [NAN, 3.0]))
    np.testing.assert_allclose([*first, *second, *third], [-np.sqrt(0.5), 0, 0, np.sqrt(0.5)], rtol=1e-5)
    for alone in ([[4.0]], [[NAN, 4.0], [NAN]], [[NAN]]):
        assert [each.tolist() for each in estimate(groups(*alone))] == [[0.0] * len(each) for each in alone]
