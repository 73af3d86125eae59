"""A step's figures from its sums, and the stop at numbers that are none."""

import math

import pytest

from common.errors import SlipstreamError
from learner.backend import StepResult
from learner.step_metrics import LossFigures, check_finite


def result(tokens: int = 4, **sums: float) -> StepResult:
    return StepResult(loss=0.1, loss_tokens=tokens, grad_norm=1.0, lr=0.1, sums=sums, maxima={"ratio": 3.0})


def test_sums_become_means_per_loss_token() -> None:
    found = LossFigures.of(result(ratio=6.0, entropy=2.0, correction_clipped=1.0, objective_clipped=3.0, mismatch=8.0))
    assert (found.ratio_mean, found.ratio_max, found.entropy) == (1.5, 3.0, 0.5)
    assert (found.correction_clip_fraction, found.objective_clip_fraction) == (0.25, 0.75)


def test_mismatch_is_over_fresh_tokens_when_there_are_any() -> None:
    found = LossFigures.of(result(mismatch=8.0, mismatch_fresh=0.5, fresh_tokens=2.0))
    assert (found.mismatch_abs_mean, found.drift_abs_mean) == (0.25, 2.0)


def test_mismatch_falls_back_to_all_tokens() -> None:
    found = LossFigures.of(result(mismatch=8.0, mismatch_fresh=0.0, fresh_tokens=0.0))
    assert found.mismatch_abs_mean == found.drift_abs_mean == 2.0


def test_a_step_without_tokens_has_zeros() -> None:
    found = LossFigures.of(StepResult(0.0, 0, 0.0, 0.0, {}, {}))
    assert found == LossFigures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_the_run(bad: float) -> None:
    with pytest.raises(SlipstreamError, match=r"step 7: loss is (nan|inf); the last checkpoint is unharmed"):
        check_finite(7, StepResult(bad, 1, 1.0, 0.1, {}, {}))
