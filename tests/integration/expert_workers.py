"""The ranks behind test_experts.py; the process rig is that of megatron_workers.py.

The reference is plain transformers: hooks on its gates read what they route, add the balancing loss that autograd
then differentiates, or force the experts of a recorded routing.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_workers as rig
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.config import LearnerConfig, ModelConfig, MoeConfig, ParallelConfig
from learner.backend import LossOutput, Microbatch

EXPERTS, CHOSEN = 8, 2
RATE = 0.3  # of either balance; large, so that an error shows in every gradient


def new_model(kind: str) -> Any:
    """Tiny 'qwen' (softmax router) or 'glm' (sigmoid router with a bias, shared expert, first layer dense)."""
    import transformers

    torch.manual_seed(0)
    base: dict[str, Any] = dict(vocab_size=rig.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    base |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
    base |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="sdpa", head_dim=16)
    base |= dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, num_experts_per_tok=CHOSEN)
    if kind == "qwen":
        config = transformers.Qwen3MoeConfig(**base, num_experts=EXPERTS, moe_intermediate_size=32)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        experts = dict(n_routed_experts=EXPERTS, moe_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1)
        config = transformers.Glm4MoeConfig(**base, **experts, first_k_dense_replace=1, routed_scaling_factor=1.0)
        model = transformers.Glm4MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for gate in gates(model):
            gate.weight.normal_(0, 0.2)
            if hasattr(gate, "e_score_correction_bias"):
                gate.e_score_correction_bias.normal_(0, 0.05)
    return model.float()


def gates(model: Any) -> list[Any]:
    """The routers of the model, by layer."""
    return [m for n, m in model.named_modules() if n.endswith("mlp.gate")]


def loss_with_denominator(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """The rig's loss, divided by documents instead of tokens."""
    output = rig.policy_loss(logprobs, entropy, batch)
    return replace(output, denominator=torch.tensor(float(len(batch.document_lengths))))


LOSSES = {"tokens": rig.policy_loss, "documents": loss_with_denominator}


@contextmanager
def watched(model: Any) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """Per gate, (logits, chosen experts) of each call within the context."""
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in gates(model)]
    hooks = [
        gate.register_forward_hook(lambda _m, _i, out, calls=calls: calls.append((out[0], out[2])))
        for gate, calls in zip(gates(model), seen, strict=True)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def balance_loss(calls: list[tuple[Tensor, Tensor]]) -> Tensor:
    """E sum_i f_i P_i of one layer over the documents of a microbatch (Switch Transformer, equations 4 to 6)."""
    probabilities = torch.cat([logits for logits, _ in calls]).softmax(-1)
    chosen = torch.nn.functional.one_hot(torch.cat([c for _, c in calls]), EXPERTS).sum(1)
    return EXPERTS * (chosen.float().mean(0) / CHOSEN * probabilities.mean(0)).sum()


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """What autograd makes of the first step's loss, balance included, and of the bias; then steps with AdamW."""
    kind, case = spec["kind"], spec["moe"]
    model = new_model(kind)
    model.save_pretrained(folder / "models" / kind)
    if case.get("freeze_router"):
        for gate in gates(model):
            gate.requires_grad_(False)
    batches, tensors = rig.microbatches(0), {}
    places = sum(len(batch.tokens) for batch in batches)
    loss, divisor, balance = torch.zeros(()), 0.0, torch.zeros(())
    counts = torch.zeros(len(gates(model)), EXPERTS)
    for i, batch in enumerate(batches):
        with watched(model) as seen:
            logprobs, _ = rig._reference_loss(model, batch)
            output = _loss_of(spec, model, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach()
        loss = loss + output.loss_sum
        divisor += batch.loss_mask.sum() if output.denominator is None else output.denominator
        seen = [calls[: len(batch.document_lengths)] for calls in seen]  # the second pass saw the same
        balance = balance + sum(balance_loss(calls) for calls in seen) * len(batch.tokens) / places
        for layer, calls in enumerate(seen):
            counts[layer] += torch.nn.functional.one_hot(torch.cat([c for _, c in calls]), EXPERTS).sum((0, 1))
    total = loss / divisor
    if case.get("balance") == "aux_loss":
        total = total + RATE * balance
    total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors["norm"] = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    tensors |= {f"gradient.{n}": g.clone() for n, g in rig._unfused(gradients).items()}
    for gate, (name, _), count in zip(gates(model), _named_gates(model), counts, strict=True):
        if hasattr(gate, "e_score_correction_bias"):
            bias = gate.e_score_correction_bias
            tensors[f"bias.{name}.e_score_correction_bias"] = bias + RATE * torch.sign(count.mean() - count)
    if case.get("freeze_router"):
        rig._reference_steps(model)
        tensors |= {f"trained.{n}": w.detach() for n, w in rig._unfused(dict(model.named_parameters())).items()}
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / f"reference-{spec['name']}.safetensors")


def _loss_of(spec: dict[str, Any], model: Any, batch: Microbatch) -> LossOutput:
    rows, at = [], 0
    for n in batch.document_lengths:
        rows.append(model(batch.tokens[None, at : at + n]).logits[0].float() / rig.TEMPERATURE)
        at += n
    log_p = torch.cat(rows).log_softmax(-1)
    logprobs = log_p.gather(1, batch.targets[:, None]).squeeze(1)
    return LOSSES[spec.get("loss", "tokens")](logprobs, -(log_p.exp() * log_p).sum(-1), batch)


def _named_gates(model: Any) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if n.endswith("mlp.gate")]


