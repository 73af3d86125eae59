"""Corrections, proximal policies, divergence and documents against values computed by hand."""

import math
from typing import get_args, get_type_hints

import msgspec
import pytest
import torch
from torch import Tensor

from common.config.loss_defaults import CORRECTION_BOUNDS
from common.config.schema import LossConfig
from learner.loss.corrections import CORRECTIONS, Corrected, veto
from learner.loss.kl_estimators import KL_ESTIMATORS, k1, k2, k3
from learner.loss.proximal import PROXIMALS, loglinear
from learner.loss.ratios import Documents
from learner.loss.reductions import REDUCTIONS

LENGTHS = (3, 2)
MASK = [True, True, False, True, True]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def correct(name: str, level: str, *weights: float, **changes: object) -> Corrected:
    config = msgspec.structs.replace(LossConfig(correction=name, correction_level=level), **changes)
    return CORRECTIONS[name](tensor(*weights).log(), documents(), config)


def documents() -> Documents:
    return Documents(LENGTHS, torch.tensor(MASK))


def test_documents_count_loss_tokens_only() -> None:
    values = tensor(1.0, 2.0, 100.0, 3.0, 5.0)
    found = documents()
    assert found.counts.tolist() == [2, 2]
    assert found.sums(values).tolist() == [3, 8]
    assert found.means(values).tolist() == [1.5, 4]
    assert found.spread(tensor(7.0, 8.0)).tolist() == [7, 7, 7, 8, 8]


def test_a_document_without_loss_tokens_has_mean_zero() -> None:
    found = Documents((2, 1), torch.tensor([False, False, True]))
    assert found.means(tensor(4.0, 5.0, 6.0)).tolist() == [0, 6]


def test_the_off_switch_weighs_every_token_one() -> None:
    found = correct("none", "token", 0.1, 7.0, 1.0, 1.0, 1.0)
    assert found.weights.tolist() == [1.0] * 5
    assert not found.truncated.any() and not found.rejected.any()


def test_truncation_caps_large_weights_and_keeps_small_ones() -> None:
    found = correct("tis", "token", 0.1, 1.0, 1.0, 2.0, 2.5)
    torch.testing.assert_close(found.weights, tensor(0.1, 1.0, 1.0, 2.0, 2.0))
    assert found.truncated.tolist() == [False, False, False, False, True]


def test_truncation_of_documents_multiplies_their_loss_tokens() -> None:
    found = correct("tis", "sequence", 2.0, 1.5, 1.0, 3.0, 2.0)
    torch.testing.assert_close(found.weights, tensor(3.0, 3.0, 3.0, 5.0, 5.0))
    assert found.truncated.tolist() == [False, False, False, True, True]


def test_truncation_may_have_a_lower_bound() -> None:
    found = correct("tis", "token", 0.1, 0.6, 1.0, 1.0, 1.0, correction_low=0.5)
    torch.testing.assert_close(found.weights, tensor(0.5, 0.6, 1.0, 1.0, 1.0))


def test_icepop_drops_tokens_but_still_counts_them() -> None:
    found = correct("icepop", "token", 0.4, 0.6, 1.0, 4.0, 6.0)
    torch.testing.assert_close(found.weights, tensor(0.0, 0.6, 1.0, 4.0, 0.0))
    assert found.rejected.tolist() == [True, False, False, False, True]
    assert found.counted.tolist() == MASK


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_icepop_keeps_the_tokens_own_weights_in_documents_that_stay(level: str) -> None:
    found = correct("icepop", level, 2.0, 0.5005, 1.0, 4.0, 2.0)
    torch.testing.assert_close(found.weights, tensor(2.0, 0.5005, 1.0, 0.0, 0.0))


def test_mis_drops_tokens_and_counts_them_no_more() -> None:
    found = correct("mis", "token", 0.4, 0.6, 1.0, 1.9, 2.1)
    torch.testing.assert_close(found.weights, tensor(0.0, 0.6, 1.0, 1.9, 0.0))
    assert found.counted.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize(("level", "weight"), [("sequence", 1.001), ("geometric", math.sqrt(1.001))])
def test_mis_weighs_documents_that_stay_by_their_own_ratio(level: str, weight: float) -> None:
    found = correct("mis", level, 2.0, 0.5005, 1.0, 4.0, 2.0)
    torch.testing.assert_close(found.weights, tensor(weight, weight, weight, 0.0, 0.0))
    assert found.counted.tolist() == [True, True, False, False, False]


def test_one_impossible_token_vetoes_its_sample() -> None:
    weights = tensor(1e-5, 1.0, 1.0, 0.9, 1.0)
    found, vetoed = veto(correct("tis", "token", *weights), weights.log(), documents(), 1e-4)
    assert vetoed.tolist() == [True, True, True, False, False]
    torch.testing.assert_close(found.weights, tensor(0.0, 0.0, 0.0, 0.9, 1.0))
    assert found.counted.tolist() == [False, False, False, True, True]


def test_a_token_outside_the_loss_vetoes_nothing() -> None:
    weights = tensor(1.0, 1.0, 1e-9, 1.0, 1.0)
    assert not veto(correct("none", "token", *weights), weights.log(), documents(), 1e-4)[1].any()


def test_loglinear_is_the_policy_one_version_back() -> None:
    current, behavior = tensor(-1.0, -1.0, -1.0, -1.0), tensor(-2.0, -2.0, -2.0, -2.0)
    found = loglinear(current, behavior, torch.tensor([0, 1, 2, 4], dtype=torch.int32))
    torch.testing.assert_close(found, tensor(-2.0, -2.0, -1.5, -1.25))


def test_estimators_of_the_divergence() -> None:
    x = tensor(0.5, -0.5)  # log r
    torch.testing.assert_close(k1(x), tensor(-0.5, 0.5))
    torch.testing.assert_close(k2(x), tensor(0.125, 0.125))
    torch.testing.assert_close(k3(x), tensor(math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5))
    assert k3(tensor(50.0)).item() == 10.0
    assert k3(tensor(-5.0)).item() == pytest.approx(math.exp(-5) + 4)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_divergence_is_differentiable(name: str) -> None:
    assert torch.autograd.gradcheck(KL_ESTIMATORS[name], (tensor(-3.0, -0.1, 0.2, 1.5).requires_grad_(),))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_estimators_are_unbiased(name: str) -> None:
    policy, reference = tensor(0.5, 0.3, 0.2), tensor(0.2, 0.3, 0.5)
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * KL_ESTIMATORS[name]((reference / policy).log())).sum(), exact)


def test_every_part_is_in_the_config_and_has_bounds() -> None:
    hints = get_type_hints(LossConfig)
    assert set(get_args(hints["correction"])) == set(CORRECTIONS)
    assert set(get_args(hints["proximal"])) == set(PROXIMALS)
    assert set(get_args(hints["kl_estimator"])) == set(KL_ESTIMATORS)
    assert set(get_args(hints["reduction"])) == set(REDUCTIONS)
    levels = set(get_args(hints["correction_level"]))
    expected = {(c, x) for c in CORRECTIONS for x in levels if c != "none" and (c, x) != ("tis", "geometric")}
    assert set(CORRECTION_BOUNDS) == expected
