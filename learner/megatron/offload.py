"""Moves optimizer states, main parameters, gradients and parameters off the device while they are not in use.

Tensors stay as they are: their storages give up their memory and get it back, so that Megatron's views into its
contiguous buffers stay valid. Contents that must be kept lie in host memory meanwhile, pinned where there is CUDA.
Without CUDA the same happens between two buffers of the same memory.

    waiting, environments            none of the three is on the device
    log-probabilities, export        parameters
    forward and backward             parameters, gradients
    optimizer step, checkpoint       parameters, gradients (step), optimizer
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from common.config.schema import MemoryConfig
from learner.megatron.optimizer import Optimizer


class OffloadedSet:
    """A set of storages that leave the device together and come back when they are used."""

    def __init__(self, enabled: bool, tensors: Callable[[], Iterable[Tensor]], keep: bool) -> None:
        """
        Args:
            enabled: False leaves everything where it is.
            tensors: gives the tensors in the storages; called each time, since optimizers make their states late.
            keep: whether the contents matter; otherwise they come back as zeros.
        """
        self._enabled, self._tensors, self._keep = enabled, tensors, keep
        self._host: dict[int, Tensor] = {}  # by storage: bytes in host memory, allocated once
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._users = 0
        self.put_away()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the storages are on the device; may be nested."""
        self._users += 1
        self._bring_back()
        try:
            yield
        finally:
            self._users -= 1
            self.put_away()

    def put_away(self) -> None:
        """Free the storages unless they are in use."""
        if not self._enabled or self._users:
            return
        seen: set[int] = set()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            if self._keep:
                self._copy_of(storage, size).copy_(_bytes_of(storage, tensor.device))
            self._away.append((storage, size))
            storage.resize_(0)
        kept = {storage._cdata for storage, _ in self._away}
        self._host = {key: host for key, host in self._host.items() if key in kept}  # states may have been replaced
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # another process may need the memory

    def _bring_back(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
            contents = _bytes_of(storage, storage.device)
            if self._keep:
                contents.copy_(self._host[storage._cdata], non_blocking=True)
            else:
                contents.zero_()
        self._away.clear()

    def _copy_of(self, storage: torch.UntypedStorage, size: int) -> Tensor:
        host = self._host.get(storage._cdata)
        if host is None or host.numel() != size:
            pinned = storage.device.type == "cuda"
            host = self._host[storage._cdata] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return host


class Offload:
    """The three sets of one rank, as learner.memory configures them."""

    def __init__(self, config: MemoryConfig, chunks: list[Any], optimizer: Optimizer) -> None:
        """`chunks` are the data-parallel wrappers; nothing may be in flight on them between uses."""
        parameters = [p for chunk in chunks for p in chunk.module.parameters()]
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._parameters = OffloadedSet(config.offload_parameters, lambda: (p.data for p in parameters), keep=True)
        self._gradients = OffloadedSet(config.offload_gradients, lambda: (b.grad_data for b in buffers), keep=False)
        self._optimizer = OffloadedSet(config.offload_optimizer, lambda: _own(optimizer, parameters), keep=True)
        self._forget = optimizer.zero_grad if config.offload_gradients else None

    def parameters(self) -> Any:
        """Context in which the parameters are on the device."""
        return self._parameters.in_use()

    def optimizer(self) -> Any:
        """Context in which main parameters and optimizer states are on the device."""
        return self._optimizer.in_use()

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Context in which the gradients' buffers are on the device, zero at first if they were not."""
        with self._gradients.in_use():
            try:
                yield
            finally:
                if self._forget is not None:
                    self._forget()  # the float32 copies that bfloat16 parameters have


def _own(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[Tensor]:
    """Main parameters and states that are not in the parameters' own storages, as those of float32 models are."""
    models = {p.untyped_storage()._cdata for p in parameters}
    for chained in optimizer.megatron.chained_optimizers:
        if chained.optimizer is None:
            continue
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter.data, *chained.optimizer.state.get(parameter, {}).values()):
                    if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in models:
                        yield tensor


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
