"""The policy losses through real Megatron, under several layouts, against transformers and one microbatch of all.

Sequence ratios, masks, denominators that are not loss tokens and histograms must not depend on who computed what.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import fork_rig
from tests.integration.fork_rig import Outcome, group
from tests.integration.policy_loss_workers import LOSSES

ONE = [{"name": "one"}]
TWO = [
    {"name": "dp2"},
    {"name": "tp2", "parallel": {"tensor": 2}},
    {"name": "pp2", "parallel": {"pipeline": 2}},
    {"name": "cp2", "parallel": {"context": 2}},
    # a filler joins the last round
    {"name": "vpp2", "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "uneven": True},
]
NAMES = [spec["name"] for spec in ONE + TWO]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("losses")
    (place / "models").mkdir()
    worlds = [
        group(1, "reference", [{}]),
        group(1, "layout", ONE),
        group(1, "spoiled", [{"name": "spoiled"}]),
        group(2, "layout", TWO),
    ]
    fork_rig.run("policy_loss_workers", place, worlds)
    return place


def outcomes(folder: Path, layout: str, loss: str) -> tuple[Outcome, Outcome]:
    return Outcome(folder / layout / loss), Outcome(folder / "reference" / loss)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_gradient_is_that_of_the_global_batch(folder: Path, layout: str, loss: str) -> None:
    found, expected = (outcome.section("gradient") for outcome in outcomes(folder, layout, loss))
    assert set(expected) <= set(found)
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() / wanted.norm() < 1e-5, name


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_rank_reports_the_figures_of_the_global_batch(folder: Path, layout: str, loss: str) -> None:
    found, reference = outcomes(folder, layout, loss)
    expected: dict[str, Any] = reference.ranks[0]
    assert len(found.ranks) == (1 if layout == "one" else 2)
    for rank in found.ranks:
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert rank["maxima"] == pytest.approx(expected["maxima"], rel=1e-5)
        assert rank["sums"].keys() == expected["sums"].keys()
        for name, wanted in expected["sums"].items():
            values, sums = (torch.tensor(x, dtype=torch.float64).reshape(-1) for x in (rank["sums"][name], wanted))
            edge = 2 if name == "ratio_bins" else 0  # a token at the edge of a bin
            assert (values - sums).abs().sum() <= 1e-5 * sums.abs().sum() + edge, name
            assert values.sum().item() == pytest.approx(sums.sum().item(), rel=1e-5)


def test_the_losses_make_use_of_their_masks_and_bounds(folder: Path) -> None:
    """Else the comparisons above would prove little."""
    sums = {loss: Outcome(folder / "reference" / loss).ranks[0]["sums"] for loss in LOSSES}
    tokens = Outcome(folder / "one" / "gspo").ranks[0]["tokens"]
    assert 0 < sums["gspo"]["correction_masked"] < tokens
    assert sums["gspo"]["objective_clipped"] > 0
    assert 0 < sums["ppo_clip"]["correction_masked"] < tokens
    assert 0 < sums["ppo_clip"]["vetoed"] < tokens
    assert 0 < sums["dppo_tv"]["objective_clipped"] < tokens
    assert sums["dppo_tv"]["weight"] != pytest.approx(tokens, rel=1e-3)


def test_a_step_whose_log_probabilities_are_gone_says_so(folder: Path) -> None:
    said = Outcome(folder / "spoiled").ranks[0]["said"]
    assert said == "SlipstreamError: gradient norm is nan in optimizer step 0; the weights are unchanged"
