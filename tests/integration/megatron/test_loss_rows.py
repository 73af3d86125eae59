"""The output layer computes the places in the loss and no other, and every gradient is that of all logits.

Prompts are nine tenths of the documents. One pack trains nothing. Another one trains on one context rank only.
transformers computes all logits, one document at a time. A cut vocabulary has one layout without sequence parallelism
and one with it, among experts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from learner.backend_protocol import Microbatch
from learner.loss.losses import cross_entropy
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.device import LOOSE
from tests.rigs.forked_ranks import Outcome, group, same, worst
from tests.rigs.tiny_models import TEMPERATURE, hugging_face, microbatches, policy_loss, share

TP2, CP2, PP2 = {"tensor": 2}, {"context": 2}, {"pipeline": 2}
SPECS: list[dict[str, Any]] = [
    {"name": "one"},
    {"name": "dp2", "ranks": 2},
    {"name": "tp2", "parallel": TP2 | {"sequence": False}},
    # three packs, and a filler
    {"name": "vpp2-cp2", "kind": "tied-deep", "parallel": PP2 | CP2 | {"virtual_pipeline": 2}},
    {"name": "moe-tp2-sp-cp2-ep4", "kind": "moe", "parallel": TP2 | CP2 | {"expert": 4}},
]


def prompted() -> list[Microbatch]:
    """Four packs: the last tenth of a document trains. The third pack trains nothing, the last one its first one."""
    packs = []
    for batch in microbatches(0):
        place = torch.cat([torch.arange(n) for n in batch.document_lengths])
        length = torch.tensor(batch.document_lengths).repeat_interleave(torch.tensor(batch.document_lengths))
        packs.append(replace(batch, loss_mask=(place >= length - 1 - length // 10).float()))
    packs[2].loss_mask.zero_()
    packs[3].loss_mask[packs[3].document_lengths[0] :] = 0
    return packs


def trained(packs: list[Microbatch], spec: dict[str, Any]) -> list[Microbatch]:
    """Those of a step: with an odd number a virtual pipeline adds a filler, and the third one trains nothing anyway."""
    return [*packs[:2], packs[3]] if spec["name"] == "vpp2-cp2" else packs


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """Two losses of transformers and autograd over all logits."""
    model = tiny_models.save(tiny_models.new_model(spec["kind"]), folder / "models" / spec["kind"])
    packs = prompted()
    tokens = sum(pack.loss_mask.sum() for pack in packs)
    rows = [hugging_face(model, pack) for pack in packs]
    found = {f"logprobs.{i}": row.detach() * packs[i].loss_mask for i, (row, _) in enumerate(rows)}
    result = {"tokens": int(tokens)}
    for name, loss in (("policy", policy_loss), ("supervised", cross_entropy)):
        model.zero_grad()
        total = sum(loss(*row, pack).loss_sum for row, pack in zip(rows, packs, strict=True)) / tokens
        total.backward(retain_graph=True)
        result[name] = total.item()
        found |= {f"{name}.{n}": g for n, g in tiny_models.gradients_in_files(model).items()}
    forked_ranks.write(folder / "reference" / spec["kind"], 0, found, result)


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """The same under a layout, and how many places every call of the output layer got on this rank."""
    from learner.megatron import schedule
    from learner.megatron.parallel import mpu

    backend = tiny_models.backend(folder, spec)
    packs = prompted()
    mine = trained(share(backend, packs), spec)
    tensors: dict[str, torch.Tensor] = {}
    result: dict[str, Any] = {"tensor": mpu.get_tensor_model_parallel_rank(), "rows": {}}
    with patch.object(schedule, "logprobs_and_entropy", wraps=schedule.logprobs_and_entropy) as head:

        def places() -> list[int]:
            calls = [len(call.args[0]) for call in head.call_args_list]
            head.reset_mock()
            return calls

        for name, loss in (("policy", policy_loss), ("supervised", cross_entropy)):
            backend.optimizer.zero_grad()
            totals = backend.schedule.train(mine, loss, TEMPERATURE, entropy=name == "policy")
            tensors |= {f"{name}.{n}": t for n, t in tiny_models.gradients(backend).items()}
            result |= {name: totals.loss, "tokens": totals.loss_tokens}
            result["rows"][name] = places()
        frozen = backend.logprobs(share(backend, packs), TEMPERATURE)
        result["rows"]["frozen"] = places()
        reference = backend.reference_logprobs(share(backend, packs), TEMPERATURE)
        result["rows"]["reference"] = places()
    tensors |= tiny_models.numbered(backend, frozen, "logprobs")
    result["same"] = all(torch.equal(a, b) for a, b in zip(frozen, reference, strict=True))
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = [{"kind": kind} for kind in ("tied", "tied-deep", "moe")]
    groups = group(job_reference, kinds, shared=True), group(job_layout, SPECS, shared=True)
    return forked_ranks.run(tmp_path_factory, *groups)


def outcomes(folder: Path, spec: dict[str, Any]) -> tuple[Outcome, Outcome]:
    return Outcome(folder / spec["name"]), Outcome(folder / "reference" / spec.get("kind", "tied"))


@forked_ranks.named(SPECS)
def test_losses_and_every_gradient_are_those_of_all_logits(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcomes(folder, spec)
    for name in ("policy", "supervised"):
        for rank in found.ranks:
            assert rank["tokens"] == expected.ranks[0]["tokens"]
            assert rank[name] == pytest.approx(expected.ranks[0][name], rel=1e-5 * LOOSE)
        assert worst(found.section(name), expected.section(name)) < (1e-5 * LOOSE, "")


@forked_ranks.named(SPECS)
def test_frozen_and_reference_log_probabilities_are_exact_in_the_loss_and_zero_elsewhere(
    folder: Path, spec: dict[str, Any]
) -> None:
    found, expected = outcomes(folder, spec)
    same(found.section("logprobs"), expected.section("logprobs"), atol=2e-5 * LOOSE)
    assert all(rank["same"] for rank in found.ranks)


@forked_ranks.named(SPECS)
def test_the_output_layer_gets_the_places_in_the_loss_alone(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcomes(folder, spec)
    first = [rank["rows"] for rank in found.ranks if rank["tensor"] == 0]
    tensor = spec.get("parallel", {}).get("tensor", 1)
    for number in range(1, tensor):
        assert [rank["rows"] for rank in found.ranks if rank["tensor"] == number] == first
    for name in ("policy", "supervised", "frozen", "reference"):
        calls = [rows[name] for rows in first if rows[name]]  # the last stages'
        assert sum(map(sum, calls)) == expected.ranks[0]["tokens"], name
        assert any(0 in each for each in calls), "a pack without any place"
    if "context" in spec.get("parallel", {}):
        packs = zip(*(rows["policy"] for rows in first if rows["policy"]), strict=True)
        assert any(0 in counts and any(counts) for counts in packs), "a rank without a place of a pack that trains"


def test_prompts_are_nine_tenths() -> None:
    packs = prompted()
    assert sum(pack.loss_mask.sum() for pack in packs) < 0.11 * sum(len(pack.tokens) for pack in packs)
