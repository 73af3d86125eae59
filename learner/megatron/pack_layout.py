"""Which position of a pack is computed where under context and sequence parallelism.

    document 0        document 1           pack of T tokens
    a b c d e         f g h
    a b c d e - - -   f g h -              documents padded to a multiple of 2 x context, the last one so far that
                                           sequence parallelism divides the pack too
    0 0 1 1 1 1 0 0   0 1 1 0              owner of each position: a document is cut into 2 x context chunks, rank r
                                           computes chunks r and 2 x context - 1 - r (equal work under a causal mask)

A pad ends its document, so no token before it sees it, nothing is asked of its output, and no gradient leaves it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.parallel_layout import document_multiple
from common.config.schema import ParallelConfig


def pack_multiple(parallel: ParallelConfig) -> int:
    """A pack's length is a multiple of this: sequence parallelism splits a context rank's part once more."""
    slices = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
    return math.lcm(document_multiple(parallel), slices)


@dataclass(frozen=True)
class PackPart:
    lengths: tuple[int, ...]  # padded length of each document, over all context ranks
    source: Tensor  # [T padded / context] int64, index in the pack of the token at each position of this rank; T: a pad
    restore: Tensor  # [T] int64, where each token of the pack is in the concatenation of all ranks' parts
    padded: bool  # whether any rank has a pad; the same on every rank

    @staticmethod
    def of(lengths: tuple[int, ...], parallel: ParallelConfig, rank: int, device: torch.device) -> "PackPart":
        """The part of context rank `rank`; `lengths` are the tokens of each document, at least one."""
        multiple = document_multiple(parallel)
        chunks = 2 * parallel.context
        real = torch.tensor(lengths)
        padded = -(-real // multiple) * multiple
        padded[-1] += -int(padded.sum()) % pack_multiple(parallel)
        total = int(padded.sum())
        tokens = int(real.sum())
        shift = (padded - real).cumsum(0) - (padded - real)  # pads before each document
        position = torch.arange(tokens) + shift.repeat_interleave(real)
        source = torch.full((total,), tokens)
        source[position] = torch.arange(tokens)
        sizes = tuple(padded.tolist())
        if parallel.context == 1:
            return PackPart(sizes, source.to(device), position.to(device), total > tokens)
        start = (padded.cumsum(0) - padded).repeat_interleave(padded)
        chunk = (torch.arange(total) - start) * chunks // padded.repeat_interleave(padded)
        owner = torch.minimum(chunk, chunks - 1 - chunk)
        order = owner.argsort(stable=True)
        gathered = torch.empty_like(order)
        gathered[order] = torch.arange(total)
        return PackPart(sizes, source[owner == rank].to(device), gathered[position].to(device), total > tokens)

    @property
    def pads(self) -> Tensor:
        """[T padded / context] bool, True where this rank has a pad and no token."""
        return self.source == len(self.restore)

    def local(self, values: Tensor, fill: int | float = 0) -> Tensor:
        """[T, ...] values of the pack to this rank's [T padded / context, ...], with `fill` at pads."""
        blank = values.new_full((1, *values.shape[1:]), fill)
        return torch.cat([values, blank]).index_select(0, self.source)

    def whole(self, gathered: Tensor) -> Tensor:
        """[T padded, ...] concatenation of every rank's part, in rank order, to the pack's [T, ...] in its order."""
        return gathered.index_select(0, self.restore)