def job_experts(folder: Path, spec: dict[str, Any]) -> None:
    """One layout of one case: log-probabilities, gradients and norm of the first step, then the steps themselves."""
    from learner.megatron.backend import MegatronBackend

    path = str(folder / "models" / spec["kind"])
    learner = LearnerConfig(
        parallel=ParallelConfig(**spec.get("parallel", {})),
        moe=MoeConfig(**{**spec["moe"], **({"balance_rate": RATE} if "balance" in spec["moe"] else {})}),
        optimizer=rig.OPTIMIZER,
    )
    backend = MegatronBackend(ModelConfig(path=path, dtype="float32"), learner, total_steps=10, seed=1)
    loss = LOSSES[spec.get("loss", "tokens")]
    tensors = {f"weight.{n}": t.clone() for n, t in backend.export()}
    mine = rig._share(backend, 0)
    for i, values in enumerate(backend.logprobs(mine, rig.TEMPERATURE)):
        tensors[f"logprobs.{i * backend.data_parallel_size + backend.data_parallel_rank}"] = values
    backend.optimizer.zero_grad()
    backend.schedule.train(mine, loss, rig.TEMPERATURE, entropy=True)
    _restore_bias(backend, tensors)
    tensors |= {f"gradient.{n}": t for n, t in _gradients(backend).items()}
    steps = []
    for step in range(rig.STEPS):
        done = backend.train_step(rig._share(backend, step), loss, rig.TEMPERATURE, entropy=True)
        steps.append([done.loss, done.grad_norm])
        if step == 0:
            tensors |= {f"first.{n}": t.clone() for n, t in backend.export() if n.endswith("correction_bias")}
    tensors |= {f"trained.{n}": t.clone() for n, t in backend.export()}
    rig._write(folder / spec["name"], backend, tensors, {"steps": steps})
    rig._leave(backend)


def _restore_bias(backend: Any, tensors: dict[str, Tensor]) -> None:
    """Take back the update of the pass that only measured gradients."""
    for router in backend.schedule.experts.routers:
        if router.expert_bias is not None:
            name = f"weight.model.layers.{router.layer_number - 1}.mlp.gate.e_score_correction_bias"
            router.expert_bias.copy_(tensors[name])


def _gradients(backend: Any) -> dict[str, Tensor]:
    """As the rig's; what has no gradient is left out."""
    frozen = [p for chunk in backend.chunks for p in chunk.module.parameters() if not hasattr(p, "main_grad")]
    for parameter in frozen:
        parameter.main_grad = torch.full_like(parameter, float("nan"))
    gradients = rig._gradients(backend)
    for parameter in frozen:
        del parameter.main_grad
    return {n: g for n, g in gradients.items() if not n.endswith("correction_bias") and not g.isnan().any()}


if __name__ == "__main__":
    rig.JOBS |= {"expert-reference": job_reference, "experts": job_experts}
    sys.exit(rig.main())
