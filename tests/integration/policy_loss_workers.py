"""The ranks behind test_policy_loss.py; nothing is asserted here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.config.schema import LossConfig
from learner.backend_protocol import Microbatch
from tests.integration import fork_rig, tiny_models
from tests.integration.megatron_workers import _gradients as gradients

MAX_TOKENS = 30
LOSSES = {
    "gspo": LossConfig(
        objective="gspo",
        proximal="loglinear",
        correction="mis",
        correction_level="geometric",
        correction_low=0.8,
        correction_cap=1.2,
        reduction="sequence_mean",
    ),
    "cispo": LossConfig(
        objective="cispo", proximal="behavior", correction="none", reduction="fixed_length", entropy_coefficient=0.05
    ),
    "ppo_clip": LossConfig(
        correction="icepop",
        correction_level="sequence",
        correction_low=0.6,
        correction_cap=1.6,
        correction_normalize=True,
        correction_veto=0.45,
        kl_coefficient=0.1,
    ),
    "dppo_tv": LossConfig(
        objective="dppo_tv",
        clip_low=5e-4,
        clip_high=5e-4,
        proximal="loglinear",
        correction_normalize=True,
        reduction="sequence_mean",
        entropy_coefficient=0.01,
        kl_coefficient=0.1,
        kl_estimator="k2",
    ),
}


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """transformers, one document after the other, and all of them in one microbatch: nothing is divided."""
    from learner.loss.losses import policy_loss

    model = tiny_models.make(folder / "models" / "tied", "tied")
    packs = tiny_models.microbatches(0)
    rows = [x for pack in packs for x in _documents(model, pack)]
    logprobs, entropy = torch.cat([x for x, _ in rows]), torch.cat([h for _, h in rows])
    random = torch.Generator().manual_seed(5)
    noise = {name: 0.3 * torch.randn(len(logprobs), generator=random) for name in ("behavior", "reference")}
    data = {name: (logprobs.detach() + x) for name, x in noise.items()}
    data["staleness"] = torch.randint(0, 12, (len(logprobs),), generator=random, dtype=torch.int32)
    lengths = [n for pack in packs for n in pack.document_lengths]
    data["advantages"] = torch.randn(len(lengths), generator=random).repeat_interleave(torch.tensor(lengths))
    save_file(data, folder / "data.safetensors")
    whole = _whole(_given(packs, data))
    for name, config in LOSSES.items():
        out = policy_loss(config, MAX_TOKENS)(logprobs, entropy, whole)
        loss = out.loss_sum / out.denominator
        model.zero_grad()
        loss.backward(retain_graph=True)
        found = {f"gradient.{n}": p.grad.clone() for n, p in model.named_parameters()}
        fork_rig.write(folder / "reference" / name, 0, found, {"loss": loss.item(), **_figures(out)})


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """Every loss under one layout."""
    from learner.loss.losses import policy_loss

    backend = tiny_models.backend(folder, spec)
    packs = _given(tiny_models.microbatches(0), load_file(folder / "data.safetensors"))
    if spec.get("uneven"):
        packs = [*packs[:2], _whole(packs[2:])]
    mine = packs[backend.data_parallel_rank :: backend.data_parallel_size]
    for name, config in LOSSES.items():
        backend.optimizer.zero_grad()
        totals = backend.schedule.train(mine, policy_loss(config, MAX_TOKENS), tiny_models.TEMPERATURE, entropy=True)
        found = {f"gradient.{n}": x for n, x in gradients(backend).items()}
        figures = dict(sums=totals.sums, maxima=totals.maxima)
        result = {"loss": totals.loss_sum / totals.denominator, "tokens": totals.loss_tokens, **figures}
        fork_rig.write(folder / spec["name"] / name, backend.rank, found, result)


def job_spoiled(folder: Path, spec: dict[str, Any]) -> None:
    """What a step says whose log-probabilities are gone."""
    from learner.loss.losses import policy_loss

    backend = tiny_models.backend(folder, spec)
    loss = policy_loss(LossConfig(), MAX_TOKENS)
    packs = _given(tiny_models.microbatches(0), load_file(folder / "data.safetensors"))
    try:
        backend.train_step(packs, lambda logprobs, entropy, batch: loss(logprobs * float("nan"), entropy, batch))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"said": said})


def _documents(model: Any, pack: Microbatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(log-probabilities, entropies) of each document's targets."""
    out = []
    for tokens, targets in zip(
        pack.tokens.split(pack.document_lengths), pack.targets.split(pack.document_lengths), strict=True
    ):
        log_p = (model(tokens[None]).logits[0] / tiny_models.TEMPERATURE).log_softmax(-1)
        out.append((log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return out


def _given(packs: list[Microbatch], data: dict[str, torch.Tensor]) -> list[Microbatch]:
    sizes = [len(pack.tokens) for pack in packs]
    parts = zip(
        *(data[name].split(sizes) for name in ("behavior", "reference", "staleness", "advantages")), strict=True
    )
    return [
        replace(pack, behavior_logprobs=b, reference_logprobs=r, staleness=s, advantages=a)
        for pack, (b, r, s, a) in zip(packs, parts, strict=True)
    ]


def _whole(packs: list[Microbatch]) -> Microbatch:
    names = ("tokens", "targets", "positions", "loss_mask", "advantages", "behavior_logprobs", "staleness")
    tensors = {name: torch.cat([getattr(pack, name) for pack in packs]) for name in (*names, "reference_logprobs")}
    return Microbatch(document_lengths=sum((pack.document_lengths for pack in packs), ()), **tensors)


def _figures(out: Any) -> dict[str, Any]:
    return {part: {n: x.tolist() for n, x in getattr(out, part).items()} for part in ("sums", "maxima")}


JOBS = {"reference": job_reference, "layout": job_layout, "spoiled": job_spoiled}
