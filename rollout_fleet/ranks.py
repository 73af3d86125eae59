"""The workers of one engine: one, or as many as its tensor parallelism, each with a shard of every parameter.

Rank 0 receives, into memory that the others map; all of them load their shards from it, and prove them against it.
"""

from typing import Any

import torch

from common.weights.receiving import Receiver
from common.weights.sharing import SharedBuffers, attach


class Ranks:
    """This worker among them. `take` and `loaded` are collective: a flip calls them on every rank."""

    def __init__(self) -> None:
        """After the engine's groups were made."""
        from vllm.distributed.parallel_state import get_tp_group

        self._group: Any = get_tp_group()
        self.rank, self.size = int(self._group.rank_in_group), int(self._group.world_size)
        self._buffers = SharedBuffers()
        self.receiver = Receiver() if self.size == 1 else Receiver(allocate=self._buffers.allocate)

    @property
    def receives(self) -> bool:
        """Whether weights come to this rank."""
        return self.rank == 0

    def take(self, incarnation: int, version: int, total_bytes: int) -> torch.Tensor:
        """The verified [total_bytes] uint8 buffer of a staged version; raises ValueError when it is not staged."""
        if self.size == 1:
            return self.receiver.take(incarnation, version)
        flat, place, problem = None, "", ""
        if self.receives:
            try:
                flat = self.receiver.take(incarnation, version)
                place = self._buffers.place(flat)
            except ValueError as error:
                problem = str(error)  # the others hear it, too, instead of waiting
        place, problem = self._group.broadcast_object((place, problem), src=0)
        if problem:
            raise ValueError(problem)
        return flat if flat is not None else attach(place, total_bytes)

    def loaded(self, flat: torch.Tensor) -> None:
        """This rank has loaded its shard; returns when all have."""
        if self.size > 1:
            self._group.barrier()
        if self.receives:
            self.receiver.give_back(flat)
