"""A critic beside the policy, in every layout, against transformers and torch's AdamW. The policy stays as it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from learner.backend_protocol import Microbatch
from learner.loss.value_loss import value_loss
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.device import LOOSE
from tests.rigs.forked_ranks import Outcome, again, approximately, group, moved_alike, same, tried, worst
from tests.rigs.tiny_models import OPTIMIZER, STEPS, figures, logprobs, microbatches, numbered, share

CLIP = 0.3
LOSS = value_loss(CLIP)
STEPPED: dict[str, Any] = {"optimizer": msgspec.to_builtins(OPTIMIZER)}
LORA = {"rank": 4, "targets": ["linear_qkv"]}


def layout(name: str, kind: str = "tied", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "critic": STEPPED | {"path": f"{kind}-critic"}} | more


VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
OFFLOADED = {f"offload_{name}": True for name in ("optimizer", "gradients", "parameters")}
LAYOUTS = tried(
    [
        layout("one"),
        layout("dp2", ranks=2, memory=OFFLOADED),
        layout("tp2", parallel={"tensor": 2, "sequence": False}),
        layout("cp2", parallel={"context": 2}),
        layout("untied-tp2-sp", "untied-deep", parallel={"tensor": 2}),
        layout("untied-pp2", "untied-deep", parallel={"pipeline": 2}),
        layout("untied-vpp2", "untied-deep", parallel=VPP2, memory={"recompute": "full"}),
    ]
)
BF16 = layout("bf16", dtype="bfloat16")
ALONE = layout("alone") | {"critic": None}
FRESH = layout("fresh") | {"critic": STEPPED}
AGAIN = layout("again") | {"critic": {"path": "../saved/one"}}
SAVED_AT = 2
SAVE = tried(
    [
        layout("save-dp2", ranks=2, memory=OFFLOADED),
        layout("save-tp2", "untied-deep", parallel={"tensor": 2}),
        layout("save-lora", lora=LORA),
    ]
)
SAME = [spec | {"name": f"{spec['name']}-again", "checkpoint": spec["name"]} for spec in SAVE]
OTHER = [
    layout("tp2-to-vpp2", "untied-deep", parallel=VPP2) | {"checkpoint": "save-tp2"},
    layout("dp2-to-one") | {"checkpoint": "save-dp2"},
]
OTHER = [spec for spec in tried(OTHER) if spec["checkpoint"] in {saved["name"] for saved in SAVE}]
REFUSED = [
    ALONE | {"name": "refused-with", "checkpoint": "save-lora"},
    layout("refused-without") | {"checkpoint": "none"},
    layout("refused-shape") | {"critic": {"path": "untied-deep-critic"}},
]


def batches(step: int) -> list[Microbatch]:
    """The packs of a step, with returns and frozen values that are unlike each other."""
    return [replace(batch, returns=batch.advantages, values=batch.advantages.flip(0)) for batch in microbatches(step)]


def backend_of(folder: Path, spec: dict[str, Any]) -> Any:
    critic = spec["critic"]
    if critic and "path" in critic:
        critic = critic | {"path": str(folder / "models" / critic["path"])}
    return tiny_models.backend(folder, spec | {"critic": critic})


def valued(backend: Any, prefix: str) -> dict[str, Tensor]:
    """The values of all places of the packs of step 0, numbered."""
    everywhere = [replace(batch, loss_mask=torch.ones_like(batch.loss_mask)) for batch in microbatches(0)]
    return numbered(backend, backend.critic.values(share(backend, everywhere)), prefix)


def exported(model: Any, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor.float().clone() for name, tensor in model.export()}


def taught(backend: Any, step: int) -> list[float]:
    """[loss, gradient norm, learning rate, clipped tokens] of one step of the critic."""
    result = backend.critic.train_step(share(backend, batches(step)), LOSS)
    return [result.loss, result.grad_norm, result.lr, result.sums["value_clipped"]]


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    tiny_models.job_models(folder, spec)
    for kind in spec["kinds"]:
        tiny_models.save(tiny_models.new_critic(kind), folder / "models" / f"{kind}-critic")


def value_sum(model: Any, batch: Microbatch) -> Tensor:
    found = torch.cat([tiny_models.values(model, tokens) for tokens in batch.tokens.split(batch.document_lengths)])
    frozen, returns = batch.advantages.flip(0), batch.advantages
    bounded = torch.maximum(torch.minimum(found, frozen + CLIP), frozen - CLIP)
    return (0.5 * torch.maximum((found - returns) ** 2, (bounded - returns) ** 2) * batch.loss_mask).sum()


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """Values and gradients of the critic, and some steps, in plain transformers."""
    model = tiny_models.new_critic(spec["kind"])
    packs = microbatches(0)
    tensors = {f"before.{name}": weight for name, weight in tiny_models.in_files(model).items()}
    with torch.no_grad():
        for i, pack in enumerate(packs):
            rows = [tiny_models.values(model, tokens) for tokens in pack.tokens.split(pack.document_lengths)]
            tensors[f"values.{i}"] = torch.cat(rows)
    loss = sum(value_sum(model, pack) for pack in packs) / sum(pack.loss_mask.sum() for pack in packs)
    gradients, norm = tiny_models.backward(model, loss)
    model.zero_grad()
    tiny_models.adamw_steps(model, loss_sum=value_sum)
    tensors |= gradients | {f"trained.{name}": weight for name, weight in tiny_models.in_files(model).items()}
    forked_ranks.write(folder / f"reference-{spec['kind']}", 0, tensors, {"loss": loss.item(), "norm": norm})


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """Values, gradients and steps of the critic, the policy before and after them, and a step of the policy."""
    backend = backend_of(folder, spec)
    tensors = exported(backend, "policy-before") | logprobs(backend, "logprobs-before")
    steps: list[list[float]] = []
    if critic := backend.critic:
        tensors |= valued(backend, "values") | exported(critic, "start")
        with critic.offload.parameters(), critic.offload.gradients():
            critic.schedule.train(share(backend, batches(0)), LOSS, 1.0, entropy=False)
            gradients = tiny_models.gradients(critic)
        tensors |= {f"gradient.{name}": gradient for name, gradient in gradients.items()}
        steps = [taught(backend, number) for number in range(STEPS)]
        tensors |= valued(backend, "final") | exported(critic, "trained")
    tensors |= exported(backend, "policy-after") | logprobs(backend, "logprobs-after")
    result: dict[str, Any] = {"steps": steps}
    if spec["name"] in ("one", "alone"):
        result["policy"] = [figures(backend, number) for number in range(2)]
        tensors |= exported(backend, "policy-trained")
    if spec["name"] == "one":
        backend.critic.save_hf(folder / "saved" / "one")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_loaded(folder: Path, spec: dict[str, Any]) -> None:
    """Values of the exported critic by transformers."""
    model, said = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "saved" / "one", output_loading_info=True
    )
    tensors = {}
    with torch.no_grad():
        for i, pack in enumerate(microbatches(0)):
            rows = [tiny_models.values(model, tokens) for tokens in pack.tokens.split(pack.document_lengths)]
            tensors[f"values.{i}"] = torch.cat(rows)
    found = {"labels": model.config.num_labels, "missing": sorted(said["missing_keys"])}
    forked_ranks.write(folder / "loaded", 0, tensors, found)


def job_save(folder: Path, spec: dict[str, Any]) -> None:
    """Steps of both, a checkpoint, and the next step of both while it is written."""
    backend = backend_of(folder, spec)
    for number in range(SAVED_AT):
        taught(backend, number)
        figures(backend, number)
    tensors = valued(backend, "values") | logprobs(backend)
    backend.start_checkpoint(folder / "checkpoints" / spec["name"])
    result = {"after": taught(backend, SAVED_AT) + figures(backend, SAVED_AT)}
    backend.checkpoint_done(wait=True)
    tensors |= exported(backend.critic, "critic") | exported(backend, "policy")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    backend = backend_of(folder, spec | {"resumes": True})
    backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    tensors = valued(backend, "values") | logprobs(backend)
    result = {"after": taught(backend, SAVED_AT) + figures(backend, SAVED_AT)}
    tensors |= exported(backend.critic, "critic") | exported(backend, "policy")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_refused(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint with a critic for a learner without one, the reverse, and a critic of another shape."""
    if spec["name"] == "refused-shape":
        said = tiny_models.refusal(backend_of, folder, spec)
    else:
        backend = backend_of(folder, spec)
        said = tiny_models.refusal(backend.load_checkpoint, folder / "checkpoints" / spec["checkpoint"])
        if backend.critic is None:
            tiny_models.save_checkpoint(backend, folder / "checkpoints" / "none")
    forked_ranks.write(folder / spec["name"], 0, {}, {"said": said})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(job_models, [{"kinds": ["tied", "untied-deep"]}], shared=True),
        group(job_reference, [{"kind": "tied"}, {"kind": "untied-deep"}], shared=True),
        group(job_layout, [*LAYOUTS, BF16, ALONE], shared=True),
        group(job_loaded, [{}], shared=True),
        group(job_layout, [FRESH, AGAIN], shared=True),
        group(job_save, SAVE),
        group(job_resume, SAME),  # in new processes, which have nothing but the checkpoint
        group(job_resume, OTHER, shared=True),
        group(job_refused, REFUSED, shared=True),
    )


