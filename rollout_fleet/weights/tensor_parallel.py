"""The workers of one engine: one, or as many as its tensor parallelism, each with a shard of every parameter.

Rank 0 receives, into memory that the others map; all of them load their shards from it, and prove them against it. The
memory has no name in the file system, so the kernel frees it when its processes end, also when they are killed.
"""

import os
import weakref
from typing import Any

import torch

from common.weights.receive.receiver import Receiver
from common.weights.wire import flat_buffer
from common.weights.wire.flat_buffer import pinned

TOLD_BYTES = 4096  # size of rank 0's message to the others


class EngineWorkers:
    """This worker among them. `take` and `agree` are collective: a flip calls them on every rank."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """`group`: that of vLLM's tensor parallelism; `device`: this worker's."""
        self._group = group
        self.rank = int(group.rank_in_group)
        self.size = int(group.world_size)
        self.buffers = SharedBuffers()
        self._device = device
        self._mapped: tuple[int, torch.Tensor] | None = None  # inode and contents of the first worker's buffer
        self._unlocked: torch.Tensor | None = None  # those, until `lock`
        if self.size == 1:
            self.receiver = Receiver(allocate=lambda size: pinned(flat_buffer.buffer(size), device), device=device)
        else:
            self.receiver = Receiver(allocate=lambda size: pinned(self.buffers.allocate(size), device))

    @property
    def receives(self) -> bool:
        """Whether weights come to this rank."""
        return self.rank == 0

    def take(self, incarnation: int, version: int, total_bytes: int) -> torch.Tensor:
        """The verified [total_bytes] uint8 buffer of a staged version; raises ValueError on every rank if it is not.

        Raises RuntimeError where only this rank cannot map it; the others wait in `agree`.
        """
        if self.size == 1:
            return self.receiver.take(incarnation, version)
        flat: torch.Tensor | None = None
        path = problem = ""
        if self.receives:
            try:
                flat = self.receiver.take(incarnation, version)
                path = self.buffers.path(flat)
            except ValueError as error:
                problem = str(error)  # the other ranks get the reason instead of waiting
        told = torch.zeros(TOLD_BYTES, dtype=torch.uint8)
        words = f"{path}\n{problem}".encode()[:TOLD_BYTES]
        told[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        self._group.cpu_group.broadcast(told, 0).wait()
        path, _, problem = told.numpy().tobytes().rstrip(b"\0").decode(errors="replace").partition("\n")
        if problem:
            raise ValueError(problem)
        return flat if flat is not None else self._attached(path, total_bytes)

    def forget(self) -> None:
        """Let go of the memory that the first worker may not use for the versions to come."""
        self._mapped = self._unlocked = None

    def lock(self) -> None:
        """Page-lock what the last flip mapped, for those to come; in a thread, since no generation may wait for it."""
        flat, self._unlocked = self._unlocked, None
        if flat is not None:
            pinned(flat, self._device)

    def _attached(self, path: str, total_bytes: int) -> torch.Tensor:
        """As `attach`; the buffer of the last version stays mapped, so that a flip touches no page for the first time.

        The inode of memory that is mapped here belongs to no other memory.
        """
        inode = os.stat(path).st_ino if os.path.exists(path) else -1
        if self._mapped is None or self._mapped[0] != inode or len(self._mapped[1]) != total_bytes:
            self.forget()
            self._mapped = inode, attach(path, total_bytes)
            self._unlocked = self._mapped[1]
        return self._mapped[1]

    def agree(self, error: Exception | None) -> None:
        """Returns when every rank has loaded its shard; raises `error`, or ValueError when another rank has one."""
        failed = torch.tensor([int(error is not None)])
        if self.size > 1:
            self._group.cpu_group.allreduce([failed]).wait()
        if error is not None:
            raise error
        if failed.item():
            raise ValueError(f"{failed.item()} of {self.size} workers could not load their shards")


class SharedBuffers:
    """Staging buffers of one process; the others attach by the path that it sends them."""

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
