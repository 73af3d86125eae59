"""The ranks behind test_megatron_parity.py, with torchrun's environment.

Results go to a folder as safetensors and JSON, which the test process compares; nothing is asserted here.
"""

# ruff: noqa: E402
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from safetensors.torch import save_file

from common.config.schema import LearnerConfig, ModelConfig, OptimizerConfig, ParallelConfig
from learner.backend_protocol import LossOutput, Microbatch, StepResult
from tests.integration import fork_rig

VOCABULARY = 128
TEMPERATURE = 0.7
STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=2, schedule="cosine", weight_decay=0.01, grad_clip=1.0)


def microbatches(step: int) -> list[Microbatch]:
    """Four packs of documents between 1 and 40 tokens; never token 0, whose gradient Hugging Face zeroes as padding."""
    random = torch.Generator().manual_seed(100 + step)
    packs = []
    for lengths in ((40, 3, 17), (1, 33, 16, 5), (29,), (8, 8, 31, 12, 2)):
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


def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor | None, batch: Microbatch) -> LossOutput:
    """A policy gradient with an entropy bonus: both outputs of the backend get a gradient."""
    assert entropy is not None
    terms = -(logprobs * batch.advantages) - 0.05 * entropy
    sums = {"entropy": (entropy.detach() * batch.loss_mask).sum()}
    return LossOutput((terms * batch.loss_mask).sum(), sums, {"highest": logprobs.detach().max()})


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """A model, and what plain Hugging Face and autograd make of the documents."""
    model = _new_model(spec["kind"])
    path = folder / "models" / spec["kind"]
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps({"of": spec["kind"]}))
    tensors: dict[str, torch.Tensor] = {}
    loss_sum, tokens, entropy_sum, highest = torch.zeros(()), 0.0, 0.0, float("-inf")
    for i, batch in enumerate(microbatches(0)):
        logprobs, output = _reference_loss(model, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach()
        loss_sum = loss_sum + output.loss_sum
        tokens += batch.loss_mask.sum().item()
        entropy_sum += output.sums["entropy"].item()
        highest = max(highest, output.maxima["highest"].item())
    loss = loss_sum / tokens
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
    tensors.update({f"gradient.{n}": g for n, g in _unfused(gradients).items()})
    tensors.update({f"weight.{n}": w.detach().clone() for n, w in _unfused(dict(model.named_parameters())).items()})
    _reference_steps(model)
    tensors.update({f"trained.{n}": w.detach() for n, w in _unfused(dict(model.named_parameters())).items()})
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / f"reference-{spec['kind']}.safetensors")
    result = dict(loss=loss.item(), tokens=tokens, norm=norm, entropy=entropy_sum, highest=highest)
    (folder / f"reference-{spec['kind']}.json").write_text(json.dumps(result))


def _reference_loss(model: Any, batch: Microbatch) -> tuple[torch.Tensor, LossOutput]:
    """One document at a time, so nothing about packing or padding can go wrong."""
    rows = []
    at = 0
    for n in batch.document_lengths:
        rows.append(model(batch.tokens[None, at : at + n]).logits[0].float() / TEMPERATURE)
        at += n
    log_p = torch.cat(rows).log_softmax(-1)
    logprobs = log_p.gather(1, batch.targets[:, None]).squeeze(1)
    return logprobs, policy_loss(logprobs, -(log_p.exp() * log_p).sum(-1), batch)


