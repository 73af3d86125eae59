"""Documents to microbatches: no padding, equal work per data-parallel rank, bounded size.

    documents --plan--> for each rank the same number of microbatches, each a list of document numbers
              --build--> Microbatch tensors of this rank

Every rank plans for all ranks from the same documents, so nothing needs to be communicated. A document of L
tokens takes L - 1 places (inputs x[:-1], targets x[1:]).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UsageError
from learner.backend import Microbatch

Plan = list[list[list[int]]]  # [rank][microbatch] -> document numbers


@dataclass(frozen=True)
class Document:
    """One token sequence to train on; every [L] array belongs to the token at the same index.

    Attributes:
        tokens: [L] int32, L >= 2.
        loss_mask: [L] uint8, 1 where the token trains; the first token never does, nothing predicts it.
        behavior_logprobs: [L] float32, or None in supervised tuning.
        staleness: [L] int32, or None in supervised tuning.
        advantage: of the whole document.
        name: for error messages.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray | None = None
    staleness: np.ndarray | None = None
    advantage: float = 0.0
    name: str = ""

    @property
    def places(self) -> int:
        """Targets of the document: one less than its tokens."""
        return len(self.tokens) - 1


def plan(documents: Sequence[Document], ranks: int, micro_batch_tokens: int, key: str) -> Plan:
    """Distribute documents over `ranks` data-parallel ranks and as few microbatches as fit.

    Longest first into the least loaded microbatch (Graham's LPT rule: at most 4/3 of the best possible maximum),
    with more microbatches when one would exceed the bound; then microbatches are dealt out so that the ranks'
    totals are close. Deterministic. A microbatch may be empty when there are fewer documents than microbatches.

    Args:
        documents: what to place; at least 2 tokens each.
        ranks: data-parallel size.
        micro_batch_tokens: bound on the places of one microbatch.
        key: config key of the bound, for the error.

    Raises:
        UsageError: a document is longer than the bound.
    """
    places = np.array([document.places for document in documents], dtype=np.int64)
    if len(places) and places.max() > micro_batch_tokens:
        longest = int(places.argmax())
        raise UsageError(
            f"{documents[longest].name or f'document {longest}'} needs {places[longest]} tokens in one microbatch, "
            f"but {key} is {micro_batch_tokens}; raise {key} or shorten the sequences"
        )
    order = np.lexsort((np.arange(len(places)), -places)).tolist()
    sizes = places.tolist()
    crowded = int((places * 2 > micro_batch_tokens).sum())  # no two of these share a microbatch
    count = max(1, -(-int(places.sum()) // (ranks * micro_batch_tokens)), -(-crowded // ranks))
    while (bins := _fill(order, sizes, ranks * count, micro_batch_tokens)) is None:
        count = max(count + 1, count * 21 // 20)
    return _deal(bins, sizes, ranks)


def _fill(order: list[int], sizes: list[int], count: int, bound: int) -> list[list[int]] | None:
    """Place documents in `order` into `count` bins, each into the least loaded; None when one exceeds `bound`."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for document in order:
        load, i = heap[0]
        if load + sizes[document] > bound:
            return None
        bins[i].append(document)
        heapq.heapreplace(heap, (load + sizes[document], i))
    return bins


def _deal(bins: list[list[int]], sizes: list[int], ranks: int) -> Plan:
    """Heaviest bins first, back and forth over the ranks; documents keep their order within a bin."""
    by_load = sorted(range(len(bins)), key=lambda i: (-sum(sizes[d] for d in bins[i]), i))
    dealt: Plan = [[] for _ in range(ranks)]
    for place, i in enumerate(by_load):
        lap, seat = divmod(place, ranks)
        dealt[seat if lap % 2 == 0 else ranks - 1 - seat].append(sorted(bins[i]))
    return dealt


def build(documents: Sequence[Document], microbatches: list[list[int]]) -> list[Microbatch]:
    """Tensors of one rank's part of a plan, on the CPU; an empty microbatch becomes a filler that trains nothing."""
    return [_pack([documents[i] for i in numbers] or [FILLER]) for numbers in microbatches]


def microbatches_for(
    documents: Sequence[Document],
    rank: int,
    ranks: int,
    micro_batch_tokens: int,
    key: str = "learner.micro_batch_tokens",
) -> list[Microbatch]:
    """Plan for all data-parallel ranks and build those of `rank`; see `plan` for what it raises."""
    return build(documents, plan(documents, ranks, micro_batch_tokens, key)[rank])


FILLER = Document(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.uint8), name="filler")


def _pack(documents: list[Document]) -> Microbatch:
    lengths = [document.places for document in documents]
    total = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.concatenate([document.tokens[:-1] for document in documents]).astype(np.int64)
    targets = np.concatenate([document.tokens[1:] for document in documents]).astype(np.int64)
    mask = np.concatenate([document.loss_mask[1:] for document in documents]).astype(np.float32)
    behavior = np.concatenate([_tail(d.behavior_logprobs, d.places, np.float32) for d in documents])
    staleness = np.concatenate([_tail(d.staleness, d.places, np.int32) for d in documents])
    advantages = np.repeat(np.array([document.advantage for document in documents], dtype=np.float32), lengths)
    return Microbatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(np.arange(total, dtype=np.int64) - np.repeat(starts, lengths)),
        document_lengths=tuple(lengths),
        loss_mask=torch.from_numpy(mask),
        advantages=torch.from_numpy(advantages),
        behavior_logprobs=torch.from_numpy(behavior),
        staleness=torch.from_numpy(staleness),
    )


def _tail(values: np.ndarray | None, places: int, dtype: type) -> np.ndarray:
    """[places] values of the targets, zeros when there are none."""
    return np.zeros(places, dtype=dtype) if values is None else values[1:].astype(dtype)
