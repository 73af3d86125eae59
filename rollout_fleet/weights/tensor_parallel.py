"""The workers of one engine: one, or as many as its tensor parallelism, each with a shard of every parameter.

Rank 0 receives, into memory that the others map; all of them load their shards from it, and prove them against it.
"""

from typing import Any

import torch

from common.weights.receiver import Receiver
from common.weights.shared_memory import SharedBuffers, attach


class Ranks:
    """This worker among them. `take` and `agree` are collective: a flip calls them on every rank."""

    def __init__(self, group: Any = None) -> None:
        """After the engine's groups were made; `group` None: that of vLLM's tensor parallelism."""
        if group is None:
            from vllm.distributed.parallel_state import get_tp_group

            group = get_tp_group()
        self._group: Any = group
        self.rank, self.size = int(self._group.rank_in_group), int(self._group.world_size)
        self._buffers = SharedBuffers()
        self.receiver = Receiver() if self.size == 1 else Receiver(allocate=self._buffers.allocate)

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
        flat, path, problem = None, "", ""
        if self.receives:
            try:
                flat = self.receiver.take(incarnation, version)
                path = self._buffers.path(flat)
            except ValueError as error:
                problem = str(error)  # the other ranks get the reason instead of waiting
        path, problem = self._group.broadcast_object((path, problem), src=0)
        if problem:
            raise ValueError(problem)
        return flat if flat is not None else attach(path, total_bytes)

    def agree(self, error: Exception | None) -> None:
        """Returns when every rank has loaded its shard; raises `error`, or ValueError when another rank has one."""
        failed = torch.tensor([int(error is not None)])
        if self.size > 1:
            self._group.cpu_group.allreduce([failed]).wait()
        if error is not None:
            raise error
        if failed.item():
            raise ValueError(f"{failed.item()} of {self.size} workers could not load their shards")
