"""Sums and counts of a microbatch against plain Python over its tokens."""

import math
import random

import pytest
import torch

from learner.loss.corrections import Corrected
from learner.loss.token_diagnostics import ratio_quantile, token_counts, token_sums

MASK = torch.tensor([True, True, True, False, True])
DRIFT = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.0], dtype=torch.float64)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_sums_are_what_they_are_called() -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 7.0, 0.0], dtype=torch.float64)
    corrected = Corrected(weights, flags(0, 0, 1, 1, 0), flags(0, 0, 0, 1, 1), MASK)
    found = token_sums(MASK, DRIFT, corrected, flags(0, 1, 1, 1, 0), flags(1, 1, 1, 1, 0))
    assert found["ratio"].item() == pytest.approx(math.exp(0.5) + math.exp(-1) + math.exp(2) + 1)
    assert found["mismatch"].item() == 3.5
    assert found["weight"].item() == 3.5
    assert found["weight_squared"].item() == 1 + 0.25 + 4
    names = ("correction_clipped", "correction_masked", "vetoed", "objective_clipped")
    assert [found[name].item() for name in names] == [1, 1, 2, 3]


def test_without_a_veto_no_token_is_vetoed() -> None:
    corrected = Corrected(torch.ones(5).double(), flags(0, 0, 0, 0, 0), flags(0, 0, 0, 0, 0), MASK)
    assert token_sums(MASK, DRIFT, corrected, None, flags(0, 0, 0, 0, 0))["vetoed"].item() == 0


def test_mismatch_is_told_apart_by_age() -> None:
    ages = [0, 0, 1, 2, 3, 4, 5, 8, 9, 500]
    drift = torch.arange(1.0, 11.0, dtype=torch.float64) * torch.tensor([1, -1] * 5)
    found = token_counts(torch.ones(10, dtype=torch.bool), drift, torch.tensor(ages, dtype=torch.int32))
    assert found["tokens_by_age"].tolist() == [2, 1, 1, 2, 2, 2]
    assert found["mismatch_by_age"].tolist() == [3, 3, 4, 11, 15, 19]


def test_tokens_without_an_age_count_as_fresh() -> None:
    assert token_counts(MASK, DRIFT, None)["tokens_by_age"].tolist() == [4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.1, 3.0])
def test_quantiles_are_right_to_the_documented_resolution(spread: float) -> None:
    draw = random.Random(1)
    log_ratios = [draw.gauss(-0.1 * spread, spread) for _ in range(5000)]
    counts = token_counts(torch.ones(5000, dtype=torch.bool), torch.tensor(log_ratios, dtype=torch.float64), None)
    bins = counts["ratio_bins"].tolist()
    assert sum(bins) == 5000
    for share in (0.01, 0.5, 0.99):
        exact = sorted(log_ratios)[math.ceil(share * 5000) - 1]
        assert abs(math.log(ratio_quantile(bins, share)) - exact) <= 4.2e-5 + 0.042 * abs(exact)


def test_ratios_beyond_the_bins_are_counted_in_the_outermost() -> None:
    counts = token_counts(torch.ones(2, dtype=torch.bool), torch.tensor([80.0, -80.0]), None)["ratio_bins"]
    assert counts[0].item() == counts[-1].item() == 1
    assert ratio_quantile(counts.tolist(), 0.99) == pytest.approx(math.exp(20))


def test_no_tokens_have_no_quantile() -> None:
    assert ratio_quantile([0.0] * 241, 0.5) == 0.0
    assert ratio_quantile([], 0.5) == 0.0


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_gone_break_no_count(lost: float) -> None:
    """The loss says it; an index out of bounds would end the process, on a GPU for every later operation."""
    drift = torch.tensor([0.5, lost, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert token_counts(MASK, drift, None)["ratio_bins"].sum().item() == MASK.sum().item()
