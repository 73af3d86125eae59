"""x W^T + b on the CPU, straight from the parameter: as fast as from a packed copy, or nearly."""

import torch
from torch.nn import functional

FEW_ROWS = 16  # below, the overhead of a call dominates, and torch's own linear is faster


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, in] x [out, in] -> [rows, out].

    In float32 torch's linear uses MKL, which takes twice as long as oneDNN on processors that are not Intel's. In
    bfloat16 it misses oneDNN's best kernels. The operator that torch's compiler emits takes weights as they are.
    """
    if x.dim() != 2 or len(x) < FEW_ROWS or not _can(x.dtype) or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _can(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES


def _supported() -> frozenset[torch.dtype]:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return frozenset()
    found = {torch.float32}
    if hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found.add(torch.bfloat16)
    return frozenset(found)


_DTYPES = _supported()
