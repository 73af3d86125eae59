"""Mixture of experts in real Megatron against plain transformers: frozen routers, balancing, at every layout.

The reference is plain transformers: hooks on its gates read the routing, or force the experts of a recorded one.
They also add the balancing loss, which autograd then differentiates.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.backend_protocol import LossOutput, Microbatch
from learner.certificate.reference import balance_loss, forced, gates, watched
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, relative, same, worst
from tests.rigs.tiny_models import STEPS, TEMPERATURE, exported, hugging_face, microbatches, policy_loss

EXPERTS = 8
RATE = 0.3  # either balance has it; large, so that an error shows in every gradient
AUXILIARY, REPLAYED = {"balance": "aux_loss", "balance_rate": RATE}, {"replay_routing": True}
AGAIN = {"memory": {"recompute": "full"}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "glm", "moe": {}, "steps": STEPS},
    "frozen": {"kind": "moe", "moe": {"freeze_router": True}, "steps": STEPS},
    "balanced": {"kind": "moe", "moe": AUXILIARY},
    "by-document": {"kind": "moe", "moe": AUXILIARY, "loss": "documents"},
    "biased": {"kind": "glm-deep", "moe": {"balance": "bias", "balance_rate": RATE}},
    "replayed": {"kind": "moe", "moe": REPLAYED},
    "replayed-normed": {"kind": "normed", "moe": REPLAYED},
    "replayed-biased": {"kind": "glm-deep", "moe": REPLAYED},
    "replayed-again": {"kind": "moe-deep", "moe": REPLAYED, **AGAIN},
    "balanced-again": {"kind": "moe-deep", "moe": AUXILIARY, **AGAIN},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"expert": 2}),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "cp2-tp2": (4, {"context": 2, "tensor": 2}),
}
# A layout of two kinds of parallelism proves both of them, so neither is tried alone. Context parallelism changes
# balancing in "by-document", and replay in "replayed-biased".
KEPT = ("one", "dp2", "tp2-pp2-ep2")
PAIRS = [
    *[("frozen", layout) for layout in ("one", "tp2-ep2")],
    *[(case, layout) for case in ("balanced", "replayed") for layout in KEPT],
    *[("biased", layout) for layout in ("one", "dp2", "ep2", "pp2", "cp2-tp2")],
    *[("plain", "ep2"), ("by-document", "dp2"), ("by-document", "cp2-tp2")],
    *[("replayed-normed", "ep2"), ("replayed-biased", "pp2"), ("replayed-biased", "cp2-tp2")],
    *[("replayed-again", "vpp2"), ("replayed-again", "cp2-tp2"), ("balanced-again", "vpp2")],
]


def pairs(*cases: str) -> Any:
    return pytest.mark.parametrize(("case", "layout"), [pair for pair in PAIRS if not cases or pair[0] in cases])


def by_document(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """The policy loss, divided by documents instead of tokens."""
    output = policy_loss(logprobs, entropy, batch)
    return replace(output, denominator=torch.tensor(float(len(batch.document_lengths))))


LOSSES = {"tokens": policy_loss, "documents": by_document}


def chosen_of(seen: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    """[T, MoE layers, CHOSEN] experts of what was watched."""
    return torch.stack([torch.cat([chosen for _, chosen in calls]) for calls in seen], 1)


@torch.no_grad()
def perturbed_routing(kind: str) -> list[Tensor]:
    """Per microbatch of step 0 the [T, MoE layers, CHOSEN] int16 experts of a model a little off; a fifth unknown."""
    model = tiny_models.new_model(kind)
    random = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=random) * 0.03)
    out = []
    for batch in microbatches(0):
        with watched(model) as seen:
            hugging_face(model, batch)
        routing = chosen_of(seen).to(torch.int16)
        out.append(routing.masked_fill((torch.rand(len(routing), generator=random) < 0.2)[:, None, None], -1))
    return out


def own_routing(model: Any, batch: Microbatch, routing: Tensor) -> Tensor:
    """[T, MoE layers, CHOSEN] experts that `model` would choose with `routing` forced in all layers before."""
    with watched(model) as seen, forced(model, routing), torch.no_grad():  # hooks see the gate's own choice first
        hugging_face(model, batch)
    return chosen_of(seen)


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """The results of autograd for the first step's loss, balance included, and of the bias; then steps with AdamW."""
    kind, case = spec["kind"], spec["moe"]
    model = tiny_models.save(tiny_models.new_model(kind), folder / "models" / kind)
    for gate in gates(model).values() if case.get("freeze_router") else []:
        gate.requires_grad_(False)
    batches, tensors = microbatches(0), {}
    places = sum(len(batch.tokens) for batch in batches)
    loss, divisor, balance = torch.zeros(()), 0.0, torch.zeros(())
    counts = torch.zeros(len(gates(model)), EXPERTS)
    routing = perturbed_routing(kind) if case.get("replay_routing") else []
    save_file({str(i): experts for i, experts in enumerate(routing)}, folder / f"routing-{spec['name']}.safetensors")
    changed = known = 0
    for i, batch in enumerate(batches):
        if routing:
            own, given = own_routing(model, batch, routing[i]), routing[i].long()
            changed += int(((own.sort(2).values != given.sort(2).values).any(2) & (given >= 0).all(2)).sum())
            known += int((given >= 0).all(2).sum())
        with watched(model) as seen, forced(model, routing[i]) if routing else nullcontext():
            logprobs, entropy = hugging_face(model, batch)
        output = LOSSES[spec.get("loss", "tokens")](logprobs, entropy, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach() * batch.loss_mask
        loss = loss + output.loss_sum
        divisor += batch.loss_mask.sum() if output.denominator is None else output.denominator
        balance = balance + sum(balance_loss(calls) for calls in seen) * len(batch.tokens) / places
        for layer, calls in enumerate(seen):
            counts[layer] += torch.nn.functional.one_hot(torch.cat([c for _, c in calls]), EXPERTS).sum((0, 1))
    total = loss / divisor
    if case.get("balance") == "aux_loss":
        total = total + RATE * balance
    gradients, norm = tiny_models.backward(model, total)
    tensors |= gradients
    for (name, gate), count in zip(gates(model).items(), counts, strict=True):
        if hasattr(gate, "e_score_correction_bias"):
            bias = gate.e_score_correction_bias
            tensors[f"bias.{name}.e_score_correction_bias"] = bias + RATE * torch.sign(count.mean() - count)
    if case.get("freeze_router"):
        tiny_models.adamw_steps(model)
        tensors |= {f"trained.{n}": w for n, w in tiny_models.in_files(model).items()}
    forked_ranks.write(folder / "reference" / spec["name"], 0, tensors, {"routing": [changed, known], "norm": norm})


def job_experts(folder: Path, spec: dict[str, Any]) -> None:
    """One layout of one case: log-probabilities, then steps with the gradients and norm of the first one."""
    backend, loss = tiny_models.backend(folder, spec), LOSSES[spec.get("loss", "tokens")]
    replay = spec["moe"].get("replay_routing")

    batches = [microbatches(step) for step in range(spec.get("steps", 1))]
    if replay:
        routing = load_file(folder / f"routing-{spec['case']}.safetensors")
        batches[0] = [replace(b, routed_experts=routing[str(i)]) for i, b in enumerate(batches[0])]
    first, *others = [tiny_models.share(backend, step) for step in batches]
    weights = "steps" in spec or spec["moe"].get("balance") == "bias"
    tensors = exported(backend, "weight") if weights else {}
    tensors |= tiny_models.numbered(backend, backend.logprobs(first, TEMPERATURE), "logprobs")
    if spec["moe"].get("balance") == "bias":  # an update that is refused leaves every weight and bias as it was
        backend.train_step(first, loss, TEMPERATURE, entropy=True, accept=lambda result: False)
    step, gradients = tiny_models.step_and_gradients(backend, first, loss)
    tensors |= gradients
    for packs in others:
        backend.train_step(packs, loss, TEMPERATURE, entropy=True)
    tensors |= exported(backend, "trained") if weights else {}
    replayed = [step.sums[name] for name in ("routing_changed", "routing_replayed")] if replay else []
    result = {"norm": step.grad_norm, "routing": replayed}
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of transformers and of every layout for every case."""
    specs = [
        {"name": f"{case}-{layout}", "case": case, **CASES[case], "ranks": ranks, "parallel": parallel}
        for case, layout in PAIRS
        for ranks, parallel in [LAYOUTS[layout]]
    ]
    references = [{"name": name, "ranks": 1, **case} for name, case in CASES.items()]
    groups = group(job_reference, references, shared=True), group(job_experts, specs, shared=True)
    return forked_ranks.run(tmp_path_factory, *groups)


def outcomes(folder: Path, case: str, layout: str) -> tuple[Outcome, Outcome]:
    """A case under a layout, and its reference."""
    return Outcome(folder / f"{case}-{layout}"), Outcome(folder / "reference" / case)


@pairs()
def test_logprobs_and_every_gradient_equal_hugging_face(folder: Path, case: str, layout: str) -> None:
    found, expected = outcomes(folder, case, layout)
    same(found.section("logprobs"), expected.section("logprobs"), atol=3e-5)
    gradients, references = found.section("gradient"), expected.section("gradient")
    assert gradients.keys() == references.keys()
    assert worst(gradients, references) < (1e-5, "")
    for rank in found.ranks:
        assert rank["norm"] == pytest.approx(expected.ranks[0]["norm"], rel=1e-5)


@pairs("frozen")
def test_a_frozen_router_stays_bitwise_and_the_rest_trains_as_with_frozen_gates(
    folder: Path, case: str, layout: str
) -> None:
    found, expected = outcomes(folder, case, layout)
    before, after = found.section("weight"), found.section("trained")
    routers = {name: tensor for name, tensor in before.items() if ".gate.weight" in name}
    assert len(routers) == 2 and not [name for name in routers if f"gradient.{name}" in found.tensors]
    source = load_file(folder / "models" / "moe" / "model.safetensors")
    same(routers, {name: source[name] for name in routers})
    same({name: after[name] for name in routers}, routers)
    tiny_models.check_update(before, after, expected.section("trained"))


@pytest.mark.parametrize("case", ["balanced", "replayed"])
def test_balance_and_replay_change_gradients_enough_to_be_missed(folder: Path, case: str) -> None:
    changed, free = (Outcome(folder / "reference" / name).section("gradient") for name in (case, "frozen"))
    name = "model.layers.0.mlp.experts.0.up_proj.weight"  # "frozen" has the same loss, its own routing and no balance
    assert relative(changed[name], free[name]) > 1e-2


@pairs("replayed", "replayed-normed", "replayed-biased", "replayed-again")
def test_replayed_tokens_are_counted_and_so_are_those_sent_elsewhere(folder: Path, case: str, layout: str) -> None:
    found, expected = outcomes(folder, case, layout)
    changed, known = expected.ranks[0]["routing"]
    assert 0.02 * known < changed < 0.9 * known
    assert [rank["routing"] for rank in found.ranks] == [[changed, known]] * len(found.ranks)


@pairs("biased")
def test_the_bias_moves_against_the_load_of_the_whole_batch(folder: Path, case: str, layout: str) -> None:
    found, expected = outcomes(folder, case, layout)
    biases = expected.section("bias")
    assert len(biases) == 3
    trained = found.section("trained")
    same({name: trained[name] for name in biases}, biases, atol=1e-7)
    assert not [name for name, bias in biases.items() if torch.equal(bias, found.tensors[f"weight.{name}"])]


@pairs("plain")
def test_a_loaded_bias_stays_as_it_is_unless_balancing_is_asked_for(folder: Path, case: str, layout: str) -> None:
    found, _ = outcomes(folder, case, layout)
    biases = {name: bias for name, bias in found.section("trained").items() if name.endswith("correction_bias")}
    same(biases, {name: found.section("weight")[name] for name in biases})
