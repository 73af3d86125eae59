"""Documents to microbatches: no padding, equal work per data-parallel rank, bounded size.

    documents --plan--> for each rank the same number of microbatches, each a list of document numbers
              --build--> Microbatch tensors of this rank

Every rank plans for all ranks from the same documents, so nothing needs to be communicated. A document of L
tokens takes L - 1 places: inputs x[:-1], targets x[1:]. They are rounded up to Backend.document_multiple, as the
backend computes them; it is 1 without context parallelism.

Only the sizes decide (learner/batch/balance.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UsageError
from learner.backend_protocol import Backend, Microbatch
from learner.batch.balance import Plan, balance, counted_places

KEY = "learner.micro_batch_tokens"


@dataclass(frozen=True)
class Document:
    """One token sequence to train on; every [L] array belongs to the token at the same index."""

    tokens: np.ndarray  # [L] int32, L >= 2
    loss_mask: np.ndarray  # [L] uint8, 1 where the token trains; the first one never does, nothing predicts it
    behavior_logprobs: np.ndarray | None = None  # [L] float32, or None in supervised tuning
    staleness: np.ndarray | None = None  # [L] int32, or None in supervised tuning
    advantage: float = 0.0
    name: str = ""  # for error messages
    serial: int = -1  # its task's
    sample: int = -1  # its index in the task's group
    routed_experts: np.ndarray | None = None  # [L, MoE layers, experts per token] int16, -1 where unknown
    path: int = 0  # 0: the sample's own, n: its n-th branch
    temperatures: np.ndarray | None = None  # [L] float32, 0: the step's; None: the step's everywhere

    @property
    def origin(self) -> tuple[int, int]:
        return self.serial, self.sample

    @property
    def places(self) -> int:
        """Targets of the document: one less than its tokens."""
        return len(self.tokens) - 1


def pack_for(backend: Backend, documents: Sequence[Document], micro_batch_tokens: int) -> list[Microbatch]:
    """The microbatches of this rank. Raises UsageError as `plan`."""
    plans = plan(
        documents,
        ranks=backend.data_parallel_size,
        micro_batch_tokens=micro_batch_tokens,
        multiple=backend.document_multiple,
        hidden_size=backend.hidden_size,
    )
    return build(documents, plans[backend.data_parallel_rank])


def plan(
    documents: Sequence[Document], ranks: int, micro_batch_tokens: int, multiple: int = 1, hidden_size: int = 0
) -> Plan:
    """Distribute documents over `ranks` data-parallel ranks, as `balance` does with their places. Deterministic.

    `multiple` is Backend.document_multiple. Raises UsageError when a document has more places than
    `micro_batch_tokens`, the bound of a microbatch.
    """
    places = counted_places(np.array([document.places for document in documents], dtype=np.int64), multiple)
    if len(places) and places.max() > micro_batch_tokens:
        longest = int(places.argmax())
        padded = f" (padded to a multiple of {multiple} for learner.parallel.context)" if multiple > 1 else ""
        raise UsageError(
            f"{documents[longest].name or f'document {longest}'} needs {places[longest]} tokens{padded} in one "
            f"microbatch, but {KEY} is {micro_batch_tokens}; raise {KEY} or shorten the sequences"
        )
    return balance(places, ranks, micro_batch_tokens, hidden_size)


def build(documents: Sequence[Document], microbatches: list[list[int]]) -> list[Microbatch]:
    """Tensors of one rank's part of a plan, on the CPU; an empty microbatch becomes a filler that trains nothing."""
    return [_pack([documents[i] for i in numbers] or [FILLER], tuple(numbers)) for numbers in microbatches]


FILLER = Document(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.uint8), name="filler")


def _pack(documents: list[Document], numbers: tuple[int, ...]) -> Microbatch:
    lengths = [document.places for document in documents]
    starts = np.cumsum([0, *lengths[:-1]])

    def of_targets(name: str, dtype: type) -> torch.Tensor:
        """[T] values of the targets, zeros in documents without them."""
        rows = (getattr(document, name) for document in documents)
        parts = [np.zeros(n, dtype) if row is None else row[1:] for row, n in zip(rows, lengths, strict=True)]
        return torch.from_numpy(np.concatenate(parts, dtype=dtype))

    advantages = np.repeat(np.array([document.advantage for document in documents], dtype=np.float32), lengths)
    return Microbatch(
        tokens=torch.from_numpy(np.concatenate([d.tokens[:-1] for d in documents], dtype=np.int64)),
        targets=of_targets("tokens", np.int64),
        positions=torch.from_numpy(np.arange(sum(lengths), dtype=np.int64) - np.repeat(starts, lengths)),
        document_lengths=tuple(lengths),
        loss_mask=of_targets("loss_mask", np.float32),
        advantages=torch.from_numpy(advantages),
        behavior_logprobs=of_targets("behavior_logprobs", np.float32),
        staleness=of_targets("staleness", np.int32),
        routed_experts=_routing(documents),
        temperatures=of_targets("temperatures", np.float32)
        if any(d.temperatures is not None for d in documents)
        else None,
        numbers=numbers,
    )


def _routing(documents: list[Document]) -> torch.Tensor | None:
    """[T, MoE layers, experts per token] of the inputs, -1 in documents that have none; None when none has any."""
    shape = next((d.routed_experts.shape[1:] for d in documents if d.routed_experts is not None), None)
    if shape is None:
        return None
    rows = [
        np.full((d.places, *shape), -1, dtype=np.int16) if d.routed_experts is None else d.routed_experts[:-1]
        for d in documents
    ]
    return torch.from_numpy(np.concatenate(rows))
