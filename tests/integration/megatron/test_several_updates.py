"""Several updates per batch in real Megatron, under several layouts, against transformers and torch's AdamW.

The frozen policy, the divergence that ends a batch and the weights must not depend on who computed what.
"""

import copy
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config.schema import Config
from learner.batch.packing import Document, build
from learner.batch.updates import Update, build_updates, minibatches, plan_updates
from learner.loop.rollout_source import RolloutSource
from learner.loop.step_metrics import UpdateFigures
from learner.loop.updates import train_updates
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group
from tests.rigs.tiny_models import OPTIMIZER, TEMPERATURE, VOCABULARY, check_update

STEPS, GROUPS, SIZE, EPOCHS, PARTS = 2, 5, 3, 2, 2
UPDATES = EPOCHS * PARTS
MOST = 9  # staleness.max_updates of `bounded`
LR = 1e-4  # a larger one moves ratios so far that rounding decides what is clipped
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {"clip_low": 0.004, "clip_high": 0.004, "kl_coefficient": 0.3, "entropy_coefficient": 0.02},
    "bounded": {"proximal": "loglinear", "clip_low": 0.05, "clip_high": 0.05, "reduction": "sequence_mean"},
    "stopped": {"kl_stop": 6e-5},
}
OFFLOADED = {f"offload_{part}": True for part in ("optimizer", "gradients", "parameters")}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"ranks": 2},
    "tp2": {"parallel": {"tensor": 2}},
    "cp2": {"parallel": {"context": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
    "dp2-offload": {"ranks": 2, "memory": OFFLOADED},
}
# Every layout has the loss that it could get wrong.
PAIRS = {
    "clipped": ("one", "tp2", "dp2-offload"),  # log-probabilities that are frozen on cut and on moved weights
    "bounded": ("one", "cp2", "dp2"),  # means over samples that ranks share; ranks whose part of an update is empty
    "stopped": ("one", "pp2", "dp2"),  # stages without the divergence, replicas with a part of it
}
SPECS = [
    {"name": f"{loss}-{name}", "loss": loss, "optimizer": {"lr": LR}, **LAYOUTS[name]}
    for loss, names in PAIRS.items()
    for name in names
]
DEALT = [  # an epoch of updates that have few documents, which ranks take in turns
    SPECS[0] | {"name": f"dealt-{name}", "epochs": 1, "minibatches": GROUPS, **LAYOUTS[name]} for name in ("one", "dp2")
]
STILL = [
    {"name": f"still-{name}-{objective}", "objective": objective, "optimizer": {"lr": 0.0}, **more}
    for name, objective, more in (
        ("dp2", "gspo", {"ranks": 2}),
        ("moe", "ppo_clip", {"kind": "moe", "moe": {"replay_routing": True}}),
        ("bf16", "ppo_clip", {"dtype": "bfloat16"}),  # gspo's bounds are narrower than bfloat16's rounding
    )
]


def config_of(
    loss: dict[str, Any], max_updates: int | None = None, epochs: int = EPOCHS, minibatches: int = PARTS
) -> Config:
    learner = {"epochs": epochs, "minibatches": minibatches, "groups_per_step": GROUPS, "micro_batch_tokens": 64}
    document = {
        "run": {"name": "updates", "dir": "unset", "steps": STEPS, "seed": 11},
        "model": {"path": "unset"},
        "tasks": {"environment": "addition", "dataset": "unset"},
        "learner": learner | {"loss": loss},
        "rollout": {"temperature": TEMPERATURE, "group_size": SIZE},
        "staleness": {"max_updates": max_updates},
    }
    return msgspec.convert(document, Config)


def documents(step: int, behavior: dict[str, Tensor], routed: bool = False) -> list[Document]:
    """A step's documents, the same on every rank; tokens of one document have one version."""
    draw = np.random.default_rng(50 + step)
    made = []
    for number in range(GROUPS * SIZE):
        length = int(draw.integers(3, 40))
        known = behavior.get(f"{step}.{number}")
        experts = np.stack([draw.permutation(8)[:2] for _ in range(length * 4)]).reshape(length, 4, 2)[:, :2]
        made.append(
            Document(
                tokens=draw.integers(3, VOCABULARY, length).astype(np.int32),
                loss_mask=np.r_[0, draw.random(length - 2) < 0.8, 1].astype(np.uint8),
                behavior_logprobs=np.zeros(length, np.float32) if known is None else known.numpy(),
                staleness=np.full(length, draw.integers(0, 4), np.int8),
                advantage=float(draw.normal()),
                serial=number // SIZE,
                sample=number % SIZE,
                routed_experts=experts.astype(np.uint8) if routed else None,
            )
        )
    return made


# ---------------------------------------------------------------- plain transformers


def scored(model: Any, document: Document) -> tuple[Tensor, Tensor]:
    """([L - 1] log-probabilities of the targets, [L - 1] entropies)."""
    (pack,) = build([document], [[0]])
    return tiny_models.hugging_face(model, pack)


def job_behavior(folder: Path, spec: dict[str, Any]) -> None:
    """The samplers' log-probabilities are those of the first policy and some noise."""
    model = tiny_models.save(tiny_models.new_model("tied"), folder / "models" / "tied")
    tiny_models.save(tiny_models.new_model("moe"), folder / "models" / "moe")
    noise = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        for number, document in enumerate(documents(step, {})):
            row, _ = scored(model, document)
            moved = row.detach() + 0.2 * torch.randn(len(row), generator=noise)
            found[f"{step}.{number}"] = torch.cat([torch.zeros(1), moved])
    save_file(found, folder / "behavior.safetensors")


def rate_of(update: int) -> float:
    """Two updates of warm-up, then a cosine that ends at the tenth."""
    if update < 2:
        return LR * (update + 1) / 2
    return LR * 0.5 * (1 + math.cos(math.pi * (update - 2) / 8))


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """Every update in plain loops over documents, with one forward pass of each document at the batch's beginning."""
    model, behavior = tiny_models.new_model("tied"), load_file(folder / "behavior.safetensors")
    first = copy.deepcopy(model)
    loss, name = LOSSES[spec["loss"]], spec["loss"]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    done, counts, clipped = 0, [], 0
    for step in range(STEPS):
        batch = documents(step, behavior)
        with torch.no_grad():
            begin = [scored(model, document)[0] for document in batch]
            reference = [scored(first, document)[0] for document in batch]
        counts.append(0)
        for update in range(UPDATES):
            parts = minibatches([d.serial for d in batch], PARTS, seed=11, step=step, epoch=update // PARTS)
            total, tokens, samples, moved, bounded = torch.zeros(()), 0, 0, 0.0, 0
            for n in parts[update % PARTS]:
                age = int(batch[n].staleness[0])
                inside = torch.from_numpy(batch[n].loss_mask[1:] > 0)
                if name == "bounded" and age * UPDATES + update > MOST:
                    continue
                now, entropy = scored(model, batch[n])
                own = torch.from_numpy(batch[n].behavior_logprobs[1:])
                share = (max(age, 1) - 1) / max(age, 1)
                center = own + share * (begin[n] - own) if "proximal" in loss else begin[n]
                weight = (center - own).exp().clamp(max=2.0)
                ratio, low, high = (now - center).exp(), loss.get("clip_low", 0.2), loss.get("clip_high", 0.28)
                cut = ratio.clamp(1 - low, 1 + high) * batch[n].advantage
                bounded += int((inside & (cut < ratio * batch[n].advantage)).sum())
                terms = weight * torch.minimum(ratio * batch[n].advantage, cut)
                terms = terms + loss.get("entropy_coefficient", 0.0) * entropy
                far = reference[n] - now
                terms = terms - loss.get("kl_coefficient", 0.0) * (far.exp() - 1 - far).clamp(max=10)
                count = int(inside.sum())
                total = total + terms[inside].sum() / (count if name == "bounded" else 1)
                tokens, samples = tokens + count, samples + 1
                way = (now - begin[n]).detach()[inside]
                moved += (way.exp() - 1 - way).sum().item()
            if moved / max(tokens, 1) > loss.get("kl_stop", math.inf):
                break
            if not tokens:
                continue
            optimizer.zero_grad()
            (-total / (samples if name == "bounded" else tokens)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
            for own_group in optimizer.param_groups:
                own_group["lr"] = rate_of(done)
            optimizer.step()
            done, counts[-1], clipped = done + 1, counts[-1] + 1, clipped + bounded
    found = {f"weight.{n}": w for n, w in tiny_models.in_files(model).items()}
    found |= {f"before.{n}": w for n, w in tiny_models.in_files(first).items()}
    forked_ranks.write(folder / f"reference-{name}", 0, found, {"updates": counts, "clipped": clipped})


# ---------------------------------------------------------------- Megatron


def trained(backend: Any, config: Config, step: int, batch: list[Document]) -> tuple[Any, UpdateFigures]:
    source = RolloutSource(config)
    source.attach(backend, step)
    parts = plan_updates(backend, batch, config, step)[backend.data_parallel_rank]
    updates: list[Update] = build_updates(dict(enumerate(batch)), parts, config)
    return train_updates(step, updates, backend, source, lambda: None)


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    backend, behavior = tiny_models.backend(folder, spec), load_file(folder / "behavior.safetensors")
    parts = {name: spec[name] for name in ("epochs", "minibatches") if name in spec}
    config = config_of(LOSSES[spec["loss"]], MOST if spec["loss"] == "bounded" else None, **parts)
    told = []
    for step in range(STEPS):
        result, done = trained(backend, config, step, documents(step, behavior))
        told.append(vars(done) | {"lr": result.lr, "loss": result.loss, "clipped": result.sums["objective_clipped"]})
        told[-1] |= {"by_age": sum(result.sums["tokens_by_age"]), "reference": result.sums.get("kl")}
    weights = tiny_models.exported(backend, "weight")
    result = {"steps": told, "done": backend.optimizer.steps}
    forked_ranks.write(folder / spec["name"], backend.rank, weights, result)


def job_still(folder: Path, spec: dict[str, Any]) -> None:
    """A learning rate of 0: whatever differs between the frozen pass and the updates is arithmetic."""
    backend, behavior = tiny_models.backend(folder, spec), load_file(folder / "behavior.safetensors")
    batch = documents(0, behavior, routed=backend.routing_shape is not None)
    result, done = trained(backend, config_of({"objective": spec["objective"]}), 0, batch)
    figures = {"clipped": result.sums["objective_clipped"], "batch_kl": done.batch_kl, "updates": done.count}
    figures |= {name: result.sums.get(name) for name in ("mismatch", "routing_replayed")}
    forked_ranks.write(folder / spec["name"], backend.rank, {}, figures)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(job_behavior, [{}]),
        group(job_reference, [{"loss": loss} for loss in LOSSES], shared=True),
        group(job_layout, [*SPECS, *DEALT], shared=True),
        group(job_still, STILL, shared=True),
    )


@forked_ranks.named(SPECS)
def test_the_updates_of_every_layout_are_those_of_plain_loops(folder: Path, spec: dict[str, Any]) -> None:
    loss = spec["loss"]
    found, reference = Outcome(folder / spec["name"]), Outcome(folder / f"reference-{loss}")
    (expected,) = reference.ranks
    check_update(reference.section("before"), found.section("weight"), reference.section("weight"))
    for rank in found.ranks:
        assert [step["count"] for step in rank["steps"]] == expected["updates"]
        assert rank["done"] == sum(expected["updates"])
        assert rank["steps"][-1]["lr"] == pytest.approx(rate_of(rank["done"] - 1)), "the schedule counts updates"
        assert sum(step["clipped"] for step in rank["steps"]) == pytest.approx(expected["clipped"], abs=3)
        for step in rank["steps"]:
            assert step["by_age"] == step["tokens"], "a token counts once"
    one = Outcome(folder / f"{loss}-one").ranks[0]["steps"]
    for rank in found.ranks:
        for step, alone in zip(rank["steps"], one, strict=True):
            for name in ("loss", "batch_kl", "age_mean", "age_max", "tokens", "grad_norm_max"):
                assert step[name] == pytest.approx(alone[name], rel=2e-3, abs=1e-7), name


def test_updates_whose_documents_ranks_take_in_turns_are_those_of_one_rank(folder: Path) -> None:
    one, found = (Outcome(folder / spec["name"]) for spec in DEALT)
    before = Outcome(folder / "reference-clipped").section("before")
    check_update(before, found.section("weight"), one.section("weight"))
    for rank in found.ranks:
        for step, alone in zip(rank["steps"], one.ranks[0]["steps"], strict=True):
            assert step["count"] == GROUPS
            for name in ("loss", "batch_kl", "age_mean", "tokens", "grad_norm_max"):
                assert step[name] == pytest.approx(alone[name], rel=2e-3, abs=1e-7), name


def test_the_cases_make_use_of_bounds_stops_and_ages(folder: Path) -> None:
    """Else the comparisons above would prove little."""
    told = {loss: Outcome(folder / f"reference-{loss}").ranks[0] for loss in LOSSES}
    assert told["clipped"]["updates"] == told["bounded"]["updates"] == [UPDATES] * STEPS
    assert told["clipped"]["clipped"] > 20 and told["bounded"]["clipped"] > 20
    assert 0 < min(told["stopped"]["updates"]) < UPDATES
    bounded, clipped = (Outcome(folder / f"{loss}-one").ranks[0]["steps"] for loss in ("bounded", "clipped"))
    assert all(step["age_max"] == MOST for step in bounded)
    assert all(step["tokens"] < whole["tokens"] for step, whole in zip(bounded, clipped, strict=True))
    assert all(step["reference"] > 0 for step in clipped)


@forked_ranks.named(STILL)
def test_at_a_learning_rate_of_zero_no_token_is_clipped(folder: Path, spec: dict[str, Any]) -> None:
    for rank in Outcome(folder / spec["name"]).ranks:
        assert rank["updates"] == UPDATES
        assert rank["clipped"] == 0
        assert abs(rank["batch_kl"]) < (1e-3 if "bf16" in spec["name"] else 1e-8)
        assert rank["mismatch"] > 1, "the sampler's log-probabilities are others"
        assert (rank["routing_replayed"] is not None) == ("moe" in spec["name"])
