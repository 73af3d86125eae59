"""The ranks behind test_miniatures.py; the process rig is that of fork_rig.py, nothing is asserted here."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration import fork_rig
from tests.integration.miniatures import VOCABULARY, miniature

STEPS = 3


def job_model(folder: Path, spec: dict[str, Any]) -> None:
    """A folder with random weights; norms and biases are not trivial."""
    import transformers

    small = miniature(spec["name"])
    path = folder / "models" / small.name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(small.document))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")


def documents(behavior: list[np.ndarray] | None, supervised: bool, routing: tuple[int, int] | None = None) -> list[Any]:
    """Sixteen documents of 5 to 40 tokens, never token 0; with `routing` (MoE layers, experts) also a choice of two."""
    from learner.batch.packing import Document

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
    """Three steps on one batch, under the miniature's layout or on one rank, which also makes the behavior policy's."""
    from learner.batch.packing import build, plan
    from learner.loss.losses import cross_entropy, policy_loss

    small = miniature(spec["name"])
    backend = small.backend(folder, small.alone() if spec["alone"] else small.learner)
    supervised = small.max_tokens is None
    file = folder / f"behavior-{small.name}.npz"

    def packed(made: list[Any]) -> tuple[list[list[int]], list[Any]]:
        """One rank takes the microbatches of all: a balancing loss is not linear in them."""
        replicas, bound = small.learner.data_parallel, small.learner.micro_batch_tokens
        dealt = plan(made, replicas, bound, "micro_batch_tokens", 2 * small.learner.parallel.context)
        numbers = list(chain(*dealt)) if spec["alone"] else dealt[backend.data_parallel_rank]
        return numbers, build(made, numbers)

    if spec["alone"] and not supervised:
        np.savez(file, *_by_document(backend, *packed(documents(None, supervised, small.routing))))
    behavior = None
    if not supervised:
        with np.load(file) as saved:
            behavior = [saved[name] for name in saved.files]
    made = documents(behavior, supervised, small.routing)
    numbers, mine = packed(made)
    loss = cross_entropy
    if not supervised:
        loss = policy_loss(small.learner.loss, small.max_tokens)
    before = _objective(backend, made, numbers, mine, supervised)
    steps = [backend.train_step(mine, loss) for _ in range(STEPS)]
    after = _objective(backend, made, numbers, mine, supervised)
    result = dict(steps=[[s.loss, s.grad_norm] for s in steps], before=before, after=after, stage=_coordinates())
    name = f"{small.name}-{'one' if spec['alone'] else 'all'}"
    fork_rig.write(folder / name, backend.rank, {}, result)


def _by_document(backend: Any, numbers: list[list[int]], mine: list[Any]) -> list[np.ndarray]:
    """[L] log-probabilities per document, 0 for the first token."""
    found: dict[int, np.ndarray] = {}
    for inside, batch, values in zip(numbers, mine, backend.logprobs(mine), strict=True):
        for number, row in zip(inside, values.split(list(batch.document_lengths)), strict=False):
            found[number] = np.concatenate([np.zeros(1, np.float32), row.numpy()])
    return [found[i] for i in sorted(found)]


def _objective(backend: Any, made: list[Any], numbers: list[list[int]], mine: list[Any], supervised: bool) -> float:
    """This data-parallel rank's sum of what a step shall lower: -logprob, times the advantage in RL."""
    rows = _by_document(backend, numbers, mine)
    order = sorted(i for inside in numbers for i in inside)
    worth = [1.0 if supervised else made[i].advantage for i in order]
    return float(-sum((row * made[i].loss_mask).sum() * w for i, row, w in zip(order, rows, worth, strict=True)))


def _coordinates() -> dict[str, int]:
    from megatron.core import parallel_state as mpu

    return {"data": mpu.get_data_parallel_rank(), "first": int(torch.distributed.get_rank() == 0)}


JOBS = {"model": job_model, "train": job_train}
