"""A step's figures from its sums, the sums against plain Python over tokens, and the stop at numbers that are none."""

import math
import random

import msgspec
import pytest
import torch
from msgspec import UNSET

from common.errors import SlipstreamError
from common.metrics import SOURCE_FIGURES
from common.weights.source.nodes import PublishStats
from learner.backend_protocol import StepResult
from learner.batch.batch import BatchStatistics, SourceFigures, TrainingBatch
from learner.loop.step_metrics import (
    GivenBack,
    LossFigures,
    Step,
    Times,
    Totals,
    UpdateFigures,
    check_finite,
    loss_figures,
    source_figures,
    step_metrics,
)
from learner.loss.corrections import Corrected
from learner.loss.token_diagnostics import ratio_quantile, token_counts, token_sums
from tests.rigs.configs import node_status, status_of
from tests.rigs.refusals import refused


def result(tokens: int = 4, by_age: tuple[list[float], list[float]] | None = None, **sums: float) -> StepResult:
    vectors = {} if by_age is None else {"mismatch_by_age": by_age[0], "tokens_by_age": by_age[1]}
    return StepResult(0.1, tokens, 1.0, 0.1, sums | vectors, {"ratio": 3.0})


SUMS = {"ratio": 6.0, "entropy": 2.0, "kl": 0.4, "mismatch": 8.0}
COUNTS = {"correction_clipped": 1.0, "correction_masked": 2.0, "vetoed": 4.0, "objective_clipped": 3.0}
FRESH = ([0.5, 7.5, 0, 0, 0, 0], [2.0, 2.0, 0, 0, 0, 0])


def weighing(*weights: float) -> StepResult:
    return result(weight=sum(weights), weight_squared=sum(w * w for w in weights))


