"""Staging buffers that other processes of the machine can map: the workers of an engine that is spread over devices.

The memory has no name in the file system, so nothing of it outlives its processes, however they end.
"""

import os
import weakref

import torch


class SharedBuffers:
    """Allocates for one process; the others attach by the place that it tells them."""

    def __init__(self) -> None:
        self._places: dict[int, str] = {}  # by address

    def allocate(self, total_bytes: int) -> torch.Tensor:
        """A zeroed [total_bytes] uint8 buffer."""
        descriptor = os.memfd_create("slipstream-weights")
        os.ftruncate(descriptor, total_bytes)
        flat = attach(f"/proc/self/fd/{descriptor}", total_bytes)
        address = flat.data_ptr()
        self._places[address] = f"/proc/{os.getpid()}/fd/{descriptor}"
        weakref.finalize(flat, self._forget, address, descriptor)
        return flat

    def place(self, flat: torch.Tensor) -> str:
        """Where another process finds a buffer of `allocate`, as long as it lives."""
        return self._places[flat.data_ptr()]

    def _forget(self, address: int, descriptor: int) -> None:
        self._places.pop(address, None)
        os.close(descriptor)


def attach(place: str, total_bytes: int) -> torch.Tensor:
    """The [total_bytes] uint8 buffer at `place`, the same memory; raises RuntimeError when it is not there any more."""
    return torch.from_file(place, shared=True, size=total_bytes, dtype=torch.uint8)
