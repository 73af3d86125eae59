"""Supervised tuning on conversations equals plain Hugging Face cross-entropy on what the assistant says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.hub import load_tokenizer
from learner.batch.packing import build, plan
from learner.loss.losses import cross_entropy
from learner.sft.rows import SftDataset
from learner.sft.warm_start import Validation
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, worst

ROWS, PACK = 16, 128
LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "tied": ("tied", 1, {}),
    "tied-dp2": ("tied", 2, {}),
    "tied-pp2": ("tied", 2, {"pipeline": 2}),
    "tied-cp2": ("tied", 2, {"context": 2}),
    "moe-tp2-ep2": ("moe", 2, {"tensor": 2, "expert": 2}),
}


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """transformers' own chat tokens, assistant masks and cross-entropy, one conversation at a time."""
    kind = spec["kind"]
    model = tiny_models.write_chat_model(folder / "models" / kind, kind)
    tokenizer = load_tokenizer(folder / "models" / kind)
    tokenizer.chat_template = tiny_models.MARKED  # marks of the template, where the product derives the mask
    total, count, rows = torch.zeros(()), 0, []
    for talk in tiny_models.conversations(ROWS):
        options = dict(return_dict=True, return_assistant_tokens_mask=True)
        found = tokenizer.apply_chat_template(talk, **options)
        ids = torch.tensor([found["input_ids"]])
        labels = torch.where(torch.tensor([found["assistant_masks"]]) > 0, ids, -100)
        trained = int((labels[:, 1:] >= 0).sum())
        summed = model(input_ids=ids, labels=labels).loss * trained
        total, count, rows = total + summed, count + trained, [*rows, (summed.item(), trained)]
    loss = total / count
    loss.backward()
    result = {"loss": loss.item(), "tokens": count, "rows": rows}
    forked_ranks.write(folder / "reference" / kind, 0, tiny_models.gradients_in_files(model), result)


def job_sft(folder: Path, spec: dict[str, Any]) -> None:
    """The same conversations through dataset, packing and Megatron, under one layout."""
    rows = folder / "rows.jsonl"
    tiny_models.write_conversations(rows, ROWS)
    backend = tiny_models.backend(folder, spec)
    dataset = SftDataset(rows, load_tokenizer(folder / "models" / spec["kind"]), seed=3, shuffle=True)
    documents = dataset.step(0, ROWS)
    plans = plan(documents, backend.data_parallel_size, PACK, backend.document_multiple)
    packed = build(documents, plans[backend.data_parallel_rank])
    split = SftDataset(rows, load_tokenizer(folder / "models" / spec["kind"]), seed=3, shuffle=True, held_out=0.4)
    validation = Validation(backend, split.documents(split.held_out_rows), PACK)
    backend.optimizer.zero_grad()
    held_out = {"held_out": split.held_out_rows, "validation": validation.loss()}
    totals = backend.schedule.train(packed, cross_entropy, 1.0, entropy=False)
    result = {
        "loss": totals.loss,
        "tokens": totals.loss_tokens,
        "packs": len(packed),
    } | held_out
    forked_ranks.write(folder / spec["name"], backend.rank, tiny_models.gradients(backend), result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    specs = [{"name": n, "kind": k, "ranks": ranks, "parallel": p} for n, (k, ranks, p) in LAYOUTS.items()]
    references = group(job_reference, [{"kind": "tied"}, {"kind": "moe"}])
    return forked_ranks.run(tmp_path_factory, references, group(job_sft, specs, shared=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_hugging_face_on_the_same_masked_rows(folder: Path, name: str) -> None:
    found, reference = Outcome(folder / name), Outcome(folder / "reference" / LAYOUTS[name][0])
    (expected,) = reference.ranks
    for rank in found.ranks:
        assert rank["tokens"] == expected["tokens"]
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert rank["packs"] > 1, "several microbatches, each of several conversations"
    assert worst(found.tensors, reference.tensors) < (1e-5, "")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loss_of_held_out_rows_is_that_of_hugging_face_on_every_rank_and_leaves_no_gradient(
    folder: Path, name: str
) -> None:
    """The test above has the gradients of the step that follows it."""
    found, (expected,) = Outcome(folder / name), Outcome(folder / "reference" / LAYOUTS[name][0]).ranks
    for rank in found.ranks:
        assert 4 <= len(rank["held_out"]) < ROWS
        rows = [expected["rows"][row] for row in rank["held_out"]]
        mean = sum(loss for loss, _ in rows) / sum(tokens for _, tokens in rows)
        assert rank["validation"] == pytest.approx(mean, rel=1e-5)
        assert rank["validation"] == found.ranks[0]["validation"]
        assert rank["validation"] != pytest.approx(expected["loss"], rel=1e-3), "other rows have another loss"
