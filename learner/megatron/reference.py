"""The frozen reference model: its weights lie in host memory and are swapped with the policy's for a forward pass.

There is one model on the device. Its parameters' storages are swapped with the host copy piece by piece. So the
reference costs host memory only, and every view into the storages stays valid.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from torch import Tensor

from common.config.schema import LearnerConfig, ModelConfig, SftLearnerConfig
from common.errors import UsageError
from learner.backend_protocol import Microbatch
from learner.megatron.conversion import hf_folder
from learner.megatron.model import Model

_PIECE_BYTES = 64 << 20
# These keys of config.json do not change the forward pass.
_IRRELEVANT = {
    *("_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
    *("initializer_range", "max_position_embeddings", "pad_token_id", "torch_dtype"),
    *("transformers_version", "use_cache"),
}


class Reference:
    """The reference's weights, read when they are first needed."""

    def __init__(self, path: Path, model: Model, chunks: list[Any]) -> None:
        """
        Args:
            path: Hugging Face folder of a model of the policy's shape.
            model: the policy.
            chunks: its data-parallel wrappers, which own the storages.
        """
        self.path, self.model, self.chunks = path, model, chunks
        self._elsewhere: list[Tensor] | None = None  # the reference's weights, or the policy's while `in_place`

    @classmethod
    def of(
        cls, config: ModelConfig, learner: LearnerConfig | SftLearnerConfig, model: Model, chunks: list[Any]
    ) -> "Reference":
        """The reference that a job's config names: learner.loss.reference, or the model that training starts from.

        Raises:
            UsageError: the folder has a model of another shape; this is found before anything is sampled.
        """
        named = learner.loss.reference if isinstance(learner, LearnerConfig) else None
        reference = cls(Path(named or config.path), model, chunks)
        if named is not None:
            reference._check()
        return reference

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model has the reference's weights; afterwards its own again, bitwise. Collective."""
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
            bridge = AutoBridge.from_hf_pretrained(str(self.path))
            hf_folder.give_rope_theta(bridge.hf_pretrained.config)
            bridge.load_hf_weights(self.model.chunks)
        except BaseException:
            for slot, policy in zip(slots, host, strict=True):
                slot.copy_(policy)
            raise
        _exchange(slots, host)
        return host

    def _check(self) -> None:
        found, expected = hf_folder.read_config(self.path).to_dict(), self.model.hf_config.to_dict()
        keys = sorted((found.keys() | expected.keys()) - _IRRELEVANT)
        different = [key for key in keys if found.get(key) != expected.get(key)]
        if different:
            raise UsageError(
                f"learner.loss.reference: {self.path} is not a model of the policy's shape: "
                + ", ".join(f"{key} {found.get(key)} instead of {expected.get(key)}" for key in different[:3])
            )


def without_routing(microbatches: list[Microbatch]) -> list[Microbatch]:
    """The same documents, free of the experts that the policy's engine chose for them."""
    return [replace(batch, routed_experts=None) for batch in microbatches]


def _slots(chunks: list[Any]) -> list[Tensor]:
    """Flat views of the distinct storages that a forward pass reads, always in the same order."""
    slots: dict[int, Tensor] = {}
    for chunk in chunks:
        for module in chunk.modules():
            buffers = [b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
            for tensor in (*module._parameters.values(), *buffers):
                if tensor is not None and tensor.numel():
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in slots:
                        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                        size = storage.nbytes() // tensor.element_size()
                        slots[storage.data_ptr()] = flat.set_(storage, 0, (size,), (1,))
    return list(slots.values())


def _host_copy(slot: Tensor) -> Tensor:
    return torch.empty(slot.shape, dtype=slot.dtype, pin_memory=slot.is_cuda).copy_(slot)


@torch.no_grad()
def _exchange(slots: list[Tensor], host: list[Tensor]) -> None:
    """Swap the contents of each pair, a piece at a time."""
    for slot, other in zip(slots, host, strict=True):
        step = _PIECE_BYTES // slot.element_size()
        for a in range(0, slot.numel(), step):
            piece, host_piece = slot[a : a + step], other[a : a + step]
            kept = piece.clone()
            piece.copy_(host_piece, non_blocking=True)
            host_piece.copy_(kept, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
