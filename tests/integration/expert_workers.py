"""The ranks behind test_experts.py; the process rig is that of megatron_workers.py.

The reference is plain transformers: hooks on its gates read what they route, add the balancing loss that autograd
then differentiates, or force the experts of a recorded routing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.config.schema import LearnerConfig, MemoryConfig, ModelConfig, MoeConfig, ParallelConfig
from learner.backend_protocol import LossOutput, Microbatch
from tests.integration import fork_rig
from tests.integration import megatron_workers as rig

EXPERTS, CHOSEN = 8, 2
RATE = 0.3  # of either balance; large, so that an error shows in every gradient


def new_model(kind: str) -> Any:
    """Tiny 'qwen' (softmax router), 'normed' (over the chosen alone), 'glm' (sigmoid, bias, first layer dense)."""
    import transformers

    torch.manual_seed(0)
    base: dict[str, Any] = dict(vocab_size=rig.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    base |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
    base |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="sdpa", head_dim=16)
    base |= dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, num_experts_per_tok=CHOSEN)
    if kind in ("qwen", "normed"):
        normed = kind == "normed"
        config = transformers.Qwen3MoeConfig(
            **base, num_experts=EXPERTS, moe_intermediate_size=32, norm_topk_prob=normed
        )
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


@contextmanager
def forced(model: Any, routing: Tensor) -> Iterator[None]:
    """Every gate sends token t of the calls within the context, in their order, to routing[t] where that is known."""
    at = [0] * len(gates(model))

    def hook(layer: int, gate: Any, logits: Tensor, weights: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = routing[at[layer] : at[layer] + len(own), layer].long()
        at[layer] += len(own)
        chosen = torch.where((rows >= 0).all(1, keepdim=True), rows, own)
        scores = logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    hooks = [
        gate.register_forward_hook(lambda m, _i, out, layer=layer: hook(layer, m, *out))
        for layer, gate in enumerate(gates(model))
    ]
    yield
    for handle in hooks:
        handle.remove()


@torch.no_grad()
def perturbed_routing(kind: str) -> list[Tensor]:
    """Per microbatch of step 0 the [T, MoE layers, CHOSEN] int16 experts of a model a little off; a fifth unknown."""
    model = new_model(kind)
    random = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=random) * 0.03)
    out = []
    for batch in rig.microbatches(0):
        with watched(model) as seen:
            rig._reference_loss(model, batch)
        routing = torch.stack([torch.cat([chosen for _, chosen in calls]) for calls in seen], 1).to(torch.int16)
        out.append(routing.masked_fill((torch.rand(len(routing), generator=random) < 0.2)[:, None, None], -1))
    return out


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
    routing = perturbed_routing(kind) if case.get("replay_routing") else []
    changed = known = 0
    for i, batch in enumerate(batches):
        with watched(model) as seen:
            if routing:
                own, given = _own_routing(model, batch, routing[i]), routing[i].long()
                changed += int(((own.sort(2).values != given.sort(2).values).any(2) & (given >= 0).all(2)).sum())
                known += int((given >= 0).all(2).sum())
            for calls in seen:
                calls.clear()
            with forced(model, routing[i]) if routing else nullcontext():
                logprobs, output = _loss_of(spec, model, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach()
        loss = loss + output.loss_sum
        divisor += batch.loss_mask.sum() if output.denominator is None else output.denominator
        balance = balance + sum(balance_loss(calls) for calls in seen) * len(batch.tokens) / places
        for layer, calls in enumerate(seen):
            counts[layer] += torch.nn.functional.one_hot(torch.cat([c for _, c in calls]), EXPERTS).sum((0, 1))
    total = loss / divisor
    if case.get("balance") == "aux_loss":
        total = total + RATE * balance
    total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors["routing"] = torch.tensor([changed, known])
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


def _own_routing(model: Any, batch: Microbatch, routing: Tensor) -> Tensor:
    """[T, MoE layers, CHOSEN] experts that `model` would choose with `routing` forced in all layers before."""
    own: list[Tensor] = []
    hooks = [
        gate.register_forward_hook(lambda _m, _i, out: own.append(out[2])) for gate in gates(model)
    ]  # before the forcing hooks, so they see the gate's own choice
    layers = len(gates(model))
    with forced(model, routing), torch.no_grad():
        rig._reference_loss(model, batch)
    for handle in hooks:
        handle.remove()
    return torch.stack([torch.cat(own[layer::layers]) for layer in range(layers)], 1)


def _loss_of(spec: dict[str, Any], model: Any, batch: Microbatch) -> tuple[Tensor, LossOutput]:
    rows, at = [], 0
    for n in batch.document_lengths:
        rows.append(model(batch.tokens[None, at : at + n]).logits[0].float() / rig.TEMPERATURE)
        at += n
    log_p = torch.cat(rows).log_softmax(-1)
    logprobs = log_p.gather(1, batch.targets[:, None]).squeeze(1)
    return logprobs, LOSSES[spec.get("loss", "tokens")](logprobs, -(log_p.exp() * log_p).sum(-1), batch)


def _named_gates(model: Any) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if n.endswith("mlp.gate")]


def job_experts(folder: Path, spec: dict[str, Any]) -> None:
    """One layout of one case: log-probabilities, gradients and norm of the first step, then the steps themselves."""
    from learner.megatron.backend import MegatronBackend

    path = str(folder / "models" / spec["kind"])
    learner = LearnerConfig(
        parallel=ParallelConfig(**spec.get("parallel", {})),
        moe=MoeConfig(**{**spec["moe"], **({"balance_rate": RATE} if "balance" in spec["moe"] else {})}),
        memory=MemoryConfig(recompute=spec.get("recompute", "none")),
        optimizer=rig.OPTIMIZER,
    )
    backend = MegatronBackend(ModelConfig(path=path, dtype="float32", verify=False), learner, total_steps=10, seed=1)
    loss = LOSSES[spec.get("loss", "tokens")]
    tensors = {f"weight.{n}": t.clone() for n, t in backend.export()}
    mine = share(backend, 0, spec)
    for i, values in enumerate(backend.logprobs(mine, rig.TEMPERATURE)):
        tensors[f"logprobs.{i * backend.data_parallel_size + backend.data_parallel_rank}"] = values
    backend.optimizer.zero_grad()
    backend.schedule.train(mine, loss, rig.TEMPERATURE, entropy=True)
    _restore_bias(backend, tensors)
    tensors |= {f"gradient.{n}": t for n, t in _gradients(backend).items()}
    steps = []
    for step in range(rig.STEPS):
        done = backend.train_step(share(backend, step, spec), loss, rig.TEMPERATURE, entropy=True)
        steps.append([done.loss, done.grad_norm])
        if step == 0:
            names = ("routing_changed", "routing_replayed")
            routing = [done.sums[name] for name in names] if "replay_routing" in spec["moe"] else []
        if step == 0:
            tensors |= {f"first.{n}": t.clone() for n, t in backend.export() if n.endswith("correction_bias")}
    tensors |= {f"trained.{n}": t.clone() for n, t in backend.export()}
    fork_rig.write(folder / spec["name"], backend.rank, tensors, {"steps": steps, "routing": routing})


def share(backend: Any, step: int, spec: dict[str, Any]) -> list[Microbatch]:
    """This replica's microbatches; those of step 0 with the routing to replay."""
    batches = rig.microbatches(step)
    if spec["moe"].get("replay_routing") and step == 0:
        routing = perturbed_routing(spec["kind"])
        batches = [replace(b, routed_experts=r) for b, r in zip(batches, routing, strict=True)]
    return batches[backend.data_parallel_rank :: backend.data_parallel_size]


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


JOBS = rig.JOBS | {"expert-reference": job_reference, "experts": job_experts}
