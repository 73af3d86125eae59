"""Configs in configs/ for named models, in miniature: their layouts train as one rank does.

One of each architecture is tried, of RL or of supervised tuning; configs/certificates has the others of the same model.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from common.config.loading import load_either
from common.config.parallel_layout import layers_per_stage
from learner.batch.packing import Document, build, plan
from learner.loss.losses import cross_entropy, policy_loss
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group
from tests.rigs.layouts import RANKS, VOCABULARY, miniature
from tests.rigs.processes import ROOT

STEPS = 2
NAMES = ["llama-3.1-70b", "qwen3-235b-a22b", "mixtral-8x7b-sft", "deepseek-v3"]


def job_model(folder: Path, spec: dict[str, Any]) -> None:
    """A folder with random weights; norms and biases are not trivial."""
    small = miniature(spec["name"])
    path = folder / "models" / small.name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(small.document))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    tiny_models.save(tiny_models.uneven(model), path)


def documents(
    behavior: list[np.ndarray] | None, supervised: bool, routing: tuple[int, int] | None = None
) -> list[Document]:
    """Sixteen documents of 5 to 40 tokens, never token 0; with `routing` (MoE layers, experts) also a choice of two."""
    random = np.random.default_rng(3)
    out = []
    for i, length in enumerate(random.integers(5, 41, 16)):
        mask = (np.arange(length) >= length // 3).astype(np.uint8)
        tokens = random.integers(3, VOCABULARY, length).astype(np.int32)
        advantage = float(random.normal())
        if supervised:
            out.append(Document(tokens, mask))
            continue
        noise = random.normal(0, 0.1, length).astype(np.float32)
        logprobs = noise if behavior is None else behavior[i] + noise
        routed = None
        if routing is not None:
            layers, experts = routing
            routed = random.random((length, layers, experts)).argsort(-1)[..., :2].astype(np.int16)
        out.append(Document(tokens, mask, logprobs, np.zeros(length, np.int32), advantage, routed_experts=routed))
    return out


def job_train(folder: Path, spec: dict[str, Any]) -> None:
    """Steps on one batch, under the miniature's layout or on one rank, which also makes the behavior policy's."""
    small = miniature(spec["name"])
    backend = small.backend(folder, small.alone() if spec["alone"] else small.learner)
    supervised = small.max_tokens is None
    file = folder / f"behavior-{small.name}.npz"

    def packed(made: list[Document]) -> tuple[list[list[int]], list[Any]]:
        """One rank takes the microbatches of all: a balancing loss is not linear in them."""
        replicas = small.learner.world_size // small.learner.parallel.model_ranks
        bound = small.learner.micro_batch_tokens
        dealt = plan(made, replicas, bound, 2 * small.learner.parallel.context)
        numbers = list(chain(*dealt)) if spec["alone"] else dealt[backend.data_parallel_rank]
        return numbers, build(made, numbers)

    if spec["alone"] and not supervised:
        np.savez(file, *by_document(backend, *packed(documents(None, supervised, small.routing))))
    behavior = None
    if not supervised:
        with np.load(file) as saved:
            behavior = [saved[name] for name in saved.files]
    made = documents(behavior, supervised, small.routing)
    numbers, mine = packed(made)
    loss = cross_entropy
    if not supervised:
        loss = policy_loss(small.learner.loss, small.max_tokens)
    before = objective(backend, made, numbers, mine, supervised)
    steps = [backend.train_step(mine, loss) for _ in range(STEPS)]
    after = objective(backend, made, numbers, mine, supervised)
    result = dict(steps=[[s.loss, s.grad_norm] for s in steps], before=before, after=after)
    result["replica"] = backend.data_parallel_rank
    name = f"{small.name}-{'one' if spec['alone'] else 'all'}"
    forked_ranks.write(folder / name, backend.rank, {}, result)


def by_document(backend: Any, numbers: list[list[int]], mine: list[Any]) -> list[np.ndarray]:
    """[L] log-probabilities per document, 0 for the first token."""
    found: dict[int, np.ndarray] = {}
    for inside, batch, values in zip(numbers, mine, backend.logprobs(mine), strict=True):
        for number, row in zip(inside, values.split(list(batch.document_lengths)), strict=False):
            found[number] = np.concatenate([np.zeros(1, np.float32), row.numpy()])
    return [found[i] for i in sorted(found)]


def objective(backend: Any, made: list[Document], numbers: list[list[int]], mine: list[Any], supervised: bool) -> float:
    """This data-parallel rank's sum of what a step must lower: -logprob, times the advantage in RL."""
    rows = by_document(backend, numbers, mine)
    order = sorted(i for inside in numbers for i in inside)
    worth = [1.0 if supervised else made[i].advantage for i in order]
    return float(-sum((row * made[i].loss_mask).sum() * w for i, row, w in zip(order, rows, worth, strict=True)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alone = [{"name": name, "alone": True} for name in NAMES]
    together = [{"name": name, "alone": False, "ranks": miniature(name).ranks} for name in NAMES]
    return forked_ranks.run(
        tmp_path_factory, group(job_model, alone, shared=True), group(job_train, alone + together, shared=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_trains_as_on_one_rank_and_a_repeated_batch_gets_better(folder: Path, name: str) -> None:
    (one,) = Outcome(folder / f"{name}-one").ranks
    together = Outcome(folder / f"{name}-all").ranks
    assert RANKS >= len(together) == miniature(name).ranks > 1
    for rank in together:
        for found, expected in zip(rank["steps"], one["steps"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
    for ranks in ([one], together):
        replicas = {rank["replica"]: rank for rank in ranks}.values()
        assert sum(rank["after"] for rank in replicas) < sum(rank["before"] for rank in replicas)


@pytest.mark.parametrize("name", NAMES)
def test_features_and_kinds_of_parallelism_are_kept(name: str) -> None:
    small, config = miniature(name), load_either(ROOT / "configs" / f"{name}.yaml")
    real = json.loads((ROOT / "configs" / "models" / Path(config.model.path).name / "config.json").read_text())
    assert small.document.keys() == real.keys()
    kept = ("architectures", "model_type", "tie_word_embeddings", "norm_topk_prob", "scoring_func", "topk_method")
    assert [small.document.get(key) for key in kept] == [real.get(key) for key in kept]
    assert (small.document.get("rope_scaling") is None) == (real.get("rope_scaling") is None)
    assert (small.learner.memory, small.learner.moe) == (config.learner.memory, config.learner.moe)
    layouts = small.learner.parallel, config.learner.parallel
    for size in ("tensor", "pipeline", "context", "expert"):
        assert (getattr(layouts[0], size) > 1) == (getattr(layouts[1], size) > 1), size
    stages = [layers_per_stage(d["num_hidden_layers"], p) for d, p in zip((small.document, real), layouts, strict=True)]
    assert (len(set(stages[0])) > 1) == (len(set(stages[1])) > 1)
