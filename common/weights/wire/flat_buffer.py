"""Tensors to and from the flat buffer, and its checksums."""

import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash

from common.weights.wire.layout import WORDS, XXH3, Layout

logger = logging.getLogger(__name__)

CACHE_BYTES = 256 << 10  # within a core's cache
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY_CONTEXT = 1  # cudaHostRegisterPortable
WORD_BYTES = 4
CHUNK_WORDS = 1 << 20  # with numbers of their own
CHUNKS = 4  # that are summed at once, in a few calls of the device; the working memory is about 20 bytes a word
LANES = ((0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9), (0x2545F4914F6CDD1D, 0x14D049BB133111EB))  # odd, without a pattern


def buffer(total_bytes: int, device: torch.device | None = None) -> torch.Tensor:
    """A zeroed [total_bytes] uint8 buffer on `device`; None: in host memory, on huge pages where there are some.

    Host memory is taken page by page when it is written.
    """
    if device is not None:
        return torch.zeros(total_bytes, dtype=torch.uint8, device=device)
    # A checksum reads such memory 1.5 times as fast. numpy asks for huge pages, torch does not.
    return torch.as_tensor(np.zeros(total_bytes, np.uint8))


def pinned(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host memory `flat` [n] uint8, page-locked for CUDA until it is freed: copies are several times as fast.

    Where the system does not allow that, it stays as it is. A forked child leaves it to its parent.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):  # threads begin with the first device
            cudart: Any = torch.cuda.cudart
            runtime = cudart()
            address = flat.data_ptr()
            refusal = runtime.cudaHostRegister(address, flat.numel(), EVERY_CONTEXT)
        if refusal == runtime.cudaError.success:
            weakref.finalize(flat, _unlock, runtime, address, device, os.getpid()).atexit = False
        else:
            _report(device)
            _log_refusal(int(refusal))
    return flat


def _unlock(runtime: Any, address: int, device: torch.device, owner: int) -> None:
    if os.getpid() == owner and runtime.cudaHostUnregister(address) != runtime.cudaError.success:
        _report(device)


def _report(device: torch.device) -> None:
    """Let CUDA report its last error here, which a later call would report otherwise."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


@cache
def _log_refusal(error: int) -> None:
    logger.warning("weights are copied slowly: the system does not page-lock host memory (CUDA error %d)", error)


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
    """Copy `named` into the views of a buffer; raises ValueError when names or shapes do not follow the layout.

    Bytes for host memory are there on return.
    """
    views = iter(targets)
    streams: set[torch.cuda.Stream] = set()  # that copy to host memory
    try:
        for name, tensor in named:
            want, target = next(views, (None, None))
            if want != name or target is None or target.shape != tensor.shape:
                raise ValueError(f"tensor {name} {tuple(tensor.shape)} does not follow the layout, which has {want}")
            if tensor.is_cuda and target.is_cpu:
                streams.add(torch.cuda.current_stream(tensor.device))
            _copy(target, tensor.detach())
    finally:
        for stream in streams:
            stream.synchronize()
    missing = next(views, None)
    if missing is not None:
        raise ValueError(f"tensor {missing[0]} of the layout was not given")


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    same = target.dtype == tensor.dtype and target.device == tensor.device and tensor.is_contiguous()
    if same and tensor.is_cpu and torch.get_num_threads() == 1:
        to, data = (one.view(-1).view(torch.uint8).numpy() for one in (target, tensor))
        np.copyto(to, data)  # in half of the time of torch's copy, which reads the target before it writes there
    else:
        # Without blocking, torch would convert on the device, in memory that a learner may not have left.
        target.copy_(tensor, non_blocking=tensor.is_cuda and target.is_cpu and target.dtype == tensor.dtype)


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
    """(checksum of every bucket, checksum of `flat` [n] uint8); xxh3: both while a block is in the cache.

    `bucket_bytes` 0: no bucket travels.
    """
    if not bucket_bytes:
        return [], checksum(flat, kind)
    if kind == WORDS:
        starts = range(0, flat.numel(), bucket_bytes)
        return [checksum(flat[at : at + bucket_bytes], kind) for at in starts], checksum(flat, kind)
    data_bytes: Any = flat.numpy()
    data = memoryview(data_bytes)
    whole = xxhash.xxh3_128()
    buckets: list[str] = []
    for start in range(0, len(data), bucket_bytes):
        end = min(start + bucket_bytes, len(data))
        bucket = xxhash.xxh3_128()
        for at in range(start, end, CACHE_BYTES):
            block = data[at : min(at + CACHE_BYTES, end)]
            bucket.update(block)
            whole.update(block)
        buckets.append(bucket.hexdigest())
    return buckets, whole.hexdigest()


class WordSums:
    """A checksum that a device computes where the bytes are; they come in any order, and missing ones count as zeros.

    It sums 32-bit words, each times a number of its place, modulo 2^64: that is the same on every device and in every
    order. It finds accidents, not forgery. One changed word always changes it, because the numbers are odd. Two words
    that changed places do but for about one case in 2^64.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # [2] int64, where the data is

    def add(self, data: torch.Tensor, offset: int) -> None:
        """`data`, of any shape and dtype, is at byte `offset` of the buffer, a multiple of 4."""
        flat = data.contiguous().view(-1).view(torch.uint8)
        if self._sums is None:
            self._sums = torch.zeros(len(LANES), dtype=torch.int64, device=flat.device)
        place = offset // WORD_BYTES  # the next word's number in the buffer
        done = 0  # bytes of `data`
        while done < flat.numel():
            chunk, first = divmod(place, CHUNK_WORDS)
            whole = 0 if first else (flat.numel() - done) // WORD_BYTES // CHUNK_WORDS
            count = max(1, min(whole, CHUNKS))
            words = _words(flat[done : done + (count * CHUNK_WORDS - first) * WORD_BYTES]).view(count, -1)
            factors = _odd(chunk, count, flat.device)
            for lane, numbers in enumerate(_numbers(CHUNK_WORDS, flat.device)):
                totals = (words * numbers[first : first + words.shape[1]]).sum(1)
                self._sums[lane] += (totals * factors[lane]).sum()
            place += words.numel()
            done += words.numel() * WORD_BYTES

    def hexdigest(self) -> str:
        """32 digits; waits for the device."""
        sums: Any = torch.zeros(len(LANES)) if self._sums is None else self._sums
        return "".join(f"{int(one) % (1 << 64):016x}" for one in sums.cpu())


@cache
def _numbers(count: int, device: torch.device) -> list[torch.Tensor]:
    """Odd numbers, [count] int64 for each lane. A copy from the host is there on return, whatever stream uses it."""
    places = torch.arange(1, count + 1)
    return [_mixed(places * spread, mix).to(device) for spread, mix in LANES]


@cache
def _odd(chunk: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """Odd numbers of `count` chunks, [count] int64 for each lane; as `_numbers`.

    They are made with the other lane's: else place and chunk could change roles.
    """
    chunks = torch.arange(chunk, chunk + count)
    return [_mixed(chunks * spread, mix).to(device) for spread, mix in LANES[::-1]]


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
