"""Probability ratios of tokens and of whole documents."""

from functools import cached_property

import torch
from torch import Tensor

LOG_BOUND = 20.0  # clamps exponents, as verl and slime do: e^20 is about 5e8


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of `log_ratio` clamped to +-20, so that no ratio overflows or is zero; no gradient beyond."""
    return torch.exp(log_ratio.clamp(-LOG_BOUND, LOG_BOUND))


def within(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where the mask is, 0 elsewhere, with no gradient there."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


class Documents:
    """Sums and means over the loss tokens of each of a microbatch's documents.

    Tokens outside the loss (prompts, environment text, expired tokens) enter neither. D documents, T tokens.
    """

    def __init__(self, lengths: tuple[int, ...], mask: Tensor) -> None:
        """`lengths`: of the documents in the microbatch's order, T in sum; `mask`: [T] bool, the loss tokens."""
        self.mask = mask
        self._lengths = torch.tensor(lengths, device=mask.device)

    def sums(self, values: Tensor) -> Tensor:
        """[D] sums of `values` [T] over each document's loss tokens; in a fixed order, so that they repeat exactly."""
        return torch.segment_reduce(within(self.mask, values), "sum", lengths=self._lengths, unsafe=True)

    def means(self, values: Tensor) -> Tensor:
        """[D] means of `values` [T] over each document's loss tokens, 0 where it has none."""
        return self.sums(values) / self.counts.to(values.dtype).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[T] each document's entry of `values` [D] at all of its tokens."""
        return values[self._index]

    @cached_property
    def counts(self) -> Tensor:
        """[D] float32, loss tokens of each document."""
        return self.sums(torch.ones_like(self.mask, dtype=torch.float32))

    @cached_property
    def _index(self) -> Tensor:
        documents = torch.arange(len(self._lengths), device=self.mask.device)
        return torch.repeat_interleave(documents, self._lengths, output_size=len(self.mask))
