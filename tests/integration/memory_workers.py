"""The ranks behind test_memory.py; nothing is asserted here."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

from tests.integration import fork_rig, tiny_models


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    tiny_models.make(folder / "models" / spec["kind"], spec["kind"])


def job_recompute(folder: Path, spec: dict[str, Any]) -> None:
    """Gradients of one pass, and how often layers and their attention ran forward."""
    backend = tiny_models.backend(folder, spec)
    calls = {"layer": 0, "attention": 0}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    for chunk in backend.chunks:
        for layer in chunk.module.decoder.layers:
            layer.register_forward_pre_hook(count("layer"))
            layer.self_attention.core_attention.register_forward_pre_hook(count("attention"))
    totals = backend.schedule.train(
        tiny_models.share(backend, 0), tiny_models.policy_loss, tiny_models.TEMPERATURE, entropy=True
    )
    tensors = {}
    for i, chunk in enumerate(backend.chunks):
        for kind in ("buffers", "expert_parallel_buffers"):
            for j, buffer in enumerate(getattr(chunk, kind)):
                tensors[f"gradient{backend.rank}.{i}.{kind}.{j}"] = buffer.grad_data.clone()
    fork_rig.write(folder / spec["name"], backend.rank, tensors, {"loss": totals.loss_sum, "calls": calls})


def job_offload(folder: Path, spec: dict[str, Any]) -> None:
    """Steps with everything that happens between them, and what was on the device meanwhile."""
    backend = tiny_models.backend(folder, spec)
    result: dict[str, Any] = {"idle": [], "steps": []}
    tensors: dict[str, torch.Tensor] = {}
    for number in range(3):
        result["idle"].append(_on_device(backend))
        reference = backend.reference_logprobs(tiny_models.share(backend, 0), tiny_models.TEMPERATURE)
        policy = backend.logprobs(tiny_models.share(backend, 0), tiny_models.TEMPERATURE)
        tensors |= {f"{number}.reference.{backend.data_parallel_rank}": torch.cat(reference)}
        tensors |= {f"{number}.policy.{backend.data_parallel_rank}": torch.cat(policy)}
        result["steps"].append(tiny_models.step(backend, number))
    backend.start_checkpoint(folder / "checkpoints" / spec["name"])
    result["steps"].append(tiny_models.step(backend, 3))
    backend.checkpoint_done(wait=True)
    result["idle"].append(_on_device(backend))
    tensors |= {f"went.{n}": t.clone() for n, t in backend.export()}
    backend.load_checkpoint(folder / "checkpoints" / spec["name"])
    result["idle"].append(_on_device(backend))
    result["steps"].append(tiny_models.step(backend, 3))
    tensors |= {f"came.{n}": t.clone() for n, t in backend.export()}
    backend.save_hf(folder / "saved" / spec["name"])
    fork_rig.write(folder / spec["name"], backend.rank, tensors, result)


def job_resident(folder: Path, spec: dict[str, Any]) -> None:
    """Resident memory of a process between steps, while gradients are in use, and after that."""
    mmap_threshold = -3  # of mallopt(3): else glibc raises it and keeps large blocks in its heap
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20) == 1
    backend = tiny_models.backend(folder, spec)
    for number in range(2):
        tiny_models.step(backend, number)
    gc.collect()
    resident = [_resident()]
    with backend.offload.gradients():
        resident.append(_resident())
    resident.append(_resident())
    gradients = sum(b.grad_data.numel() * 4 for chunk in backend.chunks for b in chunk.buffers)
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"resident": resident, "gradients": gradients})


def _resident() -> int:
    words = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return next(int(word[1]) * 1024 for word in words if word[0] == "VmRSS:")


def _on_device(backend: Any) -> dict[str, list[int]]:
    """Bytes of the distinct storages of each kind."""
    parameters = [p.data for chunk in backend.chunks for p in chunk.module.parameters()]
    buffers = [b for chunk in backend.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    models = {p.untyped_storage()._cdata for p in parameters}
    own = []
    for optimizer in backend.optimizer.megatron.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                states = optimizer.optimizer.state.get(parameter, {})
                own += [t for t in (parameter.data, *states.values()) if t.dim()]
    own = [t for t in own if t.untyped_storage()._cdata not in models]

    def sizes(tensors: list[torch.Tensor]) -> list[int]:
        return [t.untyped_storage().nbytes() for t in tensors]

    return {
        "parameters": sizes(parameters),
        "gradients": sizes([b.grad_data for b in buffers]),
        "optimizer": sizes(own),
    }


JOBS = {"models": job_models, "recompute": job_recompute, "offload": job_offload, "resident": job_resident}
