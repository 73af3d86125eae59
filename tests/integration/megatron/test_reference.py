"""The frozen reference against Hugging Face while the policy trains, in every layout; the policy stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UsageError
from tests.integration.megatron import fork_rig, tiny_models
from tests.integration.megatron.fork_rig import Outcome, group
from tests.integration.megatron.tiny_models import TEMPERATURE, figures, microbatches, share

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


@torch.no_grad()
def job_hugging_face(folder: Path, spec: dict[str, Any]) -> None:
    """A policy, another model of its shape, and what Hugging Face makes of both."""
    kind, tensors = spec["kind"], {}
    for name, seed in ((kind, 0), (f"{kind}-other", 7)):
        model = tiny_models.save(tiny_models.new_model(kind, seed), folder / "models" / name)
        for i, batch in enumerate(microbatches(0)):
            tensors[f"{name}.{i}"] = tiny_models.hugging_face(model, batch)[0]
    fork_rig.write(folder / f"hugging-face-{kind}", 0, tensors, {})


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """The reference's log-probabilities between steps of the policy, and what became of the policy's weights."""
    backend = tiny_models.backend(folder, spec)
    tensors: dict[str, torch.Tensor] = {}
    same, steps = [], []
    for number in range(3):
        before = everything(backend)
        rows = backend.reference_logprobs(share(backend, microbatches(0)), TEMPERATURE)
        tensors |= tiny_models.numbered(backend, rows, str(number))
        same.append(all(torch.equal(a, b) for a, b in zip(before, everything(backend), strict=True)))
        steps.append(figures(backend, number))
    tensors |= tiny_models.logprobs(backend, "policy")
    fork_rig.write(folder / spec["name"], backend.rank, tensors, {"same": same, "steps": steps})


def job_plain(folder: Path, spec: dict[str, Any]) -> None:
    """The same steps without a reference."""
    backend = tiny_models.backend(folder, spec)
    steps = [figures(backend, number) for number in range(3)]
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"steps": steps})


def job_refused(folder: Path, spec: dict[str, Any]) -> None:
    """A reference of another shape, when the backend is made: before anything was sampled."""
    message = ""
    try:
        tiny_models.backend(folder, spec)
    except UsageError as error:
        message = str(error)
    fork_rig.write(folder / spec["name"], 0, {}, {"message": message})


def everything(backend: Any) -> list[torch.Tensor]:
    """Copies of the parameters, the buffers and the optimizer's main parameters."""
    tensors = [t for chunk in backend.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    tensors += [parameter for parameter, _ in tiny_models.main_parameters(backend)]
    return [t.detach().clone() for t in tensors]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork_rig.run(
        tmp_path_factory,
        group(1, job_hugging_face, [{"kind": "tied"}, {"kind": "moe"}]),
        group(1, job_reference, ONE),
        group(2, job_reference, TWO),
        group(4, job_reference, FOUR),
        group(1, job_plain, [{"name": "plain"}]),
        group(1, job_refused, [{"name": "refused", "reference": "moe"}]),
    )


@fork_rig.named(ONE + TWO + FOUR)
def test_the_reference_is_hugging_faces_before_and_after_steps_of_the_policy(
    folder: Path, spec: dict[str, Any]
) -> None:
    kind = spec.get("kind", "tied")
    expected = Outcome(folder / f"hugging-face-{kind}").section(spec.get("reference", kind))
    tolerance = 2e-5 if spec.get("dtype") is None else 0.3
    outcome = Outcome(folder / spec["name"])
    for number in range(3):
        found = outcome.section(str(number))
        assert found.keys() == expected.keys()
        for name, logprobs in expected.items():
            torch.testing.assert_close(found[name], logprobs, rtol=0, atol=tolerance)
            assert torch.equal(found[name], outcome.section("0")[name])


@fork_rig.named(ONE + TWO + FOUR)
def test_parameters_buffers_and_main_parameters_are_bitwise_as_before(folder: Path, spec: dict[str, Any]) -> None:
    for rank in Outcome(folder / spec["name"]).ranks:
        assert rank["same"] == [True] * 3


def test_the_policy_trains_as_it_does_without_a_reference(folder: Path) -> None:
    assert Outcome(folder / "other").ranks[0]["steps"] == Outcome(folder / "plain").ranks[0]["steps"]


def test_the_policy_moves_away_from_itself_as_the_reference(folder: Path) -> None:
    outcome = Outcome(folder / "itself")
    assert (outcome.section("policy")["0"] - outcome.section("2")["0"]).abs().max() > 1e-3


def test_a_reference_of_another_shape_is_refused_and_named_before_the_first_step(folder: Path) -> None:
    rank = Outcome(folder / "refused").ranks[0]
    assert "learner.loss.reference" in rank["message"] and "models/moe is not a model of the" in rank["message"]