FIGURES = {
    "sums are means per loss token": (
        result(**SUMS, **COUNTS),
        {
            "ratio_mean": 1.5, "ratio_max": 3.0, "entropy": 0.5, "kl_mean": 0.1, "correction_clip_fraction": 0.25,
            "correction_masked_fraction": 0.5, "veto_fraction": 1.0, "objective_clip_fraction": 0.75,
        },
    ),
    "the effective sample of equal weights": (weighing(1, 1, 1, 1), {"effective_sample_fraction": 1.0}),
    "of one weight": (weighing(2, 0, 0, 0), {"effective_sample_fraction": 0.25}),
    "is Kish's": (weighing(1, 3, 0, 0), {"effective_sample_fraction": 0.4}),
    "of none": (weighing(0, 0, 0, 0), {"effective_sample_fraction": 0.0}),
    "mismatch is over fresh tokens": (
        result(mismatch=8.0, by_age=FRESH),
        {
            "mismatch_abs_mean": 0.25, "drift_abs_mean": 2.0, "mismatch_by_age": [0.25, 3.75, 0, 0, 0, 0],
            "tokens_by_age": [2, 2, 0, 0, 0, 0],
        },
    ),
    "without fresh ones over all": (
        result(mismatch=8.0, by_age=([0, 8.0, 0, 0, 0, 0], [0, 4.0, 0, 0, 0, 0])),
        {"mismatch_abs_mean": 2.0, "drift_abs_mean": 2.0},
    ),
    "routing mismatch is over what was replayed": (
        result(routing_changed=3.0, routing_replayed=12.0), {"routing_mismatch_fraction": 0.25},
    ),
    "nothing was replayed": (result(), {"routing_mismatch_fraction": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize(("of", "figures"), FIGURES.values(), ids=FIGURES)
def test_figures_follow_from_the_sums(of: StepResult, figures: dict[str, object]) -> None:
    found = loss_figures(of)
    assert {name: found[name] for name in figures} == {
        name: value if isinstance(value, list) else pytest.approx(value) for name, value in figures.items()
    }


def test_quantiles_come_from_the_histogram() -> None:
    bins = [0.0] * 241
    bins[119], bins[120], bins[121] = 2.0, 96.0, 2.0
    found = loss_figures(StepResult(0.1, 100, 1.0, 0.1, {"ratio_bins": bins}, {}))
    assert found["ratio_p1"] < found["ratio_p50"] == 1.0 < found["ratio_p99"] < 1.001


@pytest.mark.parametrize("kept", [400, 40])
def test_without_a_correction_the_effective_sample_is_that_of_the_ratios(kept: int) -> None:
    drift = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 1.5
    mask = torch.ones(400, dtype=torch.bool)
    counts = {name: value.tolist() for name, value in token_counts(mask, drift, None).items()}
    ratios = drift.exp()
    expected = float(ratios.sum() ** 2 / ratios.square().sum() / 400)
    assert 0.1 < expected < 0.3

    def found(weights: torch.Tensor) -> float:
        sums = {"weight": float(weights.sum()), "weight_squared": float(weights.square().sum())}
        return loss_figures(StepResult(0.1, 400, 1.0, 0.1, counts | sums, {}))["effective_sample_fraction"]

    ones = (torch.arange(400) < kept).float()  # a veto leaves the others out
    assert found(ones) == pytest.approx(min(expected, kept / 400), rel=0.03)
    truncated = ratios.clamp(max=2.0)
    share = float(truncated.sum() ** 2 / truncated.square().sum() / 400)
    assert found(truncated) == pytest.approx(share) and share > 2 * expected, "tis has bounded them"


def test_a_step_without_tokens_has_zeros() -> None:
    found = loss_figures(StepResult(0.0, 0, 0.0, 0.0, {}, {}))
    assert found.keys() == LossFigures.__annotations__.keys()
    assert all(value in (0.0, [0] * 6) for value in found.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_the_run(bad: float) -> None:
    with refused(SlipstreamError, "step 7", f"loss is {bad}"):
        check_finite(7, StepResult(bad, 1, 1.0, 0.1, {}, {}))


def test_engines_of_living_nodes_are_summed_up() -> None:
    engine = {"episodes_running": 5, "concurrency": 8, "preemptions": 2}
    nodes = [
        node_status("n", alive, kv_cache_usage=x, **engine) for alive, x in ((True, 0.5), (True, 0.75), (False, 1))
    ]
    names = ("value_clipped", "steps", "returns", "returns_squared", "errors", "errors_squared")
    critic = result(**dict.fromkeys(names, 1.0))
    updates = UpdateFigures(critic=critic)
    step = Step(TrainingBatch(0, [], BatchStatistics()), result(), updates, Times(), Totals(), 1.0)
    others = {"incarnation": 0, "given_back": GivenBack(), "generation_stall_s": 0.0, "transcripts_dropped_total": 0}
    others["shares"] = {}
    found, alone = (step_metrics(step, status_of(*n), PublishStats(), **others) for n in (nodes, []))
    assert (found.nodes_live, found.concurrency, found.episodes_running, found.preemptions_total) == (2, 16, 10, 4)
    assert UNSET not in msgspec.structs.astuple(found), "every metric is written"
    assert (found.kv_cache_usage, alone.kv_cache_usage, alone.nodes_live) == (0.75, 0.0, 0)


# ---------------------------------------------------------------- sums over tokens


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
    assert token_sums(MASK, DRIFT, corrected, None, flags(0, 0, 0, 0, 0))["vetoed"].item() == 0


def test_mismatch_is_told_apart_by_age() -> None:
    ages = [0, 0, 1, 2, 3, 4, 5, 8, 9, 500]
    drift = torch.arange(1.0, 11.0, dtype=torch.float64) * torch.tensor([1, -1] * 5)
    found = token_counts(torch.ones(10, dtype=torch.bool), drift, torch.tensor(ages, dtype=torch.int32))
    assert found["tokens_by_age"].tolist() == [2, 1, 1, 2, 2, 2]
    assert found["mismatch_by_age"].tolist() == [3, 3, 4, 11, 15, 19]
    unknown = token_counts(MASK, DRIFT, None)["tokens_by_age"]
    assert unknown.tolist() == [4, 0, 0, 0, 0, 0], "tokens without an age count as fresh"


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


def test_ratios_beyond_the_bins_are_counted_in_the_outermost_and_no_tokens_have_no_quantile() -> None:
    counts = token_counts(torch.ones(2, dtype=torch.bool), torch.tensor([80.0, -80.0]), None)["ratio_bins"]
    assert counts[0].item() == counts[-1].item() == 1
    assert ratio_quantile(counts.tolist(), 0.99) == pytest.approx(math.exp(20))
    assert ratio_quantile([0.0] * 241, 0.5) == ratio_quantile([], 0.5) == 0.0


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_gone_break_no_count(lost: float) -> None:
    """The loss says it; an index out of bounds would end the process, on a GPU for every later operation."""
    drift = torch.tensor([0.5, lost, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert token_counts(MASK, drift, None)["ratio_bins"].sum().item() == MASK.sum().item()


def test_figures_of_sources_are_means_of_their_samples_and_one_that_has_none_keeps_its_weight() -> None:
    found = source_figures({"a": SourceFigures(2, 8, 6, 4, rewards=5.0)}, {"a": 0.25, "b": 0.75})
    assert found == {
        "a/weight": 0.25, "a/groups": 2, "a/samples": 8, "a/reward_mean": 0.625, "a/success": 0.75,
        "a/truncated_fraction": 0.5, "b/weight": 0.75, "b/groups": 0, "b/samples": 0,
    }  # fmt: skip
    assert [name for name in found if name.startswith("a/")] == [f"a/{name}" for name in SOURCE_FIGURES]
