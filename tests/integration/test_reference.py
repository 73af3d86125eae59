"""The frozen reference against Hugging Face while the policy trains, in every layout; the policy stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import fork_rig
from tests.integration.fork_rig import Outcome, group

ONE = [
    {"name": "other", "reference": "tied-other"},
    {"name": "itself"},  # model.path: the policy as it was before its first step
    {"name": "bf16", "reference": "tied-other", "dtype": "bfloat16"},
    {"name": "moe", "kind": "moe", "reference": "moe-other"},
]
TWO = [
    {"name": "tp2", "reference": "tied-other", "parallel": {"tensor": 2}},
    {"name": "dp2", "reference": "tied-other"},
    {"name": "vpp2", "reference": "tied-other", "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    {"name": "ep2", "kind": "moe", "reference": "moe-other", "parallel": {"expert": 2}},
]
FOUR = [{"name": "tp2-pp2", "parallel": {"tensor": 2, "pipeline": 2}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reference")
    worlds = [
        group(1, "models", [{"kind": "tied"}, {"kind": "moe"}]),
        group(1, "reference", ONE),
        group(2, "reference", TWO),
        group(4, "reference", FOUR),
        group(1, "plain", [{"name": "plain"}]),
        group(1, "refused", [{"name": "refused", "reference": "moe"}]),
    ]
    fork_rig.run("reference_workers", place, worlds)
    return place


def named(specs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[s["name"] for s in specs])


@named(ONE + TWO + FOUR)
def test_the_reference_is_hugging_faces_before_and_after_steps_of_the_policy(
    folder: Path, spec: dict[str, Any]
) -> None:
    kind = spec.get("kind", "tied")
    expected = Outcome(folder / f"hugging-face-{kind}").section(spec.get("reference", kind))
    tolerance = 2e-5 if spec.get("dtype") is None else 0.3
    for number in range(3):
        found = Outcome(folder / spec["name"]).section(str(number))
        assert found.keys() == expected.keys()
        for name, logprobs in expected.items():
            torch.testing.assert_close(found[name], logprobs, rtol=0, atol=tolerance)
            assert torch.equal(found[name], Outcome(folder / spec["name"]).section("0")[name])


@named(ONE + TWO + FOUR)
def test_parameters_buffers_and_main_parameters_are_bitwise_as_before(folder: Path, spec: dict[str, Any]) -> None:
    assert [rank["same"] for rank in Outcome(folder / spec["name"]).ranks] == [[True] * 3] * len(
        Outcome(folder / spec["name"]).ranks
    )


def test_the_policy_trains_as_it_does_without_a_reference(folder: Path) -> None:
    assert Outcome(folder / "other").ranks[0]["steps"] == Outcome(folder / "plain").ranks[0]["steps"]


def test_the_policy_moves_away_from_itself_as_the_reference(folder: Path) -> None:
    outcome = Outcome(folder / "itself")
    assert (outcome.section("policy")["0"] - outcome.section("2")["0"]).abs().max() > 1e-3


def test_a_reference_of_another_shape_is_refused_and_named_before_the_first_step(folder: Path) -> None:
    rank = Outcome(folder / "refused").ranks[0]
    assert "learner.loss.reference" in rank["message"] and "models/moe is not a model of the" in rank["message"]
