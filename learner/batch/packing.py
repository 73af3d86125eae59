"""Documents to microbatches: no padding, equal work per data-parallel rank, bounded size.

    documents --plan--> for each rank the same number of microbatches, each a list of document numbers
              --build--> Microbatch tensors of this rank

The lead rank plans for all ranks and sends each one its documents (learner/loop/share.py). In supervised tuning every
rank plans from the same documents, and nothing is sent. A document of L tokens takes L - 1 places: inputs x[:-1],
targets x[1:]. They are rounded up to Backend.document_multiple, as the backend computes them; it is 1 without context
parallelism.

Only the sizes decide (learner/batch/balance.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UsageError
from learner.backend_protocol import UNKNOWN, Backend, Microbatch
from learner.batch.balance import Plan, balance, balance_at_home, counted_places

KEY = "learner.micro_batch_tokens"


@dataclass(frozen=True)
class Document:
    """One token sequence to train on; every [L] array belongs to the token at the same index."""

    tokens: np.ndarray  # [L] int32, L >= 2
    loss_mask: np.ndarray  # [L] uint8, 1 where the token trains; the first one never does, nothing predicts it
    behavior_logprobs: np.ndarray | None = None  # [L] float32, or None in supervised tuning
    staleness: np.ndarray | None = None  # [L] int8 or int32, or None in supervised tuning
    advantage: float = 0.0
    name: str = ""  # for error messages
    serial: int = -1  # its task's
    sample: int = -1  # its index in the task's group
    routed_experts: np.ndarray | None = None  # [L, MoE layers, experts per token], of RoutingShape.dtype
    kl_coefficient: float | None = None  # its source's; None: the one of the loss
    teacher_logprobs: np.ndarray | None = None  # [L] float32
    teacher_top_ids: np.ndarray | None = None  # [L, k] int32
    teacher_top_logprobs: np.ndarray | None = None  # [L, k] float32
    path: int = 0  # 0: the sample's own, n: its n-th branch
    temperatures: np.ndarray | None = None  # [L] float32, 0: the step's; None: the step's everywhere
    rewards: np.ndarray | None = None  # [L] float32 with a critic

    @property
    def origin(self) -> tuple[int, int]:
        return self.serial, self.sample

    @property
    def places(self) -> int:
        """Targets of the document: one less than its tokens."""
        return len(self.tokens) - 1


def pack_for(backend: Backend, documents: Sequence[Document], micro_batch_tokens: int) -> list[Microbatch]:
    """The microbatches of this rank. Raises UsageError as `plan`."""
    return build(documents, plan_for(backend, documents, micro_batch_tokens)[backend.data_parallel_rank])


def plan_for(
    backend: Backend, documents: Sequence[Document], micro_batch_tokens: int, homes: np.ndarray | None = None
) -> Plan:
    """`plan` for the ranks and the model of `backend`."""
    return plan(
        documents,
        ranks=backend.data_parallel_size,
        micro_batch_tokens=micro_batch_tokens,
        multiple=backend.document_multiple,
        hidden_size=backend.hidden_size,
        homes=homes,
    )


def plan(
    documents: Sequence[Document],
    ranks: int,
    micro_batch_tokens: int,
    multiple: int = 1,
    hidden_size: int = 0,
    homes: np.ndarray | None = None,
) -> Plan:
    """Distribute documents over `ranks` data-parallel ranks, as `balance` does with their places. Deterministic.

    `multiple` is Backend.document_multiple. With `homes` ([n] int64) every document is on its rank there. Raises
    UsageError when a document has more places than `micro_batch_tokens`, the bound of a microbatch.
    """
    places = counted_places(np.array([document.places for document in documents], dtype=np.int64), multiple)
    if len(places) and places.max() > micro_batch_tokens:
        longest = int(places.argmax())
        padded = f" (padded to a multiple of {multiple} for learner.parallel.context)" if multiple > 1 else ""
        raise UsageError(
            f"{documents[longest].name or f'document {longest}'} needs {places[longest]} tokens{padded} in one "
            f"microbatch, but {KEY} is {micro_batch_tokens}; raise {KEY} or shorten the sequences"
        )
    if homes is not None:
        return balance_at_home(places, homes, ranks, micro_batch_tokens, hidden_size)
    return balance(places, ranks, micro_batch_tokens, hidden_size)


def build(documents: Sequence[Document] | Mapping[int, Document], microbatches: list[list[int]]) -> list[Microbatch]:
    """Tensors of one rank's part of a plan, on the CPU; `documents` by number.

    An empty microbatch becomes a filler that trains nothing.
    """
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
    own = [document.kl_coefficient for document in documents]
    kl = np.repeat(np.array([value or 0.0 for value in own], dtype=np.float32), lengths)
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
        teacher_logprobs=_given(documents, "teacher_logprobs", np.float32),
        teacher_top_ids=_given(documents, "teacher_top_ids", np.int64),
        teacher_top_logprobs=_given(documents, "teacher_top_logprobs", np.float32),
        temperatures=_given(documents, "temperatures", np.float32),
        rewards=_given(documents, "rewards", np.float32),
        numbers=numbers,
        kl_coefficients=None if all(value is None for value in own) else torch.from_numpy(kl),
    )


def _given(documents: list[Document], name: str, dtype: type) -> torch.Tensor | None:
    """[T, ...] values of the targets, zeros in documents without them; None when no document has any."""
    rows = [getattr(document, name) for document in documents]
    shape = next((row.shape[1:] for row in rows if row is not None), None)
    if shape is None:
        return None
    parts = [
        np.zeros((document.places, *shape), dtype) if row is None else row[1:]
        for row, document in zip(rows, documents, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def _routing(documents: list[Document]) -> torch.Tensor | None:
    """[T, MoE layers, experts per token] of the inputs, UNKNOWN in documents without; None when none has any."""
    like = next((d.routed_experts[:0] for d in documents if d.routed_experts is not None), None)
    if like is None:
        return None
    rows = [
        np.full((d.places, *like.shape[1:]), UNKNOWN[like.dtype.name], dtype=like.dtype)
        if d.routed_experts is None
        else d.routed_experts[:-1]
        for d in documents
    ]
    return torch.from_numpy(np.concatenate(rows))
