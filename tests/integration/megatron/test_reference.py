"""The frozen reference against Hugging Face while the policy trains, in every layout; the policy stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same
from tests.rigs.tiny_models import STEPS, TEMPERATURE, figures, microbatches, share

SPECS: list[dict[str, Any]] = [
    {"name": "other", "reference": "tied-other"},
    {"name": "itself"},  # model.path: the policy as it was before its first step
    {"name": "bf16", "reference": "tied-other", "dtype": "bfloat16"},
    {"name": "moe", "kind": "moe", "reference": "moe-other"},
    {"name": "dp2", "ranks": 2, "reference": "tied-other"},
    {
        **{"name": "vpp2", "kind": "tied-deep", "reference": "tied-deep-other"},
        "parallel": {"pipeline": 2, "virtual_pipeline": 2},
    },
    {"name": "ep2", "kind": "moe", "reference": "moe-other", "parallel": {"expert": 2}},
    {"name": "tp2-pp2", "reference": "tied-other", "parallel": {"tensor": 2, "pipeline": 2}},
]


@torch.no_grad()
def job_hugging_face(folder: Path, spec: dict[str, Any]) -> None:
    """A policy, another model of its shape, and what Hugging Face makes of both."""
    kind, tensors = spec["kind"], {}
    for name, seed in ((kind, 0), (f"{kind}-other", 7)):
        model = tiny_models.save(tiny_models.new_model(kind, seed), folder / "models" / name)
        for i, batch in enumerate(microbatches(0)):
            tensors[f"{name}.{i}"] = tiny_models.hugging_face(model, batch)[0] * batch.loss_mask
    forked_ranks.write(folder / f"hugging-face-{kind}", 0, tensors, {})


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """The reference's log-probabilities between steps of the policy, and what became of the policy's weights."""
    backend = tiny_models.backend(folder, spec)
    tensors: dict[str, torch.Tensor] = {}
    kept, steps = [], []
    for number in range(STEPS):
        before = everything(backend)
        rows = backend.reference_logprobs(share(backend, microbatches(0)), TEMPERATURE)
        tensors |= tiny_models.numbered(backend, rows, str(number))
        kept.append(all(torch.equal(a, b) for a, b in zip(before, everything(backend), strict=True)))
        steps.append(figures(backend, number))
    trained = backend.logprobs(share(backend, microbatches(0)), TEMPERATURE)
    tensors |= tiny_models.numbered(backend, trained, "policy")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, {"kept": kept, "steps": steps})


def job_others(folder: Path, spec: dict[str, Any]) -> None:
    """The same steps without a reference; a reference of another shape is refused when the backend is made."""
    from megatron.core import parallel_state

    backend = tiny_models.backend(folder, {})
    steps = [figures(backend, number) for number in range(STEPS)]
    parallel_state.destroy_model_parallel()
    said = tiny_models.refusal(tiny_models.backend, folder, {"reference": "moe"})
    forked_ranks.write(folder / spec["name"], 0, {}, {"steps": steps, "refused": said})


def everything(backend: Any) -> list[torch.Tensor]:
    """Copies of the parameters, the buffers and the optimizer's main parameters."""
    from learner.megatron.optimizer import gather_parameters

    gather_parameters(backend.chunks)  # otherwise the next forward pass does
    tensors = [t for chunk in backend.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    tensors += [parameter for parameter, _ in tiny_models.main_parameters(backend)]
    return [t.detach().clone() for t in tensors]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(job_hugging_face, [{"kind": kind} for kind in ("tied", "tied-deep", "moe")], shared=True),
        group(job_reference, SPECS, shared=True),
        group(job_others, [{"name": "others"}]),
    )


@forked_ranks.named(SPECS)
def test_the_reference_is_hugging_faces_before_and_after_steps_of_the_policy(
    folder: Path, spec: dict[str, Any]
) -> None:
    kind = spec.get("kind", "tied")
    expected = Outcome(folder / f"hugging-face-{kind}").section(spec.get("reference", kind))
    tolerance = 2e-5 if spec.get("dtype") is None else 0.3
    outcome = Outcome(folder / spec["name"])
    same(outcome.section("0"), expected, atol=tolerance)
    same(outcome.section("1"), outcome.section("0"))
    for rank in outcome.ranks:
        assert rank["kept"] == [True] * STEPS, "parameters, buffers and main parameters of the policy, to the bit"


def test_the_policy_trains_as_it_does_without_a_reference_and_away_from_it(folder: Path) -> None:
    assert Outcome(folder / "other").ranks[0]["steps"] == Outcome(folder / "others").ranks[0]["steps"]
    itself = Outcome(folder / "itself")
    assert (itself.section("policy")["0"] - itself.section("1")["0"]).abs().max() > 1e-3


def test_a_reference_of_another_shape_is_refused_and_named_before_the_first_step(folder: Path) -> None:
    said = Outcome(folder / "others").ranks[0]["refused"]
    assert "learner.loss.reference" in said and "models/moe " in said