@forked_ranks.named(LAYOUTS)
def test_values_gradients_and_steps_equal_those_of_transformers(folder: Path, spec: dict[str, Any]) -> None:
    found, reference = Outcome(folder / spec["name"]), Outcome(folder / f"reference-{spec['kind']}")
    same(found.section("start"), reference.section("before"))
    same(found.section("values"), reference.section("values"), atol=5e-5 * LOOSE)
    error, name = worst(found.section("gradient"), reference.section("gradient"))
    assert error < min(1e-3 * LOOSE, 0.2), name
    tiny_models.check_update(reference.section("before"), found.section("trained"), reference.section("trained"))
    (expected,) = reference.ranks
    for rank in found.ranks:
        loss, norm, rate, clipped = rank["steps"][0]
        assert [loss, norm] == pytest.approx([expected["loss"], expected["norm"]], rel=1e-4 * LOOSE)
        assert rate == pytest.approx(OPTIMIZER.lr / 2), "its own schedule"
        assert 20 < clipped < 200, "the bound acts on some tokens"
    one = Outcome(folder / ("one" if spec["kind"] == "tied" else "untied-pp2")).ranks[0]["steps"]
    for rank in found.ranks:
        for step, alone in zip(rank["steps"], one, strict=True):
            assert step == pytest.approx(alone, rel=1e-4 * LOOSE)


