"""Arrays on the wire: raw little-endian bytes with dtype and length, decoded to numpy without a copy."""

import msgspec
import numpy as np

DTYPES = {
    **{"int16": np.dtype("<i2"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8")},
    **{"float32": np.dtype("<f4"), "uint8": np.dtype("u1")},
}
_ITEM_BYTES = {name: kind.itemsize for name, kind in DTYPES.items()}


class Array(msgspec.Struct, frozen=True, gc=False):
    """A one-dimensional array.

    Attributes:
        dtype: one of int16, int32, int64, float32, uint8.
        data: the elements, little-endian, `len(data) == n * itemsize`.
    """

    dtype: str
    data: bytes

    @classmethod
    def of(cls, values: "np.ndarray | list[int] | list[float]", dtype: str) -> "Array":
        """Encode a [n] array or list; raises KeyError on a dtype that the wire does not carry."""
        return cls(dtype, np.ascontiguousarray(values, dtype=DTYPES[dtype]).tobytes())

    def numpy(self) -> np.ndarray:
        """Decode to a read-only [n] numpy view; raises ValueError when the bytes do not fit the dtype."""
        kind = DTYPES.get(self.dtype)
        if kind is None:
            raise self._unknown()
        return np.frombuffer(self.data, kind)

    def entries(self) -> int:
        """Number of elements, without making an array; raises ValueError as `numpy` does."""
        item_bytes = _ITEM_BYTES.get(self.dtype)
        if item_bytes is None:
            raise self._unknown()
        size = len(self.data)
        if size % item_bytes:
            raise ValueError(f"{size} bytes are no whole number of {self.dtype} elements")
        return size // item_bytes

    def _unknown(self) -> ValueError:
        return ValueError(f"unknown dtype {self.dtype!r}; the wire carries {', '.join(DTYPES)}")
