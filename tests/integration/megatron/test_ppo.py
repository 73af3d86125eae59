"""Whole steps of a policy with a critic, in several layouts, against transformers, torch's AdamW and plain loops.

The critic trains alone in the first step. Later samples are stale: their values are those of the version that trains.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from common.config.schema import Config
from learner.batch.packing import Document, build
from learner.batch.updates import build_updates, minibatches, plan_updates
from learner.loop.rollout_source import RolloutSource
from learner.loop.share import cells
from learner.loop.step_metrics import critic_figures
from learner.loop.updates import train_updates
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same
from tests.rigs.tiny_models import OPTIMIZER, TEMPERATURE, VOCABULARY, check_update

STEPS, GROUPS, SIZE, PARTS = 3, 4, 3, 2
LR, VALUE_LR, CLIP, BOUND = 1e-4, 1e-3, 0.05, 0.01
GAMMA, LAM, LAM_VALUES, KL = 0.97, 0.9, 0.95, 0.1
CRITIC: dict[str, Any] = {
    "optimizer": msgspec.to_builtins(OPTIMIZER) | {"lr": VALUE_LR},
    "warmup_steps": 1,
    "value_clip": CLIP,
    "kl_coefficient": KL,
    **{"gamma": GAMMA, "lam": LAM, "lam_values": LAM_VALUES},
}
LAYOUTS: list[dict[str, Any]] = [
    {"name": "one"},
    {"name": "dp2", "ranks": 2},
    {"name": "pp2", "parallel": {"pipeline": 2}},
    {"name": "cp2", "parallel": {"context": 2}},
]


def config_of() -> Config:
    loss = {"advantage": "gae", "correction": "none", "clip_low": BOUND, "clip_high": BOUND, "reference": "other"}
    learner = {"minibatches": PARTS, "groups_per_step": GROUPS, "micro_batch_tokens": 64, "loss": loss}
    document = {
        "run": {"name": "ppo", "dir": "unset", "steps": STEPS, "seed": 11},
        "model": {"path": "unset"},
        "tasks": {"environment": "addition", "dataset": "unset"},
        "learner": learner | {"critic": CRITIC},
        "rollout": {"temperature": TEMPERATURE, "group_size": SIZE},
    }
    return msgspec.convert(document, Config)


def documents(step: int) -> list[Document]:
    """A step's documents of several turns with a reward each, the same on every rank."""
    draw = np.random.default_rng(70 + step)
    made = []
    for number in range(GROUPS * SIZE):
        length = int(draw.integers(6, 40))
        mask = (draw.random(length) < 0.7).astype(np.uint8)
        mask[[0, -1]] = 0, 1
        made.append(
            Document(
                tokens=draw.integers(3, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.full(length, -4.0, np.float32),
                staleness=np.full(length, draw.integers(0, 3), np.int8),
                serial=number // SIZE,
                sample=number % SIZE,
                rewards=np.where(draw.random(length) < 0.3, draw.normal(size=length), 0.0).astype(np.float32),
            )
        )
    return made


# ---------------------------------------------------------------- plain transformers


def scored(model: Any, document: Document) -> Tensor:
    (pack,) = build([document], [[0]])
    return tiny_models.hugging_face(model, pack)[0]


def valued(model: Any, document: Document) -> Tensor:
    return tiny_models.values(model, torch.from_numpy(document.tokens[:-1]).long())


def estimates(rewards: list[float], values: list[float], lam: float) -> list[float]:
    """Advantages of the trained tokens in their order."""
    found, later, following = [0.0] * len(values), 0.0, 0.0
    for at in reversed(range(len(values))):
        later = rewards[at] + GAMMA * following - values[at] + GAMMA * lam * later
        found[at], following = later, values[at]
    return found


def paid(document: Document, divergence: Tensor) -> list[float]:
    """Each trained token gets its reward and those of tokens after it that do not train, less the divergence."""
    found: list[float] = []
    for place in range(1, len(document.tokens)):
        if document.loss_mask[place]:
            found.append(-KL * divergence[place - 1].item())
        if found:
            found[-1] += float(document.rewards[place])
    return found


def learning_rate(update: int, peak: float, end: int) -> float:
    """Two updates of warm-up, then a cosine to `end`."""
    if update < 2:
        return peak * (update + 1) / 2
    return peak * 0.5 * (1 + np.cos(np.pi * min(1.0, (update - 2) / (end - 2))))


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    policy, reference = tiny_models.new_model("tied"), tiny_models.new_model("tied", seed=7)
    critic = tiny_models.new_critic("tied")
    for name, model in (("tied", policy), ("other", reference), ("tied-critic", critic)):
        tiny_models.save(model, folder / "models" / name)
    optimizers = {"policy": tiny_models.adamw(policy), "critic": tiny_models.adamw(critic)}
    tensors = {f"policy-0.{n}": w for n, w in tiny_models.in_files(policy).items()}
    tensors |= {f"critic-0.{n}": w for n, w in tiny_models.in_files(critic).items()}
    clipped = bounded = 0
    explained = []
    for step in range(STEPS):
        batch = documents(step)
        inside = [torch.from_numpy(document.loss_mask[1:] > 0) for document in batch]
        with torch.no_grad():
            begin = [scored(policy, document) for document in batch]
            frozen = [valued(critic, document)[own] for document, own in zip(batch, inside, strict=True)]
            apart = [one - scored(reference, document) for one, document in zip(begin, batch, strict=True)]
        advantages, returns = [], []
        for document, values, far in zip(batch, frozen, apart, strict=True):
            rewards = paid(document, far)
            advantages.append(torch.tensor(estimates(rewards, values.tolist(), LAM)))
            returns.append(torch.tensor(estimates(rewards, values.tolist(), LAM_VALUES)) + values)
        every = torch.cat(advantages).double()
        advantages = [((a - every.mean()) / every.std()).float() for a in advantages]
        errors = torch.cat(returns) - torch.cat(frozen)
        explained.append(1 - (errors.var(correction=0) / torch.cat(returns).var(correction=0)).item())
        for update in range(PARTS):
            own = minibatches([d.serial for d in batch], PARTS, seed=11, step=step, epoch=0)[update]
            tokens = sum(int(inside[n].sum()) for n in own)
            gain, error = torch.zeros(()), torch.zeros(())
            for n in own:
                ratio = (scored(policy, batch[n]) - begin[n])[inside[n]].exp()
                cut = ratio.clamp(1 - BOUND, 1 + BOUND) * advantages[n]
                clipped += int((cut < ratio * advantages[n]).sum()) if step else 0
                gain = gain + torch.minimum(ratio * advantages[n], cut).sum()
                value = valued(critic, batch[n])[inside[n]]
                near = frozen[n] + (value - frozen[n]).clamp(-CLIP, CLIP)
                squares, others = (value - returns[n]) ** 2 / 2, (near - returns[n]) ** 2 / 2
                bounded += int((others > squares).sum())
                error = error + torch.maximum(squares, others).sum()
            number = step * PARTS + update
            parts = {"critic": (critic, error, number, VALUE_LR, STEPS)}
            if step:
                parts["policy"] = (policy, -gain, number - PARTS, LR, STEPS - 1)
            for name, (model, total, done, peak, steps) in parts.items():
                model.zero_grad()
                (total / tokens).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
                for group_of in optimizers[name].param_groups:
                    group_of["lr"] = learning_rate(done, peak, steps * PARTS)
                optimizers[name].step()
    tensors |= {f"policy.{n}": w for n, w in tiny_models.in_files(policy).items()}
    tensors |= {f"critic.{n}": w for n, w in tiny_models.in_files(critic).items()}
    forked_ranks.write(
        folder / "reference", 0, tensors, {"clipped": clipped, "bounded": bounded, "explained": explained}
    )


# ---------------------------------------------------------------- Megatron


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    critic = CRITIC | {"path": str(folder / "models" / "tied-critic")}
    told_of = {"critic": critic, "optimizer": {"lr": LR}, "reference": "other", "steps": STEPS, "minibatches": PARTS}
    backend = tiny_models.backend(folder, spec | told_of)
    config = config_of()
    source = RolloutSource(config)
    source.attach(backend, 0)
    told, tensors = [], {}
    for step in range(STEPS):
        batch = documents(step)
        parts = plan_updates(backend, batch, config, step)[backend.data_parallel_rank]
        updates = build_updates(dict(enumerate(batch)), parts, config)
        result, done = train_updates(step, updates, backend, source, lambda: None)
        told.append(dict(critic_figures(done.critic)) | {"loss": result.loss, "tokens": done.tokens, "lr": result.lr})
        told[-1] |= {"clipped": result.sums.get("objective_clipped", 0.0)}
        if not step:
            tensors |= {f"alone.{n}": w.clone() for n, w in backend.export()}
    tensors |= {f"policy.{n}": w.clone() for n, w in backend.export()}
    tensors |= {f"critic.{n}": w.clone() for n, w in backend.critic.export()}
    counts = {"updates": [backend.optimizer.steps, backend.critic.optimizer.steps], "cells": len(cells(backend))}
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, {"steps": told} | counts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(tmp_path_factory, group(job_reference, [{}]), group(job_layout, LAYOUTS, shared=True))


@forked_ranks.named(LAYOUTS)
def test_steps_of_policy_and_critic_are_those_of_plain_loops(folder: Path, spec: dict[str, Any]) -> None:
    found, reference = Outcome(folder / spec["name"]), Outcome(folder / "reference")
    (expected,) = reference.ranks
    for name in ("policy", "critic"):
        check_update(reference.section(f"{name}-0"), found.section(name), reference.section(name))
    same(found.section("alone"), reference.section("policy-0"))
    for rank in found.ranks:
        steps = rank["steps"]
        assert rank["updates"] == [PARTS * (STEPS - 1), PARTS * STEPS]
        assert [step["lr"] > 0 for step in steps] == [False, True, True], "the critic trains alone first"
        assert all(step["tokens"] == alone["tokens"] for step, alone in zip(steps, _one(folder), strict=True))
        assert [step["value_explained"] for step in steps] == pytest.approx(expected["explained"], rel=1e-2, abs=1e-3)
        for step, alone in zip(steps, _one(folder), strict=True):
            for name in ("value_loss", "value_grad_norm", "value_lr", "return_mean", "loss"):
                assert step[name] == pytest.approx(alone[name], rel=2e-3, abs=1e-6), name


def _one(folder: Path) -> list[dict[str, float]]:
    return Outcome(folder / "one").ranks[0]["steps"]


def test_the_case_makes_use_of_both_bounds(folder: Path) -> None:
    (expected,) = Outcome(folder / "reference").ranks
    assert expected["clipped"] > 5 and expected["bounded"] > 5
    steps = _one(folder)
    assert sum(step["clipped"] for step in steps) == pytest.approx(expected["clipped"], abs=3)
    assert sum(step["value_clip_fraction"] * step["tokens"] for step in steps) == pytest.approx(
        expected["bounded"], abs=3
    )
