"""Which position of a pack is computed where under context and sequence parallelism.

    document 0        document 1           pack of T tokens
    a b c d e         f g h
    a b c d e - - -   f g h -              documents padded to a multiple of 2 x context, the last one so far that
                                           sequence parallelism divides the pack too
    0 0 1 1 1 1 0 0   0 1 1 0              owner of each position: a document is cut into 2 x context chunks, rank r
                                           computes chunks r and 2 x context - 1 - r (equal work under a causal mask)

A pad ends its document, so no token before it sees it, nothing is asked of its output, and no gradient leaves it.

The output layer gets only the rows, which are positions whose targets are in the loss. Elsewhere its results are 0.

    0 0 0 1 1         0 1 1               loss mask of the targets in these places
                                          rank 0 computes a, b and f above and has no row; rank 1's are d, e, g and h
"""

import math
from dataclasses import dataclass, replace

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
    def of(lengths: tuple[int, ...], parallel: ParallelConfig, rank: int) -> "PackPart":
        """The part of context rank `rank`, on the CPU; `lengths` are the tokens of each document, at least one."""
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
            return PackPart(sizes, source, position, total > tokens)
        start = (padded.cumsum(0) - padded).repeat_interleave(padded)
        chunk = (torch.arange(total) - start) * chunks // padded.repeat_interleave(padded)
        owner = torch.minimum(chunk, chunks - 1 - chunk)
        order = owner.argsort(stable=True)
        gathered = torch.empty_like(order)
        gathered[order] = torch.arange(total)
        return PackPart(sizes, source[owner == rank], gathered[position], total > tokens)

    def to(self, device: torch.device) -> "PackPart":
        return replace(self, source=self.source.to(device), restore=self.restore.to(device))

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


@dataclass(frozen=True)
class LossRows:
    """The n positions of a context rank's part whose targets are in the loss, in their order; there may be none.

    They follow from the loss mask alone, so the ranks of a tensor-parallel group have the same.
    """

    positions: Tensor  # [n] int64, where they are in the part
    tokens: Tensor  # [n] int64, where they are in the pack
    total: int  # positions of the part

    @staticmethod
    def of(part: PackPart, loss_mask: Tensor) -> "LossRows":
        """Those of `part` with `loss_mask` [T] > 0. Both are on the CPU: a device would be waited for."""
        positions = part.local(loss_mask).gt(0).nonzero().squeeze(1)
        return LossRows(positions, part.source.index_select(0, positions), len(part.source))

    def to(self, device: torch.device) -> "LossRows":
        return replace(self, positions=self.positions.to(device), tokens=self.tokens.to(device))

    def of_part(self, values: Tensor) -> Tensor:
        """[T padded / context, ...] values of this rank's positions to the rows' [n, ...]."""
        return values.index_select(0, self.positions)

    def of_pack(self, values: Tensor) -> Tensor:
        """[T, ...] values of the pack to the rows' [n, ...]."""
        return values.index_select(0, self.tokens)

    def spread(self, values: Tensor) -> Tensor:
        """[n, ...] values of the rows to this rank's [T padded / context, ...], 0 at the other positions."""
        return values.new_zeros(self.total, *values.shape[1:]).index_copy(0, self.positions, values)
