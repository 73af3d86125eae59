"""Each rank's own part of the model in Hugging Face terms, so that no rank gathers all of it.

The first of the ranks that have a share of a tensor sends the whole tensor:

- Dense tensors (attention, norms, routers, shared experts, embeddings) come from the pipeline stage that has the layer.
  There tensor-parallel rank 0 of data-parallel rank 0 sends them; data parallelism includes context parallelism.
- Experts come from the pipeline stage and the expert-parallel rank that have them. There expert-tensor-parallel rank 0
  of expert-data-parallel rank 0 sends them.
- Tied embeddings come from the first stage, also where the model's files have both names.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from learner.megatron.conversion import bridge_fixes
from learner.megatron.conversion.model import Model

EXPORT_OPTIONS = {"cpu": False, "show_progress": False, "merge_adapter_weights": False}


class PartExporter:
    """Runs the bridge's export on the parameters that this rank has a share of."""

    def __init__(self, model: Model) -> None:
        self._model = model
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

        def announced() -> Any:  # the bridge takes a list, but only iterates over it
            nonlocal yields
            for task in tasks:
                yields = _leads(task)
                yield task

        bridge, chunks = self._model.bridge, self._model.chunks
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
