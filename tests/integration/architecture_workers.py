"""The ranks behind test_architectures.py; the process rig is that of megatron_workers.py."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from common.errors import UsageError
from tests.integration import fork_rig
from tests.integration import megatron_workers as rig
from tests.integration.architecture_models import new_model


def job_model(folder: Path, spec: dict[str, Any]) -> None:
    """A folder as save_pretrained writes it, and what plain transformers and autograd make of the documents."""
    kind = spec["kind"]
    model = new_model(kind)
    model.save_pretrained(folder / "models" / kind)
    if spec.get("refused"):
        return
    tensors: dict[str, torch.Tensor] = {}
    loss, tokens = torch.zeros(()), 0.0
    for i, batch in enumerate(rig.microbatches(0)):
        logprobs, output = rig._reference_loss(model, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach()
        loss = loss + output.loss_sum
        tokens += batch.loss_mask.sum().item()
    (loss / tokens).backward()
    with torch.no_grad():  # saved as if they were weights, gradients get the names of the files
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients" / kind)
    buffers = {name for name, _ in model.named_buffers()}
    gradients = load_file(folder / "gradients" / kind / "model.safetensors")
    tensors |= {f"gradient.{n}": t for n, t in gradients.items() if n not in buffers}
    save_file(tensors, folder / f"reference-{kind}.safetensors")


def job_load(folder: Path, spec: dict[str, Any]) -> None:
    """The model under a layout: exported, its log-probabilities and gradients, saved again."""
    backend = rig._backend(folder, spec)
    tensors: dict[str, torch.Tensor] = {f"weight.{n}": t.clone() for n, t in backend.export()}
    mine = rig._share(backend, 0)
    for i, values in enumerate(backend.logprobs(mine, rig.TEMPERATURE)):
        tensors[f"logprobs.{i * backend.data_parallel_size + backend.data_parallel_rank}"] = values
    backend.save_hf(folder / "saved" / spec["name"])
    if spec.get("gradients", True):
        backend.optimizer.zero_grad()
        backend.schedule.train(mine, rig.policy_loss, rig.TEMPERATURE, entropy=True)
        tensors |= {f"gradient.{n}": t for n, t in rig._gradients(backend).items()}
    fork_rig.write(folder / spec["name"], backend.rank, tensors, {})


def job_refused(folder: Path, spec: dict[str, Any]) -> None:
    """What loading says, with corrections of the bridge disabled or without."""
    from learner.megatron.conversion import bridge_fixes, hf_folder, verify

    modules = {"bridge_fixes": bridge_fixes, "hf_folder": hf_folder, "verify": verify}
    names = [name.split(".") for name in spec.get("disable", [])]
    with ExitStack() as stack:
        for module, function in names:
            stack.enter_context(patch.object(modules[module], function, _nothing))
        result = {"whole": _refusal(folder, spec)}
        if names:
            result["unverified"] = _refusal(folder, spec | {"verify": False})
            stack.enter_context(patch.object(verify, "check_translation", _nothing))
            result["weights"] = _refusal(folder, spec)
    fork_rig.write(folder / "refused" / spec["name"], torch.distributed.get_rank(), {}, result)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _refusal(folder: Path, spec: dict[str, Any]) -> str | None:
    from megatron.core import parallel_state

    try:
        rig._backend(folder, spec)
    except UsageError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return None


JOBS = {"model": job_model, "load": job_load, "refused": job_refused}
