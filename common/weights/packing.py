"""Tensors to and from the flat buffer, and its checksums."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from common.weights.layout import WORDS, XXH3, Layout
from common.weights.word_sums import WordSums

BLOCK_BYTES = 256 << 10  # within a core's cache
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def buffer(total_bytes: int, device: torch.device | None = None) -> torch.Tensor:
    """A zeroed [total_bytes] uint8 buffer on `device`; None: in host memory, on huge pages where there are some."""
    if device is not None:
        return torch.zeros(total_bytes, dtype=torch.uint8, device=device)
    # A checksum reads such memory 1.5 times as fast. numpy asks for huge pages, torch does not.
    return torch.as_tensor(np.empty(total_bytes, np.uint8)).zero_()


def finish(flat: torch.Tensor) -> None:
    """Wait until a device has done what this thread asked for on `flat`: other threads use streams of their own."""
    flat[:1].cpu()


def view(flat: torch.Tensor, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) views into `flat` [total_bytes] uint8, no copies."""
    for e in layout.entries:
        yield e.name, flat[e.offset : e.offset + e.size_bytes].view(DTYPES[e.dtype]).view(e.shape)


def pack(named: Iterable[tuple[str, torch.Tensor]], layout: Layout, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy tensors, in layout order, into a flat [total_bytes] uint8 CPU buffer (gaps zero); raises as `fill`."""
    flat = out if out is not None else buffer(layout.total_bytes)
    fill(view(flat, layout), named)
    return flat


def fill(targets: Iterable[tuple[str, torch.Tensor]], named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy `named` into the views of a buffer; raises ValueError when names or shapes do not follow the layout."""
    views = iter(targets)
    for name, tensor in named:
        want, target = next(views, (None, None))
        if want != name or target is None or target.shape != tensor.shape:
            raise ValueError(f"tensor {name} {tuple(tensor.shape)} does not follow the layout, which has {want}")
        target.copy_(tensor)
    missing = next(views, None)
    if missing is not None:
        raise ValueError(f"tensor {missing[0]} of the layout was not given")


def checksum(data: torch.Tensor, kind: str = XXH3) -> str:
    """Hex digest of a contiguous tensor's bytes; xxh3-128 only of one on the CPU."""
    if kind == WORDS:
        sums = WordSums()
        sums.add(data, 0)
        return sums.hexdigest()
    data_bytes: Any = data.view(torch.uint8).numpy()  # a buffer, which numpy's types say from Python 3.12 on
    return xxhash.xxh3_128_hexdigest(memoryview(data_bytes))


def combined(checksums: list[str]) -> str:
    """The checksum of a version, of those of its parts: sources know no more than their own."""
    if len(checksums) == 1:
        return checksums[0]
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(one) for one in checksums))


def version_checksum(flat: torch.Tensor, layout: Layout) -> str:
    """The checksum of a whole version [total_bytes] uint8."""
    return combined([checksum(flat[part], layout.checksums) for part in layout.parts])


def all_checksums(flat: torch.Tensor, bucket_bytes: int, kind: str = XXH3) -> tuple[list[str], str]:
    """(checksum of every bucket, checksum of `flat` [n] uint8); xxh3: both while a block is in the cache."""
    if kind == WORDS:
        starts = range(0, flat.numel(), bucket_bytes)
        return [checksum(flat[at : at + bucket_bytes], kind) for at in starts], checksum(flat, kind)
    data_bytes: Any = flat.numpy()
    data = memoryview(data_bytes)
    whole, buckets = xxhash.xxh3_128(), list[str]()
    for start in range(0, len(data), bucket_bytes):
        end = min(start + bucket_bytes, len(data))
        bucket = xxhash.xxh3_128()
        for at in range(start, end, BLOCK_BYTES):
            block = data[at : min(at + BLOCK_BYTES, end)]
            bucket.update(block)
            whole.update(block)
        buckets.append(bucket.hexdigest())
    return buckets, whole.hexdigest()
