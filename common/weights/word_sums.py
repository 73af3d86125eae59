"""A checksum that a device computes where the bytes are: sums of 32-bit words, each times a number of its place.

It finds accidents, not forgery. One changed word always changes it, because the numbers are odd; two words that changed
places do but for about one case in 2^64. Sums modulo 2^64 are the same on every device and in every order.
"""

from typing import Any

import torch

WORD_BYTES = 4
CHUNK_WORDS = 1 << 22  # at a time; the working memory is about 32 times as many bytes
LANES = ((0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9), (0x2545F4914F6CDD1D, 0x14D049BB133111EB))  # odd, without a pattern


class WordSums:
    """The checksum of a buffer whose bytes come in any order; those that do not come count as zeros."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # [2] int64, where the data is

    def add(self, data: torch.Tensor, offset: int) -> None:
        """`data`, of any shape and dtype, is at byte `offset` of the buffer, a multiple of 4."""
        flat = data.contiguous().view(-1).view(torch.uint8)
        if self._sums is None:
            self._sums = torch.zeros(len(LANES), dtype=torch.int64, device=flat.device)
        for start in range(0, flat.numel(), CHUNK_WORDS * WORD_BYTES):
            words = _words(flat[start : start + CHUNK_WORDS * WORD_BYTES])
            first = (offset + start) // WORD_BYTES
            places = torch.arange(first, first + words.numel(), device=flat.device)
            for lane, (spread, mix) in enumerate(LANES):
                numbers = (places + 1) * spread
                numbers = (numbers ^ (numbers >> 32)) * mix
                self._sums[lane] += (words * ((numbers ^ (numbers >> 29)) | 1)).sum()

    def hexdigest(self) -> str:
        """32 digits; waits for the device."""
        sums: Any = [0] * len(LANES) if self._sums is None else self._sums
        return "".join(f"{int(one) % (1 << 64):016x}" for one in sums)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """[ceil(n / 4)] int64 of [n] uint8, the last word filled up with zeros."""
    gap = -flat.numel() % WORD_BYTES
    if gap or flat.storage_offset() % WORD_BYTES:
        whole = flat.new_zeros(flat.numel() + gap)
        whole[: flat.numel()] = flat
        flat = whole
    return flat.view(torch.int32).to(torch.int64)