@forked_ranks.named([*LAYOUTS, BF16])
def test_the_policy_is_bitwise_unchanged_by_steps_of_the_critic(folder: Path, spec: dict[str, Any]) -> None:
    found = Outcome(folder / spec["name"])
    for tensors in found.tensors_of:
        same(forked_ranks.section(tensors, "policy-after"), forked_ranks.section(tensors, "policy-before"))
        again(forked_ranks.section(tensors, "logprobs-after"), forked_ranks.section(tensors, "logprobs-before"))


def test_a_policy_trains_bitwise_as_it_does_without_a_critic(folder: Path) -> None:
    beside, alone = Outcome(folder / "one"), Outcome(folder / "alone")
    for mine, theirs in zip(beside.ranks[0]["policy"], alone.ranks[0]["policy"], strict=True):
        assert mine == approximately(theirs)
    before = alone.section("policy-before")
    moved_alike(before, beside.section("policy-trained"), alone.section("policy-trained"))


def test_a_critic_from_the_policy_begins_with_values_of_zero_and_learns(folder: Path) -> None:
    found = Outcome(folder / "fresh")
    assert all(not row.any() for row in found.section("values").values())
    start, policy = found.section("start"), found.section("policy-before")
    same({n: t for n, t in start.items() if n in policy}, {n: t for n, t in policy.items() if n in start})
    assert start.keys() - policy.keys() == {"score.weight"}
    gradients = found.section("gradient")
    assert [name for name, gradient in gradients.items() if gradient.any()] == ["score.weight"]
    assert all(row.any() for row in found.section("final").values())


def test_in_bfloat16_it_learns_the_same_roughly(folder: Path) -> None:
    found, exact = Outcome(folder / "bf16"), Outcome(folder / "one")
    for step, expected in zip(found.ranks[0]["steps"], exact.ranks[0]["steps"], strict=True):
        assert step[0] == pytest.approx(expected[0], rel=0.05)


def test_the_exported_critic_loads_in_transformers_and_here(folder: Path) -> None:
    final, loaded = Outcome(folder / "one").section("final"), Outcome(folder / "loaded")
    assert loaded.ranks == [{"labels": 1, "missing": []}]
    same(loaded.section("values"), final, atol=5e-5 * LOOSE)
    same(Outcome(folder / "again").section("values"), final, atol=5e-5 * LOOSE)
    told = json.loads((folder / "saved" / "one" / "config.json").read_text())
    assert told["architectures"] == ["Qwen3ForSequenceClassification"]


@forked_ranks.named(SAME)
def test_resuming_takes_bitwise_the_steps_of_the_run_that_went_on(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    for mine, theirs in zip(came_back.ranks, went_on.ranks, strict=True):
        assert mine["after"] == approximately(theirs["after"])
    for section in ("values", "logprobs"):
        again(came_back.section(section), went_on.section(section))
    for section, model in (("critic", f"{spec['kind']}-critic"), ("policy", spec["kind"])):
        before = load_file(folder / "models" / model / "model.safetensors")
        moved_alike(before, came_back.section(section), went_on.section(section))


@forked_ranks.named(OTHER)
def test_another_layout_goes_on_with_the_same_steps(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    assert came_back.ranks[0]["after"] == pytest.approx(went_on.ranks[0]["after"], rel=1e-4 * LOOSE)
    same(came_back.section("values"), went_on.section("values"), atol=5e-5 * LOOSE)
    before = load_file(folder / "models" / f"{spec['kind']}-critic" / "model.safetensors")
    moved_alike(before, came_back.section("critic"), went_on.section("critic"), atol=2e-5)


def test_a_checkpoint_of_another_kind_and_a_critic_of_another_shape_are_refused(folder: Path) -> None:
    said = {name: Outcome(folder / f"refused-{name}").ranks[0]["said"] for name in ("with", "without", "shape")}
    assert "learner.critic: expected a section, found unset" in said["with"]
    assert "learner.critic: expected unset, found a section" in said["without"]
    assert "learner.critic.path" in said["shape"] and "num_key_value_heads 4 instead of 2" in said["shape"]
