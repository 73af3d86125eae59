"""Megatron chunks to Hugging Face tensors and folders."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from common.process.files import pretty_json
from learner.megatron import parallel
from learner.megatron.conversion import hf_folder
from learner.megatron.conversion.model import Model
from learner.megatron.conversion.part_export import EXPORT_OPTIONS, PartExporter

SHARD_BYTES = 4 << 30
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class Exporter:
    """Streams the current weights in Hugging Face terms; every rank's parameters must be gathered."""

    def __init__(self, model: Model) -> None:
        self.model, self.part = model, PartExporter(model)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, as learner.backend_protocol.Backend.export. Collective."""
        model = self.model
        yield from model.bridge.export_hf_weights(model.chunks, conversion_tasks=model.tasks, **EXPORT_OPTIONS)

    def save(self, source: Path, path: Path) -> None:
        """A folder like `source` with the current weights, complete or absent. Collective."""
        if dist.get_rank() == 0:
            with hf_folder.new_folder(path) as staging:
                _write_shards(staging, self.tensors())
                for file in source.iterdir():  # configuration, tokenizer, chat template, custom code
                    if file.is_file() and file.suffix not in _WEIGHT_FILES and not file.name.endswith(".index.json"):
                        shutil.copyfile(file, staging / file.name)
        else:
            for _ in self.tensors():
                pass
        parallel.barrier()


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copies in host memory, in parts of at most SHARD_BYTES."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
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
