"""Plain Hugging Face transformers and autograd on the packed documents, one document at a time.

So nothing of packing, layouts or Megatron can go wrong here. Hooks on the gates force recorded experts, and read the
routing for the balance. Hooks on linear layers add adapters. No megatron.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from common.config.lora import PROJECTIONS
from common.config.schema import BaseConfig, OptimizerConfig
from learner.backend_protocol import Microbatch
from learner.certificate.batch import loss_of, temperature_of, value_loss_of

Calls = list[tuple[Tensor, Tensor]]  # (logits, chosen experts) of each call of one gate


# ---------------------------------------------------------------- names of the files


def in_files(model: Any) -> dict[str, Tensor]:
    """The weights under the names in the model's files, where experts are apart and a tied head is there once."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def gradients_in_files(model: Any) -> dict[str, Tensor]:
    """The gradients under those names, without buffers and what is frozen."""
    graded = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in zip(graded.parameters(), model.parameters(), strict=True):
            frozen = torch.full_like(theirs, float("nan"))
            unused = torch.zeros_like(theirs) if theirs.requires_grad else frozen
            ours.copy_(unused if theirs.grad is None else theirs.grad)
    buffers = {name for name, _ in model.named_buffers()}
    return {n: g for n, g in in_files(graded).items() if n not in buffers and not g.isnan().any()}


# ---------------------------------------------------------------- forward pass


def distributions(model: Any, batch: Microbatch, temperature: float) -> Tensor:
    """[T, vocabulary] log-probabilities, one document at a time, at each target's own temperature."""
    documents = batch.tokens.split(batch.document_lengths)
    logits = torch.cat([model(d[None]).logits[0].float() for d in documents])
    named = torch.zeros(len(logits)) if batch.temperatures is None else batch.temperatures  # 0: the step's
    return (logits / torch.where(named > 0, named, temperature)[:, None]).log_softmax(-1)


def values(critic: Any, batch: Microbatch) -> Tensor:
    """[T] values of the places by a model for sequence classification with one label, one document at a time."""
    documents = batch.tokens.split(batch.document_lengths)
    return torch.cat([critic.score(critic.model(d[None]).last_hidden_state[0]) for d in documents]).squeeze(1).float()


def gates(model: Any) -> dict[str, Any]:
    """The routers of the model, in the order of its layers."""
    return {n: m for n, m in model.named_modules() if n.endswith("mlp.gate")}


