"""Types of fields that come from another process: numbers and texts with limits that the decoder checks, and arrays.

Numbers are finite and fit the columns of the ledger, and texts are short. So no message that decodes can make a later,
correct request fail. Limits cost nothing, because the decoder checks them in C.
"""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

INT32_MAX = (1 << 31) - 1
TALLY_MAX = 1 << 53
SECONDS_MAX = 1e15

StepNumber = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: none yet
Version = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: none yet
Tally = Annotated[int, Meta(ge=0, le=TALLY_MAX)]  # a sum over nodes stays exact as a float too
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]  # NaN fails both
Weight = Annotated[float, Meta(ge=0, le=1e300)]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]

_CODES = {"int16": "<i2", "int32": "<i4", "int64": "<i8", "float32": "<f4", "uint8": "u1"}  # numpy's
DTYPES = {name: np.dtype(code) for name, code in _CODES.items()}
_ITEM_BYTES = {name: kind.itemsize for name, kind in DTYPES.items()}


class Array(msgspec.Struct, frozen=True, gc=False):
    """A one-dimensional array."""

    dtype: str  # one of DTYPES
    data: bytes  # the elements, little-endian

    @classmethod
    def of(cls, values: "np.ndarray | list[int] | list[float]", dtype: str) -> "Array":
        """Encode a [n] array or list; raises KeyError on a dtype that the wire does not carry."""
        return cls(dtype, np.ascontiguousarray(values, dtype=DTYPES[dtype]).tobytes())

    def numpy(self) -> np.ndarray:
        """Decode to a read-only [n] numpy view; raises ValueError when the bytes do not fit the dtype."""
        self.entries()
        return np.frombuffer(self.data, DTYPES[self.dtype])

    def entries(self) -> int:
        """Number of elements, without making an array; raises ValueError as `numpy` does."""
        item_bytes = _ITEM_BYTES.get(self.dtype)
        if item_bytes is None:
            raise ValueError(f"unknown dtype {self.dtype!r}; the wire carries {', '.join(DTYPES)}")
        size = len(self.data)
        if size % item_bytes:
            raise ValueError(f"{size} bytes are no whole number of {self.dtype} elements")
        return size // item_bytes
