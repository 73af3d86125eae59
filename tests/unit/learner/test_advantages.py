"""Advantages against values computed by hand, sample by sample."""

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest

from common.errors import UsageError
from learner.loss.advantages import (
    ADVANTAGES,
    GDPO_EPS,
    STD_EPS,
    dr_grpo,
    gdpo,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    reinforce_pp,
    rloo,
)
from learner.loss.types import GroupRewards
from tests.rigs.refusals import refused

OPTIONS: dict[str, dict[str, float]] = {"pass_at_k": {"k": 1}, "gdpo": {"right": 1.0, "short": 0.5}}


def group(rewards: list[float], valid: list[bool] | None = None) -> GroupRewards:
    """Samples of 1, 2, 3, ... tokens; their reward `right` is the whole one and `short` grows with the tokens."""
    good = [True] * len(rewards) if valid is None else valid
    lengths = np.arange(len(rewards)) + 1
    totals = np.where(good, rewards, np.nan)
    return GroupRewards(totals, lengths, {"right": totals, "short": np.where(good, lengths % 3 / 2.0, np.nan)})


def only(kept: GroupRewards, valid: list[bool]) -> GroupRewards:
    parts = {name: part[valid] for name, part in kept.parts.items()}
    return GroupRewards(kept.totals[valid], kept.lengths[valid], parts)


def estimates(name: str, *groups: GroupRewards) -> list[np.ndarray]:
    return ADVANTAGES[name](groups, **OPTIONS.get(name, {}))


REWARDS = [1.0, 0.0, 0.0, 3.0]
BY_HAND: dict[Any, Any] = {
    dr_grpo: [0.0, -1.0, -1.0, 2.0],
    grpo: np.array([0.0, -1.0, -1.0, 2.0]) / (math.sqrt((0 + 1 + 1 + 4) / 3) + STD_EPS),
    rloo: [r - sum(REWARDS[:i] + REWARDS[i + 1 :]) / 3 for i, r in enumerate(REWARDS)],
    opo: [1 - 1.3, -1.3, -1.3, 3 - 1.3],  # 1 x 1 + 4 x 3 of 10 tokens
    maxrl: [0.0, -1.0, -1.0, 2.0],  # the mean is 1
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


def test_maxrl_divides_by_the_success_rate_and_refuses_rewards_below_0() -> None:
    sums = group([0.3 - 0.1 - 0.2, 0.0])  # rounded to -3e-17
    found = maxrl([group([1.0, 0.0, 0.0, 0.0]), group([1.0, 1.0, 1.0, 0.0]), sums])
    np.testing.assert_allclose(found[0], [3, -1, -1, -1])  # the rarer a success, the more it counts
    np.testing.assert_allclose(found[1], [1 / 3, 1 / 3, 1 / 3, -1])
    np.testing.assert_array_equal(found[2], [0, 0])
    with refused(UsageError, "maxrl", "reward -0.98"):
        maxrl([group([1.0, 0.0, -0.98])])  # their mean is 0.007, and the advantages would be beyond 100


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.5, 1.0], [0.0, 2.0, 0.0, 0.0, 0.0], [1.0] * 5, [0.0] * 5])
def test_pass_at_k_is_the_mean_over_all_draws_of_k_samples_in_which_a_sample_is(k: int, rewards: list[float]) -> None:
    """Every draw is enumerated. Its reward is 1 as soon as one of its samples succeeds."""
    draws = list(itertools.combinations(range(5), k))
    passed = [float(any(rewards[i] >= 1 for i in draw)) for draw in draws]
    deviation = statistics.pstdev(passed)
    mean = statistics.fmean(passed)
    expected = [
        statistics.fmean((p - mean) / deviation for p, draw in zip(passed, draws, strict=True) if i in draw)
        if deviation
        else 0.0
        for i in range(5)
    ]
    np.testing.assert_allclose(pass_at_k([group(rewards)], k=k)[0], expected, rtol=1e-12, atol=1e-12)


def test_pass_at_k_says_nothing_of_a_group_with_fewer_samples_and_knows_what_a_success_is() -> None:
    np.testing.assert_array_equal(pass_at_k([group([1.0, 0.0, 0.0])], k=4)[0], np.zeros(3))
    half = GroupRewards(np.array([0.6, 0.1, 0.2]), np.ones(3, dtype=np.int64), success=0.5)
    np.testing.assert_allclose(pass_at_k([half], k=1)[0], np.array([2.0, -1.0, -1.0]) / math.sqrt(2))


def test_gdpo_normalises_each_reward_in_its_group_and_the_sum_over_the_step() -> None:
    groups = [group([1.0, 0.0, 0.0, 3.0]), group([0.5, 2.0, 2.0])]
    sums = []
    for own in groups:
        scores = [0.0] * len(own.totals)
        for name, weight in OPTIONS["gdpo"].items():
            part = own.parts[name].tolist()
            mean, deviation = statistics.fmean(part), statistics.stdev(part)
            scores = [s + weight * (x - mean) / (deviation + GDPO_EPS) for s, x in zip(scores, part, strict=True)]
        sums += scores
    mean, deviation = statistics.fmean(sums), statistics.stdev(sums)
    expected = [(s - mean) / (deviation + GDPO_EPS) for s in sums]
    np.testing.assert_allclose(np.concatenate(gdpo(groups, **OPTIONS["gdpo"])), expected, rtol=1e-12, atol=1e-14)
    with refused(UsageError, "shrot", "short"):
        gdpo(groups, right=1.0, shrot=1.0)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "gae"])  # which compares no samples
def test_a_failed_sample_enters_no_mean_and_no_deviation_and_gets_zero(name: str) -> None:
    valid = [True, False, True, True]
    whole = group([1.0, 100.0, 0.0, 2.0], valid)
    (found,) = estimates(name, whole)
    assert found[1] == 0.0
    np.testing.assert_array_equal(found[valid], estimates(name, only(whole, valid))[0])
    assert found.any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_where_nothing_can_be_compared_or_all_is_equal_there_is_no_advantage(name: str) -> None:
    assert ADVANTAGES[name]([]) == []
    only_one, none = [True, False, False], [False, False, False]
    for found in (group([1.0] * 8), group([1.0, 0.0, 0.0], only_one), group([1.0, 0.0, 0.0], none)):
        estimated = ADVANTAGES[name]([GroupRewards.of(found.totals)])[0]
        np.testing.assert_allclose(estimated, np.zeros(len(found.totals)), atol=1e-15)
