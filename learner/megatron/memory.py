"""Where tensors lie while they are not in use: offloaded sets, and the weights of the reference model.

Storages give up their memory and get it back, or exchange their contents, so Megatron's views into its contiguous
buffers stay valid. Host memory keeps the contents meanwhile, pinned where there is CUDA.

    waiting, environments            none of parameters, gradients and optimizer is on the device
    log-probabilities, export        parameters
    forward and backward             parameters, gradients
    optimizer step, checkpoint       parameters, gradients (step), optimizer

A forward pass of the reference exchanges the model's storages with a host copy, piece by piece. So the reference costs
host memory only. It costs none where it is the model beneath the policy's adapters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config.schema import MemoryConfig, ModelConfig, RanksConfig
from learner.megatron import start_weights
from learner.megatron.conversion import hf_folder
from learner.megatron.conversion.model import Model
from learner.megatron.optimizer import Optimizer, gather_parameters

_PIECE_BYTES = 64 << 20


class OffloadedSet:
    """A set of storages that leave the device together and come back when they are used."""

    def __init__(self, enabled: bool, tensors: Callable[[], Iterable[Tensor]], keep: bool) -> None:
        """`tensors` is called each time, since optimizers make their states late; without `keep` zeros come back."""
        self._enabled = enabled
        self._tensors = tensors
        self._keep = keep
        self._host: dict[int, Tensor] = {}  # by storage: bytes in host memory, allocated once
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._users = 0
        self.put_away()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the storages are on the device; may be nested."""
        self._users += 1
        for storage, size in self._away:
            storage.resize_(size)
            contents = _bytes_of(storage)
            if self._keep:
                contents.copy_(self._host[storage._cdata], non_blocking=True)
            else:
                contents.zero_()
        self._away.clear()
        try:
            yield
        finally:
            self._users -= 1
            self.put_away()

    def put_away(self) -> None:
        """Free the storages unless they are in use."""
        if not self._enabled or self._users:
            return
        for storage in _storages(self._tensors()):
            size = storage.nbytes()
            if self._keep:
                host = self._host.get(storage._cdata)
                if host is None or host.numel() != size:
                    self._host[storage._cdata] = _host_copy(_bytes_of(storage))
                else:
                    host.copy_(_bytes_of(storage))
            self._away.append((storage, size))
            storage.resize_(0)
        kept = {storage._cdata for storage, _ in self._away}
        self._host = {key: host for key, host in self._host.items() if key in kept}  # states may have been replaced
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # another process may need the memory


class Offload:
    """The three sets of one rank, as learner.memory configures them."""

    def __init__(self, config: MemoryConfig, chunks: list[Any], optimizer: Optimizer) -> None:
        """`chunks` are the data-parallel wrappers; nothing may be in flight on them between uses."""
        self._chunks = chunks
        parameters = [p for chunk in chunks for p in chunk.module.parameters()]
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights = OffloadedSet(config.offload_parameters, lambda: (p.data for p in parameters), keep=True)
        states = OffloadedSet(config.offload_optimizer, lambda: _own(optimizer, parameters), keep=True)
        self._gradients = OffloadedSet(config.offload_gradients, lambda: (b.grad_data for b in buffers), keep=False)
        # contexts in which the parameters, or main parameters and states, are on the device
        self.parameters = weights.in_use
        self.optimizer = states.in_use
        self._forget = optimizer.zero_grad if config.offload_gradients else None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, every parameter is on the device and as the last step left it, for readers without hooks."""
        with self.parameters():
            gather_parameters(self._chunks)
            yield

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Within, the gradients' buffers are on the device, zero at first if they were not."""
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


class Reference:
    """The reference's weights, read when they are first needed."""

    def __init__(self, config: ModelConfig, learner: RanksConfig, model: Model, chunks: list[Any]) -> None:
        """The reference is in learner.loss.reference, or it is the model that training starts from.

        `model` is the policy, `chunks` are its data-parallel wrappers. Raises UsageError when the folder has a model of
        another shape, before anything is sampled.
        """
        named = learner.reference
        self.path = Path(named or config.path)
        self.layout = learner.parallel
        self.model = model
        self.chunks = chunks
        self._elsewhere: list[Tensor] | None = None  # the reference's weights, or the policy's while `in_place`
        self._beneath = named is None and learner.lora is not None  # the policy without its adapters is the reference
        if named is None:
            return
        hf_folder.check_shape("learner.loss.reference", Path(named), model.hf_config)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model has the reference's weights; afterwards its own again, bitwise. Collective.

        Adapters must be disabled meanwhile.
        """
        if self._beneath:
            yield
            return
        if self._elsewhere is None:
            self._elsewhere = self._load()
        _exchange(_slots(self.chunks), self._elsewhere)
        try:
            yield
        finally:
            _exchange(_slots(self.chunks), self._elsewhere)

    def _load(self) -> list[Tensor]:
        slots = _slots(self.chunks)
        host = [_host_copy(slot) for slot in slots]
        try:
            start_weights.load(self.path, self.model, self.layout)
        except BaseException:
            for slot, policy in zip(slots, host, strict=True):
                slot.copy_(policy)
            raise
        _exchange(slots, host)
        return host


def _slots(chunks: list[Any]) -> list[Tensor]:
    """[bytes] uint8 views of the distinct storages that a forward pass reads, always in the same order."""
    tensors: list[Tensor | None] = []
    for module in (module for chunk in chunks for module in chunk.modules()):
        buffers = [b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
        tensors += [*module._parameters.values(), *buffers]
    return [_bytes_of(storage) for storage in _storages(tensor for tensor in tensors if tensor is not None)]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages of `tensors` that are not empty."""
    found = {storage._cdata: storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _host_copy(contents: Tensor) -> Tensor:
    """Takes as many bytes as `contents`, because launch/up/roles.py sets PYTORCH_ALLOC_CONF for the ranks."""
    return torch.empty(contents.shape, dtype=torch.uint8, pin_memory=contents.is_cuda).copy_(contents)


@torch.no_grad()
def _exchange(slots: list[Tensor], host: list[Tensor]) -> None:
    """Swap the contents of each pair, a piece at a time."""
    for slot, other in zip(slots, host, strict=True):
        for piece, host_piece in zip(slot.split(_PIECE_BYTES), other.split(_PIECE_BYTES), strict=True):
            kept = piece.clone()
            piece.copy_(host_piece, non_blocking=True)
            host_piece.copy_(kept, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
