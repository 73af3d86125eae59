"""Parameters of the model of bench/gpu_weights.py, as far as a flip and its proof need them."""

from collections.abc import Iterable

import torch

from common.weights.wire.layout import Layout

Specs = list[tuple[str, tuple[int, ...]]]


class Model:
    """Parameters by name. It loads tensor by tensor, as vLLM's models do."""

    def __init__(self, named: Specs, where: torch.device) -> None:
        self.held = {name: torch.empty(shape, dtype=torch.bfloat16, device=where) for name, shape in named}
        for tensor in self.held.values():
            tensor.normal_(0.0, 0.02)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.held[name].copy_(tensor)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
        return self.held.items()

    def named_modules(self) -> tuple[()]:
        return ()

    def layout(self, kind: str) -> Layout:
        return Layout.of([(name, "bfloat16", tuple(t.shape)) for name, t in self.held.items()], checksums=kind)