@contextmanager
def watched(model: Any) -> Iterator[list[Calls]]:
    """Per gate, (logits, chosen experts) of each call within the context."""
    seen: list[Calls] = [[] for _ in gates(model)]
    hooks = [
        gate.register_forward_hook(lambda _m, _i, out, calls=calls: calls.append((out[0], out[2])))
        for gate, calls in zip(gates(model).values(), seen, strict=True)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@contextmanager
def forced(model: Any, routing: Tensor | None) -> Iterator[None]:
    """Every gate sends token t of the calls within the context, in their order, to routing[t] where that is known."""
    if routing is None:
        yield
        return
    at = [0] * len(gates(model))

    def hook(layer: int, gate: Any, logits: Tensor, weights: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = routing[at[layer] : at[layer] + len(own), layer].long()
        at[layer] += len(own)
        chosen = torch.where((rows >= 0).all(1, keepdim=True), rows, own)
        scores = logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), chosen

    hooks = [
        gate.register_forward_hook(lambda m, _i, out, layer=layer: hook(layer, m, *out))
        for layer, gate in enumerate(gates(model).values())
    ]
    yield
    for handle in hooks:
        handle.remove()


def balance_loss(calls: Calls) -> Tensor:
    """E sum_i f_i P_i of one layer over the documents of a microbatch (Switch Transformer, equations 4 to 6)."""
    probabilities = torch.cat([logits for logits, _ in calls]).softmax(-1)
    chosen = torch.cat([c for _, c in calls])
    experts, per_token = probabilities.shape[1], chosen.shape[1]
    share = torch.nn.functional.one_hot(chosen, experts).sum(1).float().mean(0) / per_token
    return experts * (share * probabilities.mean(0)).sum()


# ---------------------------------------------------------------- adapters


def adapt(model: Any, tensors: Mapping[str, Tensor], factor: float) -> dict[str, torch.nn.Parameter]:
    """Freeze the model, and let every linear layer with an adapter among `tensors` compute W x + factor B A x.

    Layers that Megatron fuses share their A. Returns the parameters by their name in Hugging Face's peft.
    """
    model.requires_grad_(False)
    first = {name: group[0] for group in PROJECTIONS.values() for name in group}
    made: dict[str, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        prefix, _, last = name.rpartition(".")
        a_name, b_name = (f"base_model.model.{name}.lora_{x}.weight" for x in "AB")
        if a_name not in tensors:
            continue
        shared = made.get(f"base_model.model.{prefix}.{first[last]}.lora_A.weight")
        a = torch.nn.Parameter(tensors[a_name].float().clone()) if shared is None else shared
        b = torch.nn.Parameter(tensors[b_name].float().clone())
        made |= {a_name: a, b_name: b}
        module.register_forward_hook(_with_adapter(a, b, factor))
    return made


def _with_adapter(a: Tensor, b: Tensor, factor: float) -> Callable[..., Tensor]:
    def add(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        (x,) = inputs
        return output + factor * (x @ a.to(x.dtype).T @ b.to(x.dtype).T)

    return add


# ---------------------------------------------------------------- the loss and its step


@dataclass
class Pass:
    """One forward pass over all packs."""

    loss: Tensor  # that a step minimises, differentiable
    logprobs: list[Tensor]  # [T] of each pack's targets; a critic's values
    counts: list[Tensor] = field(default_factory=list[Tensor])  # [experts] tokens, per layer with experts
    policy: float = 0.0  # the loss without balance, as the learner reports it


def run(model: Any, packs: Sequence[Microbatch], config: BaseConfig) -> Pass:
    """The job's loss of the packs, balance included."""
    loss, moe = loss_of(config), config.learner.moe
    total, divisor, blank_divisor, balance = torch.zeros(()), torch.zeros(()), torch.zeros(()), torch.zeros(())
    places = sum(len(pack.tokens) for pack in packs)
    rows: list[Tensor] = []
    counts = [torch.zeros(0)] * len(gates(model))
    for pack in packs:
        with forced(model, pack.routed_experts), watched(model) as seen:
            log_p = distributions(model, pack, temperature_of(config))
        logprobs = log_p.gather(1, pack.targets[:, None]).squeeze(1)
        entropy = None if config.rl is None else -(log_p.exp() * log_p).sum(-1)
        ids = pack.teacher_top_ids
        output = loss(logprobs, entropy, pack if ids is None else replace(pack, top_logprobs=log_p.gather(1, ids)))
        total = total + output.loss_sum
        divisor = divisor + (pack.loss_mask.sum() if output.denominator is None else output.denominator)
        rows.append(logprobs.detach())
        if moe.balance == "aux_loss":
            balance = balance + sum(balance_loss(calls) for calls in seen) * len(pack.tokens) / places
            blank_divisor = blank_divisor + _blank_denominator(loss, pack)
        for layer, calls in enumerate(seen):
            chosen = torch.nn.functional.one_hot(torch.cat([c for _, c in calls]), calls[0][0].shape[-1]).sum((0, 1))
            counts[layer] = chosen if not len(counts[layer]) else counts[layer] + chosen
    policy = total / divisor
    whole = policy
    if moe.balance == "aux_loss":  # its weight follows from a denominator that no correction has made smaller
        whole = policy + moe.balance_rate * balance * (blank_divisor / divisor).detach()
    return Pass(whole, rows, counts, policy.item())


def run_critic(model: Any, packs: Sequence[Microbatch], config: BaseConfig) -> Pass:
    """The loss of the job's critic."""
    loss, rows = value_loss_of(config), [values(model, pack) for pack in packs]
    total = torch.stack([loss(row, None, pack).loss_sum for row, pack in zip(rows, packs, strict=True)]).sum()
    mean = total / torch.stack([pack.loss_mask.sum() for pack in packs]).sum()
    return Pass(mean, [row.detach() for row in rows], policy=mean.item())


def _blank_denominator(loss: Any, pack: Microbatch) -> Tensor:
    zeros = torch.zeros(len(pack.targets))
    blank = replace(pack, behavior_logprobs=zeros, proximal_logprobs=None, top_logprobs=pack.teacher_top_logprobs)
    found = loss(zeros, zeros, blank).denominator
    return pack.loss_mask.sum() if found is None else found.detach()


def adamw(parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> float:
    """One step of torch's AdamW from the parameters' gradients; their norm before clipping. Norms are not decayed."""
    trained = [p for p in parameters if p.grad is not None]
    norm = torch.stack([p.grad.double().norm() for p in trained if p.grad is not None]).norm().item()
    if config.grad_clip:
        torch.nn.utils.clip_grad_norm_(trained, config.grad_clip)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps).step()
    return norm


@torch.no_grad()
def move_biases(model: Any, counts: Sequence[Tensor], rate: float) -> None:
    """Balance routers with an expert bias: b_i += rate * sign(mean count - count of i) (arXiv 2408.15664)."""
    for gate, count in zip(gates(model).values(), counts, strict=True):
        gate.e_score_correction_bias += rate * torch.sign(count.float().mean() - count)
