"""Headers of safetensors files: name, type and shape of every tensor, without the library and without data."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def headers(folder: Path) -> Iterator[tuple[BinaryIO, int, dict[str, Any]]]:
    """(open file, where its data begin, what its header says of each tensor) for every safetensors file of a folder.

    Raises OSError, and ValueError for a file that is none.
    """
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as data:
            size = int.from_bytes(data.read(8), "little")
            tensors: dict[str, Any] = json.loads(data.read(size))
            tensors.pop("__metadata__", None)
            yield data, 8 + size, tensors
