"""One flat buffer for all parameters: names, dtypes, shapes and offsets in Hugging Face terms.

The layout travels once per learner incarnation; buckets are slices of the buffer. Needs no torch.
"""

import hashlib
import math
from functools import cached_property
from itertools import pairwise

import msgspec

ALIGNMENT = 64  # bytes; every entry starts at a multiple, so that any dtype can be viewed in place
XXH3, WORDS = "xxh3", "words"  # checksums that a processor computes, and a device
DEPTH_SHARE = 64  # a piece's time on all links of a chain is at most this part of the payload's on one
PATIENCE = 4  # bounds over what a version should take
FIRST_RATE = 400e6  # bytes/s, about half of what a core sends with keys (docs/weights.md)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def publish_bound(timeout_s: float, size: int, rate: float = 0.0) -> float:
    """Seconds that a version of `size` bytes may take on its way, and then to be loaded and proven.

    At least `timeout_s`. `rate`: bytes/s at which the last one arrived, 0 if there was none. A higher one shortens no
    bound: a silent node is noticed much earlier.
    """
    return max(timeout_s, PATIENCE * size / min(rate or FIRST_RATE, FIRST_RATE))


class Entry(msgspec.Struct, frozen=True):
    """One parameter: `offset` and size in bytes within the flat buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Layout(msgspec.Struct, frozen=True, dict=True):
    """All parameters in buffer order; `total_bytes` includes alignment gaps (kept zero)."""

    entries: tuple[Entry, ...]
    total_bytes: int
    starts: tuple[int, ...] = (0,)  # where each source's part begins
    checksums: str = XXH3  # how versions are verified

    @cached_property  # every publish names it, and thousands of entries take milliseconds
    def digest(self) -> str:
        """Hex digest of names, dtypes, shapes and offsets."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    @property
    def parts(self) -> list[slice]:
        """The bytes of each source's part, in order."""
        return [slice(a, b) for a, b in pairwise((*self.starts, self.total_bytes))]

    @classmethod
    def of(cls, *parts: list[tuple[str, str, tuple[int, ...]]], checksums: str = XXH3) -> "Layout":
        """Lay out (name, dtype, shape) in the given order, part by part."""
        entries: list[Entry] = []
        starts: list[int] = []
        at = 0
        for tensors in parts:
            starts.append(at)
            for name, dtype, shape in tensors:
                entry = Entry(name, dtype, tuple(shape), at)
                entries.append(entry)
                at += -(-entry.size_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), at, tuple(starts), checksums)


class AdapterLayout(msgspec.Struct, frozen=True):
    """The adapters of every version: matrices A and B under peft's names, and what their product is multiplied by."""

    layout: Layout
    factor: float
