"""Headers of safetensors files: name, type and shape of every tensor, without the library and without data."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypedDict

import msgspec


class Tensor(TypedDict):
    """The entry of one tensor in a header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # from the end of the header


def headers(folder: Path) -> Iterator[tuple[BinaryIO, int, dict[str, Tensor]]]:
    """(open file, where its data begin, what its header says of each tensor) for every safetensors file of a folder.

    Raises OSError, and ValueError for a file that is none.
    """
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as data:
            size = int.from_bytes(data.read(8), "little")
            if size > os.fstat(data.fileno()).st_size:
                raise ValueError(f"{file.name} has no header of a safetensors file")
            told = msgspec.json.decode(data.read(size), type=dict[str, msgspec.Raw])
            told.pop("__metadata__", None)
            yield data, 8 + size, {name: msgspec.json.decode(each, type=Tensor) for name, each in told.items()}
