"""The ranks behind test_megatron_parity.py, with torchrun's environment.

Results go to a folder as safetensors and JSON, which the test process compares; nothing is asserted here. Importing
Megatron costs seconds of CPU per process, so one process imports it and forks the ranks, which share no other state.
"""

# ruff: noqa: E402
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from safetensors.torch import save_file

from common.config import LearnerConfig, ModelConfig, OptimizerConfig, ParallelConfig
from common.lifecycle import die_with_parent
from learner.backend import LossOutput, Microbatch

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
    """Log-probabilities, gradients, round trip; then steps, a checkpoint, one more step, an export."""
    backend = _backend(folder, spec)
    sent = [b"", bytes(range(256)) * 5]
    got = [backend.broadcast_bytes(data if backend.rank == 0 else None) for data in sent]
    result: dict[str, Any] = {"broadcast": got == sent, "order": []}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in backend.export():
        tensors[f"weight.{name}"] = tensor.clone()
        result["order"].append(name)
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
    tensors.update({f"gradient.{n}": t for n, t in _gradients(backend).items()})
    result |= dict(loss_sum=totals.loss_sum, tokens=totals.loss_tokens, sums=totals.sums, maxima=totals.maxima)
    steps = [backend.train_step(_share(backend, s), policy_loss, TEMPERATURE, entropy=True) for s in range(STEPS)]
    result["steps"] = [[s.loss, s.grad_norm, s.lr] for s in steps]
    tensors.update({f"trained.{n}": t.clone() for n, t in backend.export()})
    if spec.get("save"):
        backend.save_checkpoint(folder / "checkpoints" / spec["name"])
        backend.save_hf(folder / "saved" / spec["name"])
        after = backend.train_step(_share(backend, STEPS), policy_loss, TEMPERATURE, entropy=True)
        result["after"] = [after.loss, after.grad_norm, after.lr]
        tensors.update({f"after.{n}": t.clone() for n, t in backend.export()})
    _write(folder / spec["name"], backend, tensors, result)
    _leave(backend)


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    """Load a checkpoint in this new process, under the given layout, and take one more step."""
    backend = _backend(folder, spec | {"seed": 99})
    backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    after = backend.train_step(_share(backend, STEPS), policy_loss, TEMPERATURE, entropy=True)
    tensors = {f"after.{n}": t.clone() for n, t in backend.export()}
    _write(folder / spec["name"], backend, tensors, {"after": [after.loss, after.grad_norm, after.lr]})
    _leave(backend)


def _backend(folder: Path, spec: dict[str, Any]) -> Any:
    from learner.megatron.backend import MegatronBackend

    path = str(folder / "models" / spec.get("kind", "tied"))
    model = ModelConfig(path=path, dtype=spec.get("dtype", "float32"), verify=spec.get("verify", True))
    learner = LearnerConfig(parallel=ParallelConfig(**spec.get("parallel", {})), optimizer=OPTIMIZER)
    return MegatronBackend(model, learner, total_steps=10, seed=spec.get("seed", 1))


def _leave(backend: Any) -> None:
    """Give up the groups but keep the world, for the next layout in this process."""
    from megatron.core import parallel_state

    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()


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


def _write(path: Path, backend: Any, tensors: dict[str, torch.Tensor], result: dict[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / f"{backend.rank}.safetensors")
    (path / f"{backend.rank}.json").write_text(json.dumps(result))


JOBS = {"reference": job_reference, "layout": job_layout, "resume": job_resume}


def _run_rank(folder: Path, group: dict[str, Any], rank: int, port: int) -> None:
    """The life of one rank, in a process of its own."""
    die_with_parent()
    log = os.open(folder / f"{group['job']}-{group['ranks']}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for spec in group["specs"]:
        JOBS[group["job"]](folder, spec)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _fork_rank(folder: Path, group: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _run_rank(folder, group, rank, port)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run_stage(folder: Path, stage: list[dict[str, Any]], deadline: float) -> bool:
    """All groups of a stage at once; whether every rank ended well. A failed rank ends the others."""
    running: set[int] = set()
    for group in stage:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        running |= {_fork_rank(folder, group, rank, port) for rank in range(group["ranks"])}
    good = True
    while running and good:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            good = status == 0
        elif time.monotonic() > deadline:
            good = False
        else:
            time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return good


def main() -> int:
    """Import Megatron once, then fork the ranks of each stage: `FOLDER STAGES TIMEOUT_S`."""
    folder, stages, timeout_s = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
    import learner.megatron.backend  # noqa: F401

    deadline = time.monotonic() + timeout_s
    return 0 if all(_run_stage(folder, stage, deadline) for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
