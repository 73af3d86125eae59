"""The ranks behind test_reference.py; nothing is asserted here."""

from pathlib import Path
from typing import Any

import torch

from tests.integration import fork_rig, tiny_models


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    """A policy, another model of its shape, and what Hugging Face makes of both."""
    tensors = {}
    for name, seed in ((spec["kind"], 0), (f"{spec['kind']}-other", 7)):
        model = tiny_models.make(folder / "models" / name, spec["kind"], seed)
        for i, batch in enumerate(tiny_models.microbatches(0)):
            tensors[f"{name}.{i}"] = tiny_models.hugging_face_logprobs(model, batch)
    fork_rig.write(folder / f"hugging-face-{spec['kind']}", 0, tensors, {})


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """The reference's log-probabilities between steps of the policy, and what became of the policy's weights."""
    backend = tiny_models.backend(folder, spec)
    tensors: dict[str, torch.Tensor] = {}
    same, steps = [], []
    for number in range(3):
        before = _everything(backend)
        rows = backend.reference_logprobs(tiny_models.share(backend, 0), tiny_models.TEMPERATURE)
        for i, row in enumerate(rows):
            tensors[f"{number}.{i * backend.data_parallel_size + backend.data_parallel_rank}"] = row
        same.append(all(torch.equal(a, b) for a, b in zip(before, _everything(backend), strict=True)))
        steps.append(tiny_models.step(backend, number))
    policy = backend.logprobs(tiny_models.share(backend, 0), tiny_models.TEMPERATURE)
    tensors |= {f"policy.{backend.data_parallel_rank}": policy[0]}
    fork_rig.write(folder / spec["name"], backend.rank, tensors, {"same": same, "steps": steps})


def job_plain(folder: Path, spec: dict[str, Any]) -> None:
    """The same steps without a reference."""
    backend = tiny_models.backend(folder, spec)
    steps = [tiny_models.step(backend, number) for number in range(3)]
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"steps": steps})


def job_refused(folder: Path, spec: dict[str, Any]) -> None:
    """A reference of another shape, when the backend is made: before anything was sampled."""
    from common.errors import UsageError

    message = ""
    try:
        tiny_models.backend(folder, spec)
    except UsageError as error:
        message = str(error)
    fork_rig.write(folder / spec["name"], 0, {}, {"message": message})


def _everything(backend: Any) -> list[torch.Tensor]:
    """Copies of the parameters, the buffers and the optimizer's main parameters."""
    tensors = [t for chunk in backend.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    for optimizer in backend.optimizer.megatron.chained_optimizers:
        tensors += [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    return [t.detach().clone() for t in tensors]


JOBS = {"models": job_models, "reference": job_reference, "plain": job_plain, "refused": job_refused}
