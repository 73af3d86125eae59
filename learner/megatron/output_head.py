"""Replaces the output layer: the last stage returns hidden states, and all logits never exist at once."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from learner.megatron.logprobs import logprobs_and_entropy


class Head:
    """Log-probabilities and entropies from what the last stage returns."""

    def __init__(self, chunks: list[Any], sequence_parallel: bool) -> None:
        """From here on the last of `chunks`, if it has the output layer, returns hidden states.

        `chunks` are GPTModels, in their data-parallel wrappers or bare.
        """
        self._sequence_parallel = sequence_parallel
        self._group: dist.ProcessGroup = mpu.get_tensor_model_parallel_group()
        last = chunks[-1].module if isinstance(chunks[-1], DistributedDataParallel) else chunks[-1]
        self._model = last if last.post_process else None
        if self._model is not None:
            self._model.output_layer.forward = _nothing_done

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[T] log-probabilities of the targets, and [T] entropies or None. Collective over the tensor-parallel ranks.

        Args:
            hidden: [1, T / (tensor ranks under sequence parallelism), H], as the last stage returns it.
            targets: [T] int64.
            temperature: logits are divided by it.
            entropy: whether entropies are wanted.
        """
        inputs = self._gathered(hidden), self._weight(), targets, temperature, self._group
        logprobs, entropies = logprobs_and_entropy(*inputs, with_entropy=entropy)
        return logprobs, entropies if entropy else None

    def _gathered(self, hidden: Tensor) -> Tensor:
        """[T, H] on every rank; in the backward pass the ranks' parts of its gradient are summed."""
        rows = hidden.squeeze(0)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(rows, group=self._group)
        return copy_to_tensor_model_parallel_region(rows, group=self._group)

    def _weight(self) -> Tensor:
        assert self._model is not None  # only the last stage has hidden states to ask about
        if self._model.share_embeddings_and_output_weights:
            return self._model.shared_embedding_or_output_weight()
        return self._model.output_layer.weight


def _nothing_done(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
    """In place of the output layer's forward: (hidden states, no bias)."""
    return hidden, None
