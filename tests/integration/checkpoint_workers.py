"""The ranks behind test_checkpoints.py; nothing is asserted here."""

import resource
from pathlib import Path
from typing import Any

import torch

from tests.integration import fork_rig, tiny_models

SAVED_AT = 3  # steps before the checkpoint


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    tiny_models.make(folder / "models" / spec["kind"], spec["kind"])


def job_save(folder: Path, spec: dict[str, Any]) -> None:
    """Some steps, a checkpoint, and the next step while it is being written."""
    backend = tiny_models.backend(folder, spec)
    before = [tiny_models.step(backend, n) for n in range(SAVED_AT)]
    tensors = _logprobs(backend)
    backend.start_checkpoint(folder / "checkpoints" / spec["name"])
    result: dict[str, Any] = {"before": before, "after": tiny_models.step(backend, SAVED_AT)}
    result["done"] = [backend.checkpoint_done(wait=False), backend.checkpoint_done(wait=True)]
    result["states"] = _state_digest(backend)
    tensors |= {f"after.{n}": t.clone() for n, t in backend.export()}
    fork_rig.write(folder / spec["name"], backend.rank, tensors, result)


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    """Load a checkpoint in this new process, under the given layout, and take one more step."""
    backend = tiny_models.backend(folder, spec | {"seed": 99})
    backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    tensors = _logprobs(backend)
    result = {"after": tiny_models.step(backend, SAVED_AT), "states": _state_digest(backend)}
    tensors |= {f"after.{n}": t.clone() for n, t in backend.export()}
    fork_rig.write(folder / spec["name"], backend.rank, tensors, result)


def job_fresh(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint from before the first step, loaded into an optimizer that has taken some."""
    backend = tiny_models.backend(folder, spec)
    tiny_models.save(backend, folder / "checkpoints" / spec["name"])
    steps = [[tiny_models.step(backend, n) for n in range(2)]]
    backend.load_checkpoint(folder / "checkpoints" / spec["name"])
    steps.append([tiny_models.step(backend, n) for n in range(2)])
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"steps": steps})


def job_full_disk(folder: Path, spec: dict[str, Any]) -> None:
    """A save that the file system refuses on the last rank, one that works, and a folder that cannot be made."""
    from common.errors import SlipstreamError

    backend = tiny_models.backend(folder, spec)
    tiny_models.step(backend, 0)
    messages = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt, small in enumerate((False, True, False)):
        if small and backend.rank == backend.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # writing more is an OSError
        try:
            tiny_models.save(backend, folder / "checkpoints" / f"{spec['name']}-{attempt}")
            messages.append("")
        except SlipstreamError as error:
            messages.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        backend.start_checkpoint(folder / "models" / "tied" / "config.json" / "in-a-file")
    except SlipstreamError as error:
        messages.append(str(error))
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"messages": messages})


def job_mismatch(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint of another model."""
    from common.errors import UsageError

    backend = tiny_models.backend(folder, spec)
    message = ""
    try:
        backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    except UsageError as error:
        message = str(error)
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"message": message})


def _logprobs(backend: Any) -> dict[str, torch.Tensor]:
    values = backend.logprobs(tiny_models.share(backend, 0), tiny_models.TEMPERATURE)
    size, rank = backend.data_parallel_size, backend.data_parallel_rank
    return {f"logprobs.{i * size + rank}": row for i, row in enumerate(values)}


def _state_digest(backend: Any) -> list[float]:
    """Numbers that change when any main parameter or state of the optimizer on this rank does."""
    digest = []
    for optimizer in backend.optimizer.megatron.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
                digest += [float(t.detach().double().abs().sum()) for t in tensors] + [float(state["step"])]
    return digest


JOBS = {
    "models": job_models,
    "save": job_save,
    "resume": job_resume,
    "fresh": job_fresh,
    "full_disk": job_full_disk,
    "mismatch": job_mismatch,
}
