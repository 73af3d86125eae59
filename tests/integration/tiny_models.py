"""Tiny Hugging Face models, packed documents and a backend for the multi-rank tests of memory and checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch

from common.config.schema import LearnerConfig, LossConfig, MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from learner.backend_protocol import LossOutput, Microbatch

VOCABULARY = 128
TEMPERATURE = 0.7
# eps: with 1e-8 Adam makes whole steps of the rounding of gradients that are nearly zero
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, warmup_steps=2, schedule="cosine", weight_decay=0.01, grad_clip=1.0)


def make(path: Path, kind: str, seed: int = 0) -> Any:
    """Write the model of `kind` with weights from `seed`; norms are not all ones. Returns it, in float32."""
    import transformers

    torch.manual_seed(seed)
    base: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    base |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
    base |= dict(head_dim=16, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    base |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="sdpa")
    if kind == "wide":
        base |= dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, initializer_range=0.02)
    if kind == "served":
        base |= dict(head_dim=32)  # vLLM has no smaller heads on a CPU
    if kind == "moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**base, **experts))
    else:
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**base, tie_word_embeddings=kind in ("tied", "served"))
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.float()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps({"of": kind}))
    return model


def microbatches(step: int) -> list[Microbatch]:
    """Four packs of documents; never token 0, whose gradient Hugging Face zeroes as padding."""
    random = torch.Generator().manual_seed(100 + step)
    packs = []
    for lengths in ((24, 3, 17), (1, 33, 5), (29,), (8, 8, 11, 2)):
        total = sum(lengths)
        documents = [torch.randint(3, VOCABULARY, (n + 1,), generator=random) for n in lengths]
        packs.append(
            Microbatch(
                tokens=torch.cat([d[:-1] for d in documents]),
                targets=torch.cat([d[1:] for d in documents]),
                positions=torch.cat([torch.arange(n) for n in lengths]),
                document_lengths=lengths,
                loss_mask=(torch.rand(total, generator=random) > 0.3).float(),
                advantages=torch.randn(total, generator=random),
                behavior_logprobs=torch.zeros(total),
            )
        )
    return packs


def share(backend: Any, step: int) -> list[Microbatch]:
    """This data-parallel rank's packs."""
    return microbatches(step)[backend.data_parallel_rank :: backend.data_parallel_size]


def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor | None, batch: Microbatch) -> LossOutput:
    """A policy gradient with an entropy bonus: both outputs of the backend get a gradient."""
    assert entropy is not None
    terms = -(logprobs * batch.advantages) - 0.05 * entropy
    return LossOutput((terms * batch.loss_mask).sum(), {"entropy": (entropy.detach() * batch.loss_mask).sum()})


def step(backend: Any, number: int) -> list[float]:
    """One optimizer step; [loss, gradient norm, learning rate]."""
    result = backend.train_step(share(backend, number), policy_loss, TEMPERATURE, entropy=True)
    return [result.loss, result.grad_norm, result.lr]


@torch.no_grad()
def hugging_face_logprobs(model: Any, batch: Microbatch) -> torch.Tensor:
    """[T] of the targets, one document at a time, so nothing about packing or padding can go wrong."""
    rows, at = [], 0
    for n in batch.document_lengths:
        rows.append(model(batch.tokens[None, at : at + n]).logits[0].float() / TEMPERATURE)
        at += n
    return torch.cat(rows).log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)


def backend(folder: Path, spec: dict[str, Any]) -> Any:
    """The backend of a spec: its kind, dtype, parallel sizes, memory options and seed."""
    from learner.megatron.backend import MegatronBackend

    model = ModelConfig(path=str(folder / "models" / spec.get("kind", "tied")), dtype=spec.get("dtype", "float32"))
    reference = spec.get("reference")
    learner = LearnerConfig(
        loss=LossConfig(reference=str(folder / "models" / reference) if reference else None),
        parallel=ParallelConfig(**spec.get("parallel", {})),
        memory=MemoryConfig(**spec.get("memory", {})),
        optimizer=OPTIMIZER,
    )
    return MegatronBackend(model, learner, total_steps=10, seed=spec.get("seed", 1))


def save(backend: Any, path: Path) -> None:
    """A checkpoint that is on the disk on return. Collective."""
    backend.start_checkpoint(path)
    backend.checkpoint_done(wait=True)
