"""Megatron chunks to Hugging Face tensors and folders: the whole model, or each rank's own part of it.

So that no rank gathers the whole model, the first of the ranks that have a share of a tensor sends it:

- Dense tensors (attention, norms, routers, shared experts, embeddings) come from the pipeline stage that has the layer.
  There tensor-parallel rank 0 of data-parallel rank 0 sends them; data parallelism includes context parallelism.
- Experts come from the pipeline stage and the expert-parallel rank that have them. There expert-tensor-parallel rank 0
  of expert-data-parallel rank 0 sends them.
- Tied embeddings come from the first stage, also where the model's files have both names.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file
from torch import Tensor

from common.process.files import pretty_json
from learner.megatron import parallel
from learner.megatron.conversion import bridge_fixes, hf_folder
from learner.megatron.conversion.model import Model
from learner.megatron.lora import Adapters

EXPORT_OPTIONS = {"cpu": False, "show_progress": False, "merge_adapter_weights": False}
SHARD_BYTES = 4 << 30


class Exporter:
    """Streams the current weights in Hugging Face terms, with adapters merged into the layers that have some.

    Every rank's parameters must be gathered.
    """

    def __init__(self, model: Model, adapters: Adapters) -> None:
        self.model = model
        self.adapters = adapters
        self.part = PartExporter(model, adapters)

    @torch.no_grad()
    def tensors(self, trained: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, as learner.backend_protocol.Backend.export. Collective.

        Without `trained` as export_frozen.
        """
        model = self.model
        tasks: Any = self.adapters.merged(model.tasks, trained)  # the bridge takes a list, but only iterates over it
        yield from model.bridge.export_hf_weights(model.chunks, conversion_tasks=tasks, **EXPORT_OPTIONS)

    def save(self, source: Path, path: Path) -> None:
        """A folder like `source` with the current weights, complete or absent. Collective."""
        write_folder(source, path, self.tensors())


def write_folder(
    source: Path, path: Path, tensors: Iterable[tuple[str, Tensor]], changed: Mapping[str, Any] | None = None
) -> None:
    """A folder like `source` with these tensors, complete or absent; `changed` are keys of its config.json. Collective.

    Every rank passes tensors, and consumes them to their end.
    """
    if dist.get_rank() == 0:
        with hf_folder.new_folder(path) as staging:
            _write_shards(staging, tensors)
            hf_folder.copy_companions(source, staging)
            if changed:
                file = staging / "config.json"
                file.write_bytes(pretty_json(json.loads(file.read_bytes()) | dict(changed)))
    else:
        for _ in tensors:
            pass
    parallel.barrier()


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copies in host memory, in parts of at most SHARD_BYTES."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
            size = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    yield shard


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """One file per shard, and an index if there are several."""
    files: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors):
        file = folder / f"part-{len(files)}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors leaves it readable by the owner alone
        files.append((file, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # before the next one fills
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, (file, names) in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        file.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_bytes(pretty_json(index))


class PartExporter:
    """Runs the bridge's export on the parameters that this rank has a share of."""

    def __init__(self, model: Model, adapters: Adapters) -> None:
        self._model = model
        self._adapters = adapters
        # A mapping does not ask other stages for what it knows already, and here it never asks. If a full export used
        # the same mapping, its owner would be missing in the collectives of the stages that still ask.
        self._tasks = [
            replace(task, mapping=task.mapping.resolve(())) for task in model.tasks if task is not None and _kept(task)
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of this rank's part, as learner.backend_protocol.Backend.export_part. Collective."""
        return self._run(self._tasks)

    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of this rank's part, as learner.backend_protocol.Backend.part_layout; may precede any export.

        The bridge converts tensors without memory: no weights move and no rank waits.
        """
        leading = [task for task in self._tasks if _leads(task)]
        empty = [replace(task, param_weight=torch.empty_like(task.param_weight, device="meta")) for task in leading]
        return [(name, tuple(tensor.shape)) for name, tensor in self._run(empty)]

    @torch.no_grad()
    def _run(self, tasks: list[Any]) -> Iterator[tuple[str, Tensor]]:
        yields = False

        def announced() -> Any:
            nonlocal yields
            for task in self._adapters.merged(tasks):
                yields = _leads(task)
                yield task

        bridge = self._model.bridge
        chunks = self._model.chunks
        stream = iter(bridge.export_hf_weights(chunks, conversion_tasks=announced(), **EXPORT_OPTIONS))
        while True:
            with bridge_fixes.within_the_part():  # the caller may start a full export when it has the tensor
                named = next(stream, None)
            if named is None:
                return
            if yields:
                yield named


def _kept(task: Any) -> bool:
    """Whether this rank has a share of the parameter, and is in the first of the replicas."""
    if task.param_weight is None:  # another stage has it, or it is the last stage's copy of tied embeddings
        return False
    if task.mapping.is_expert:
        return mpu.get_expert_data_parallel_rank() == 0
    return mpu.get_data_parallel_rank(with_context_parallel=True) == 0


def _leads(task: Any) -> bool:
    return task.mapping.tp_rank == 0  # an expert's mapping tells the rank in expert tensor parallelism
