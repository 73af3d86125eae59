"""Adapters of low rank beside frozen matrices, through Megatron-Bridge's PEFT (Hu et al., arXiv 2106.09685).

A linear layer with an adapter computes W x + alpha / rank * B A x. W stays as model.path has it, A and B train. A is
drawn from the seed and the layer's name, so that every layout starts alike, and B is zero (section 4.1 of the paper).
Megatron's layers are fused: queries, keys and values of a layer share one A, as do gate and up projection.

Readers of the weights get W + alpha / rank * B A: `merged` exchanges the tensors of an export on their way.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft import recompute
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora import LoRA
from safetensors.torch import save_file
from torch import Tensor

from common.config.lora import PROJECTIONS, LoraConfig
from common.process.files import pretty_json
from common.weights.wire.adapters import PREFIX, merge
from learner.megatron import parallel
from learner.megatron.conversion import hf_folder
from learner.megatron.conversion.model import Model
from learner.megatron.parallel import mpu

PART = ".adapter."  # in the name of every parameter of an adapter


class Adapters:
    """The adapters of one rank's chunks; none without learner.lora."""

    def __init__(self, model: Model, config: LoraConfig | None, base: Path, seed: int) -> None:
        """Freeze the chunks and put adapters into them, before they are wrapped. Collective.

        `base` is the folder that the chunks' weights are from.
        """
        self.config = config
        self._model = model
        self._layers: list[Any] = []
        self._of: dict[int, Any] = {}  # the layer of each frozen matrix, by identity
        # a checkpoint of adapters names it; None: checkpoints have whole models
        self.identity: dict[str, Any] | None = None
        if config is None:
            return
        # The bridge remembers models that it has patched by their address, which another model may have had.
        recompute.PEFT_RECOMPUTE_PATCHED.clear()
        logging.root.addFilter(_drop)
        peft: Any = LoRA(target_modules=config.targets, dim=config.rank, dropout=config.dropout)
        peft.alpha = config.factor  # typed as an integer
        peft(model.chunks)
        logging.root.removeFilter(_drop)
        chunks: list[Any] = model.chunks
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            for name, module in layer.named_modules():
                if isinstance(module, AdapterWrapper):
                    self._layers.append(module)
                    module.register_load_state_dict_pre_hook(_name_wrapped)
                    _draw(module.adapter, f"{seed}/{layer.layer_number}/{name}")
        self._of = {id(layer.to_wrap.weight): layer for layer in self._layers}
        digest = parallel.broadcast_bytes(hf_folder.weights_digest(base).encode() if dist.get_rank() == 0 else None)
        self.identity = {
            "rank": config.rank,
            "alpha": config.factor,
            "dropout": config.dropout,
            "targets": sorted(config.targets),
            "base": digest.decode(),
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within, the model computes as without adapters."""
        for layer in self._layers:
            layer.disable_adapter_layers()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapter_layers()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, adapters drop nothing."""
        for layer in self._layers:
            layer.adapter.dropout.eval()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.adapter.dropout.train()

    def merged(self, tasks: Iterable[Any], trained: bool = True) -> Iterator[Any]:
        """The bridge's conversion tasks, with merged weights where a layer has an adapter.

        Collective over the tensor-parallel ranks that have the layer. One merged weight is in memory at a time. Without
        `trained` the weights are those before the first step, when B was zero.
        """
        for task in tasks:
            layer = self._of.get(id(task.param_weight)) if task is not None else None
            if task is None or layer is None:
                yield task
            else:
                yield replace(task, param_weight=_merge(layer) if trained else layer.to_wrap.weight + 0.0)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in Hugging Face's peft, full tensor), A of a fused layer once for each of its matrices. Collective."""
        found = self._model.bridge.export_adapter_weights(self._model.chunks, cpu=False, show_progress=False)
        yield from ((f"{PREFIX}{name}", tensor) for name, tensor in found)

    def save(self, path: Path, base: str) -> None:
        """A folder that Hugging Face's peft loads beside the model named `base`, complete or absent. On one rank."""
        assert self.config is not None
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in self.tensors()}
        targets = [theirs for ours in PROJECTIONS if ours in self.config.targets for theirs in PROJECTIONS[ours]]
        told = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.config.rank,
            "lora_alpha": self.config.factor,
            "lora_dropout": self.config.dropout,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        with hf_folder.new_folder(path) as staging:
            file = staging / "adapter_model.safetensors"
            save_file(tensors, file, metadata={"format": "pt"})
            file.chmod(0o644)  # safetensors leaves it readable by the owner alone
            (staging / "adapter_config.json").write_bytes(pretty_json(told))


def _drop(record: logging.LogRecord) -> bool:
    """The bridge tells the root logger of every layer that it changes."""
    return False


def _name_wrapped(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A layer's state names its frozen matrix as if it were not wrapped, but is loaded under the wrapper's names."""
    own = (f"{prefix}adapter.", f"{prefix}to_wrap.")
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(own)]:
        state[f"{prefix}to_wrap.{name.removeprefix(prefix)}"] = state.pop(name)


def _draw(adapter: Any, name: str) -> None:
    """Fill A with uniform numbers below 1 / sqrt(inputs), as Hugging Face's peft does; B is zero already."""
    linear = adapter.linear_in
    draw = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(linear.input_size)
    whole = torch.empty(adapter.dim, linear.input_size).uniform_(-bound, bound, generator=draw)
    axis = 1 if adapter.input_is_parallel else 0
    group = mpu.get_tensor_model_parallel_group()
    with torch.no_grad():
        linear.weight.copy_(whole.chunk(group.size(), axis)[group.rank()])


@torch.no_grad()
def _merge(layer: Any) -> Tensor:
    """This rank's part of W + alpha / rank * B A, added in float32 and rounded to W's dtype. Collective."""
    adapter = layer.adapter
    a, b = adapter.linear_in.weight, adapter.linear_out.weight
    if adapter.input_is_parallel:  # W and A are cut by columns, B by rows
        b = _all_rows(b)
    else:  # W and B are cut by rows, A too
        a = _all_rows(a)
    return merge(layer.to_wrap.weight, a, b, adapter.alpha / adapter.dim)


def _all_rows(part: Tensor) -> Tensor:
    group = mpu.get_tensor_model_parallel_group()
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)
