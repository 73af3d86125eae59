"""Staging buffers that other processes of the machine can map, such as the workers of one engine.

The memory has no name in the file system, so the kernel frees it when its processes end, also when they are killed.
"""

import os
import weakref

import torch


class SharedBuffers:
    """Allocates for one process; the others attach by the path that it sends them."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by address

    def allocate(self, total_bytes: int) -> torch.Tensor:
        """A zeroed [total_bytes] uint8 buffer."""
        descriptor = os.memfd_create("slipstream-weights")
        os.ftruncate(descriptor, total_bytes)
        flat = attach(f"/proc/self/fd/{descriptor}", total_bytes)
        address = flat.data_ptr()
        self._paths[address] = f"/proc/{os.getpid()}/fd/{descriptor}"
        weakref.finalize(flat, self._forget, address, descriptor)
        return flat

    def path(self, flat: torch.Tensor) -> str:
        """Where another process finds a buffer of `allocate` while the buffer exists."""
        return self._paths[flat.data_ptr()]

    def _forget(self, address: int, descriptor: int) -> None:
        self._paths.pop(address, None)
        os.close(descriptor)


def attach(path: str, total_bytes: int) -> torch.Tensor:
    """The [total_bytes] uint8 buffer at `path`, the same memory; raises RuntimeError when it is gone."""
    return torch.from_file(path, shared=True, size=total_bytes, dtype=torch.uint8)