def _reference_steps(model: Any) -> None:
    """The steps of job_layout with torch's AdamW; norms are not decayed."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = microbatches(step)
        tokens = sum(batch.loss_mask.sum() for batch in batches)
        for batch in batches:
            (_reference_loss(model, batch)[1].loss_sum / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * (0.5, 1.0, 1.0)[step]  # two warmup steps, then the top of the cosine
        optimizer.step()


def _new_model(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    base: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    base |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
    base |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="sdpa")
    rope: dict[str, Any] = {"rope_theta": 1e6, "rope_type": "default"}
    if kind == "moe":
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=False)
        config = transformers.Qwen3MoeConfig(**base, head_dim=16, rope_parameters=rope, **experts)
        model = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "llama":
        scaled = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        config = transformers.LlamaConfig(**base, rope_parameters=scaled, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mistral":
        config = transformers.MistralConfig(**base, head_dim=16, rope_parameters=rope, sliding_window=6)
        model = transformers.MistralForCausalLM(config)
    else:
        heads = {"num_key_value_heads": 2 if kind == "tied" else 4}  # enough for tensor 4
        config = transformers.Qwen3Config(
            **base | heads, head_dim=16, rope_parameters=rope, tie_word_embeddings=kind == "tied"
        )
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms: not all ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float()


def _unfused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses experts in memory; files and the bridge name them one by one."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj" and prefix.endswith("experts"):
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2, 0)
                out |= {f"{prefix}.{i}.gate_proj.weight": gate, f"{prefix}.{i}.up_proj.weight": up}
        elif last == "down_proj" and prefix.endswith("experts"):
            out |= {f"{prefix}.{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """Log-probabilities, gradients, round trip; a step that is taken back, then it and two more, an export.

    Rank 0 alone writes what every rank has; the others leave a digest of it.
    """
    backend = _backend(folder, spec)
    sent = [b"", bytes(range(256)) * 5]
    got = [backend.broadcast_bytes(data if backend.rank == 0 else None) for data in sent]
    weights = {f"weight.{n}": t.clone() for n, t in backend.export()}
    result: dict[str, Any] = {"broadcast": got == sent, "order": list(weights), "exported": _digest(weights)}
    tensors: dict[str, torch.Tensor] = weights if backend.rank == 0 else {}
    mine = _share(backend, 0)
    logprobs = backend.logprobs(mine, TEMPERATURE)
    for i, values in enumerate(logprobs):
        tensors[f"logprobs.{i * backend.data_parallel_size + backend.data_parallel_rank}"] = values
    lone = backend.schedule.train(mine[:1], policy_loss, TEMPERATURE, entropy=True)
    result |= dict(lone_tokens=lone.loss_tokens, lone_given=int(mine[0].loss_mask.sum()))
    result["data_parallel_rank"] = backend.data_parallel_rank
    tensors[f"lone.{backend.data_parallel_rank}"] = backend.logprobs(mine[:1], TEMPERATURE)[0]
    backend.optimizer.zero_grad()
    totals = backend.schedule.train(mine, policy_loss, TEMPERATURE, entropy=True)
    gradients = {f"gradient.{n}": t for n, t in _gradients(backend).items()}
    tensors |= gradients if backend.rank == 0 else {}
    result |= dict(loss_sum=totals.loss_sum, tokens=totals.loss_tokens, sums=totals.sums, maxima=totals.maxima)
    first = _step_and_back(backend) if spec.get("dtype") is None else None
    steps = []
    for step in range(STEPS):
        steps.append(backend.train_step(_share(backend, step), policy_loss, TEMPERATURE, entropy=True))
        if first is not None and step == 0:
            result["repeats"] = first == (steps[0], _digest(dict(backend.export())))
    result["steps"] = [[s.loss, s.grad_norm, s.lr] for s in steps]
    trained = {f"trained.{n}": t.clone() for n, t in backend.export()}
    result["trained"] = _digest(trained)
    tensors |= trained if backend.rank == 0 else {}
    if spec.get("save"):
        backend.save_hf(folder / "saved" / spec["name"])
    fork_rig.write(folder / spec["name"], backend.rank, tensors, result)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of every bit of the tensors, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _step_and_back(backend: Any) -> tuple[StepResult, str]:
    """What the first step gives, to the bit; leaves the state before it."""
    before = [p.detach().clone() for chunk in backend.chunks for p in chunk.module.parameters()]
    result = backend.train_step(_share(backend, 0), policy_loss, TEMPERATURE, entropy=True)
    digest = _digest(dict(backend.export()))
    parameters = (p for chunk in backend.chunks for p in chunk.module.parameters())
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    for optimizer in backend.optimizer.megatron.chained_optimizers:
        optimizer.optimizer.state.clear()
    backend.optimizer.steps = 0
    return result, digest


def _backend(folder: Path, spec: dict[str, Any]) -> Any:
    from learner.megatron.backend import MegatronBackend

    path = str(folder / "models" / spec.get("kind", "tied"))
    model = ModelConfig(path=path, dtype=spec.get("dtype", "float32"), verify=spec.get("verify", True))
    learner = LearnerConfig(parallel=ParallelConfig(**spec.get("parallel", {})), optimizer=OPTIMIZER)
    return MegatronBackend(model, learner, total_steps=10, seed=spec.get("seed", 1))


def _share(backend: Any, step: int) -> list[Microbatch]:
    return microbatches(step)[backend.data_parallel_rank :: backend.data_parallel_size]


def _gradients(backend: Any) -> dict[str, torch.Tensor]:
    """Full gradients under Hugging Face names: gathered over data parallelism, exported as if they were weights."""
    for chunk in backend.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    kept = [(p, p.data) for chunk in backend.chunks for p in chunk.module.parameters()]
    for parameter, _ in kept:
        parameter.data = parameter.main_grad.to(parameter.dtype, copy=True)  # another dtype loses the gradient hooks
    gradients = {n: t.float().clone() for n, t in backend.export()}
    for parameter, data in kept:
        parameter.data = data
    return gradients


JOBS = {"reference": job_reference, "layout": job_layout}
