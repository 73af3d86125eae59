"""Log-probabilities of chosen documents, from the forward pass that trains them: no second pass.

The loss function sees whole documents on the last pipeline stage, under every layout. Several ranks may see the same
document and none of them all. An elementwise maximum over the ranks, from minus infinity, brings all of them together
without asking which rank has what.
"""

from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from learner.backend_protocol import Backend, LossFunction, LossOutput, Microbatch
from learner.batch.packing import Document

MOST_PLACES = 1 << 20  # that one step collects: 4 MiB

Logprobs = dict[tuple[int, int], np.ndarray]  # (serial, sample) to [L - 1] float32


class RecordingLoss:
    """A LossFunction that also keeps log-probabilities, as they were before the optimizer step."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._wanted: dict[int, Document] = {}
        self._found: dict[int, Tensor] = {}

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
        for number, part in zip(batch.numbers, logprobs.detach().split(batch.document_lengths), strict=False):
            if number in self._wanted:
                self._found[number] = part.clone()  # else the whole microbatch would stay in memory
        return self._loss(logprobs, entropy, batch)

    def watch(self, documents: Sequence[Document], chosen: Container[tuple[int, int]]) -> None:
        """Begin a step on these documents. Those with a `chosen` origin are kept while there is room."""
        self._wanted, self._found, room = {}, {}, MOST_PLACES
        for number, document in enumerate(documents):
            if document.origin in chosen and document.places <= room:
                room -= document.places
                self._wanted[number] = document

    def collect(self, backend: Backend) -> Logprobs:
        """The log-probabilities of the chosen documents. Collective, unless nothing was chosen."""
        if not self._wanted:
            return {}
        sizes = [document.places for document in self._wanted.values()]
        flat = torch.full((sum(sizes),), -torch.inf)
        for number, part in zip(self._wanted, flat.split(sizes), strict=True):
            if number in self._found:
                part.copy_(self._found[number])
        parts = backend.largest(flat).split(sizes)
        pairs = zip(self._wanted.values(), parts, strict=True)
        self._wanted, self._found = {}, {}
        return {d.origin: part.numpy() for d, part in pairs if bool(part.isfinite().all())}
