"""A checksum that a device computes where the bytes are: sums of 32-bit words, each times a number of its place.

It finds accidents, not forgery. One changed word always changes it, because the numbers are odd; two words that changed
places do but for about one case in 2^64. Sums modulo 2^64 are the same on every device and in every order.
"""

from functools import cache
from typing import Any

import torch

WORD_BYTES = 4
CHUNK_WORDS = 1 << 20  # with numbers of their own; the working memory is about 20 bytes a word
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
        place, done = offset // WORD_BYTES, 0
        while done < flat.numel():
            chunk, first = divmod(place, CHUNK_WORDS)
            words = _words(flat[done : done + (CHUNK_WORDS - first) * WORD_BYTES])
            for lane, numbers in enumerate(_numbers(CHUNK_WORDS, flat.device)):
                total = (words * numbers[first : first + words.numel()]).sum()
                self._sums[lane] += total * _odd(chunk, lane)
            place, done = place + words.numel(), done + words.numel() * WORD_BYTES

    def hexdigest(self) -> str:
        """32 digits; waits for the device."""
        sums: Any = [0] * len(LANES) if self._sums is None else self._sums
        return "".join(f"{int(one) % (1 << 64):016x}" for one in sums)


@cache
def _numbers(count: int, device: torch.device) -> list[torch.Tensor]:
    """Odd numbers, [count] int64 for each lane."""
    places = torch.arange(1, count + 1, device=device)
    return [_mixed(places * spread, mix) for spread, mix in LANES]


def _odd(chunk: int, lane: int) -> int:
    """An odd number of the chunk, made with the other lane's: else place and chunk could change roles."""
    spread, mix = LANES[1 - lane]
    return int(_mixed(torch.tensor(chunk) * spread, mix))


def _mixed(numbers: torch.Tensor, mix: int) -> torch.Tensor:
    numbers = (numbers ^ (numbers >> 32)) * mix
    return (numbers ^ (numbers >> 29)) | 1


def _words(flat: torch.Tensor) -> torch.Tensor:
    """[ceil(n / 4)] int64 of [n] uint8, the last word filled up with zeros."""
    gap = -flat.numel() % WORD_BYTES
    if gap or flat.storage_offset() % WORD_BYTES:
        whole = flat.new_zeros(flat.numel() + gap)
        whole[: flat.numel()] = flat
        flat = whole
    return flat.view(torch.int32).to(torch.int64)
