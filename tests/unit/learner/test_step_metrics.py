"""A step's figures from its sums, and the stop at numbers that are none."""

import math
from types import SimpleNamespace

import pytest

from broker.contract import NodeReport
from common.errors import SlipstreamError
from learner.backend_protocol import StepResult
from learner.loop.step_metrics import LossFigures, check_finite, engine_metrics


def result(tokens: int = 4, by_age: tuple[list[float], list[float]] | None = None, **sums: float) -> StepResult:
    histograms = {} if by_age is None else {"mismatch_by_age": by_age[0], "tokens_by_age": by_age[1]}
    return StepResult(0.1, tokens, 1.0, 0.1, sums, {"ratio": 3.0}, histograms)


def test_sums_become_means_per_loss_token() -> None:
    sums = {"ratio": 6.0, "entropy": 2.0, "kl": 0.4, "mismatch": 8.0}
    counts = {"correction_clipped": 1.0, "correction_masked": 2.0, "vetoed": 4.0, "objective_clipped": 3.0}
    found = LossFigures.of(result(**sums, **counts))
    assert (found.ratio_mean, found.ratio_max, found.entropy, found.kl_mean) == (1.5, 3.0, 0.5, 0.1)
    assert (found.correction_clip_fraction, found.correction_masked_fraction) == (0.25, 0.5)
    assert (found.veto_fraction, found.objective_clip_fraction) == (1.0, 0.75)


@pytest.mark.parametrize(("weights", "expected"), [([1.0] * 4, 1.0), ([2.0, 0, 0, 0], 0.25), ([1, 3, 0, 0], 0.4)])
def test_the_effective_sample_is_kishs(weights: list[float], expected: float) -> None:
    found = LossFigures.of(result(weight=sum(weights), weight_squared=sum(w * w for w in weights)))
    assert found.effective_sample_fraction == pytest.approx(expected)


def test_weights_that_are_all_zero_leave_no_effective_sample() -> None:
    assert LossFigures.of(result(weight=0.0, weight_squared=0.0)).effective_sample_fraction == 0.0


def test_mismatch_is_over_fresh_tokens_when_there_are_any() -> None:
    found = LossFigures.of(result(mismatch=8.0, by_age=([0.5, 7.5, 0, 0, 0, 0], [2.0, 2.0, 0, 0, 0, 0])))
    assert (found.mismatch_abs_mean, found.drift_abs_mean) == (0.25, 2.0)
    assert found.mismatch_by_age == [0.25, 3.75, 0.0, 0.0, 0.0, 0.0]
    assert found.tokens_by_age == [2, 2, 0, 0, 0, 0]


def test_mismatch_falls_back_to_all_tokens() -> None:
    found = LossFigures.of(result(mismatch=8.0, by_age=([0, 8.0, 0, 0, 0, 0], [0, 4.0, 0, 0, 0, 0])))
    assert found.mismatch_abs_mean == found.drift_abs_mean == 2.0


def test_quantiles_come_from_the_histogram() -> None:
    bins = [0.0] * 241
    bins[119], bins[120], bins[121] = 2.0, 96.0, 2.0
    found = LossFigures.of(StepResult(0.1, 100, 1.0, 0.1, {}, {}, {"ratio_bins": bins}))
    assert found.ratio_p1 < found.ratio_p50 == 1.0 < found.ratio_p99 < 1.001


def test_a_step_without_tokens_has_zeros() -> None:
    found = vars(LossFigures.of(StepResult(0.0, 0, 0.0, 0.0, {}, {})))
    assert all(value in (0.0, [0] * 6) for value in found.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_the_run(bad: float) -> None:
    with pytest.raises(SlipstreamError, match=r"step 7: loss is (nan|inf); the last checkpoint is unharmed"):
        check_finite(7, StepResult(bad, 1, 1.0, 0.1, {}, {}))


def test_the_routing_mismatch_is_over_what_was_replayed() -> None:
    assert LossFigures.of(result(routing_changed=3.0, routing_replayed=12.0)).routing_mismatch_fraction == 0.25
    assert LossFigures.of(result()).routing_mismatch_fraction == 0.0


def test_engines_of_living_nodes_are_summed_up() -> None:
    def node(alive: bool, usage: float) -> SimpleNamespace:
        report = NodeReport(
            "n", 1, "h", "generating", 0, episodes_running=5, concurrency=8, kv_cache_usage=usage, preemptions=2
        )
        return SimpleNamespace(alive=alive, report=report)

    found = engine_metrics(SimpleNamespace(nodes=[node(True, 0.5), node(True, 0.75), node(False, 0.9)]))
    assert found == {"concurrency": 16, "episodes_running": 10, "kv_cache_usage": 0.75, "preemptions_total": 4}
    assert engine_metrics(SimpleNamespace(nodes=[]))["kv_cache_usage"] == 0.0
