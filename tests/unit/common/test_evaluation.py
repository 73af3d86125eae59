"""Estimates of held-out problems against independent formulas in float64."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from common.evaluation import dataset_names, mean_interval, pass_at, pass_ks


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_correct_one(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [1] * correct + [0] * (samples - correct)
        share = np.mean([any(choice) for choice in itertools.combinations(outcomes, k)], dtype=np.float64)
        assert pass_at(samples, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact() -> None:
    product = 1 - math.prod((np.float64(400 - i - 7) / (400 - i)) for i in range(100))
    assert pass_at(400, 7, 100) == pytest.approx(product, rel=1e-12)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (3, 8), (130, 200), (1, 1)])
def test_zeros_and_ones_get_wilsons_interval(right: int, n: int) -> None:
    z, share = NormalDist().inv_cdf(0.975), right / n
    # the shares p whose z-score (share - p) / sqrt(p (1 - p) / n) is -z or z
    expected = sorted(np.roots([1 + z * z / n, -2 * share - z * z / n, share * share]).real)
    mean, interval = mean_interval([1.0] * right + [0.0] * (n - right))
    assert mean == right / n
    assert interval == pytest.approx(tuple(expected), abs=1e-9)


def test_other_values_get_the_normal_interval_of_their_mean() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=60)
    mean, interval = mean_interval(values.tolist())
    assert mean == pytest.approx(values.mean(), rel=1e-12)
    normal = NormalDist(values.mean(), values.std(ddof=1) / math.sqrt(60))
    assert interval == pytest.approx((normal.inv_cdf(0.025), normal.inv_cdf(0.975)), rel=1e-12)
    assert mean_interval([0.3]) == (0.3, None), "one value says nothing about its spread"


def test_the_normal_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        _, interval = mean_interval(draw.binomial(8, 0.3, size=50) / 8)
        assert interval is not None
        inside += interval[0] <= 0.3 <= interval[1]
    assert 0.92 < inside / 1000 < 0.97


def test_k_goes_in_powers_of_two_up_to_all_samples() -> None:
    assert [pass_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_names_of_datasets_are_short_fit_for_files_and_differ() -> None:
    found = dataset_names(["runs/assets/addition/held_out.jsonl", "hf://datasets/openai/gsm8k/main/test-*.parquet"])
    assert found == ["addition-held_out", "main-test"]
    assert dataset_names(["a/x/test.jsonl", "b/x/test.parquet", "test.jsonl"]) == ["x-test", "x-test-2", "test"]
    assert dataset_names(["a/d/x-3", "a/d/x", "b/d/x"]) == ["d-x-3", "d-x", "d-x-3-3"]
