"""The ranks behind test_sft_parity.py: one supervised step on conversations, plain Hugging Face against Megatron."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.config.schema import ModelConfig, ParallelConfig, SftLearnerConfig
from learner.batch.packing import microbatches_for
from learner.loss.losses import cross_entropy
from learner.sft.rows import SftDataset, load_tokenizer
from tests.integration import fork_rig, sft_assets
from tests.integration import megatron_workers as rig

ROWS, PACK = 16, 128


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """transformers' own chat tokens, assistant masks and cross-entropy, one conversation at a time."""
    kind = spec["kind"]
    model = sft_assets.build(folder / "models" / kind, kind)
    tokenizer = load_tokenizer(folder / "models" / kind)
    tokenizer.chat_template = sft_assets.MARKED  # marks of the template, where the product derives the mask
    total, count = torch.zeros(()), 0
    for talk in sft_assets.conversations(ROWS):
        options = dict(return_dict=True, return_assistant_tokens_mask=True)
        found = tokenizer.apply_chat_template(talk, **options)
        ids = torch.tensor([found["input_ids"]])
        labels = torch.where(torch.tensor([found["assistant_masks"]]) > 0, ids, -100)
        trained = int((labels[:, 1:] >= 0).sum())
        total = total + model(input_ids=ids, labels=labels).loss * trained
        count += trained
    loss = total / count
    loss.backward()
    gradients = rig._unfused({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    save_file({n: g.contiguous().clone() for n, g in gradients.items()}, folder / f"gradients-{kind}.safetensors")
    fork_rig.write(folder / f"reference-{kind}", 0, {}, {"loss": loss.item(), "tokens": count})


def job_sft(folder: Path, spec: dict[str, Any]) -> None:
    """The same conversations through dataset, packing and Megatron, under one layout."""
    from learner.megatron.backend import MegatronBackend

    path, parallel = folder / "models" / spec["kind"], ParallelConfig(**spec["parallel"])
    rows = folder / "rows.jsonl"
    dataset = SftDataset(rows, load_tokenizer(path), seed=3, shuffle=True)
    learner = SftLearnerConfig(parallel=parallel, optimizer=rig.OPTIMIZER)
    backend = MegatronBackend(ModelConfig(path=str(path), dtype="float32"), learner, total_steps=10)
    rank, ranks = backend.data_parallel_rank, backend.data_parallel_size
    packed = microbatches_for(dataset.step(0, ROWS), rank, ranks, PACK, multiple=backend.document_multiple)
    backend.optimizer.zero_grad()
    totals = backend.schedule.train(packed, cross_entropy, 1.0, entropy=False)
    result = {"loss": totals.loss_sum / totals.denominator, "tokens": totals.loss_tokens, "packs": len(packed)}
    fork_rig.write(folder / spec["name"], backend.rank, rig._gradients(backend), result)


JOBS = {"reference": job_reference, "sft": job_sft}
