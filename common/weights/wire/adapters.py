"""Frozen weights and adapters into one version: W + factor * B A (Hu et al., arXiv 2106.09685), bit for bit alike.

Learner and nodes compute a merged matrix in float32. Each element takes `rank` multiplications and as many additions,
in that order. A matrix product would add in an order that depends on the processor, the number of threads and the
shape. These operations do not, so a part of a matrix has the bits of the whole one's part.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from common.weights.wire import flat_buffer
from common.weights.wire.failures import GivenUp, Mismatch
from common.weights.wire.layout import AdapterLayout, Layout
from common.weights.wire.pieces import THREADS

PREFIX = "base_model.model."  # Hugging Face's peft puts it before every name
_BLOCK = (1 << 15) - 1  # elements at a time: they stay in a core's cache, and torch starts no threads for so few
_DEVICE_BLOCK = 1 << 26


def merge(weight: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """weight [out, in] + factor * b [out, rank] a [rank, in], in float32, rounded once to the dtype of `weight`.

    Products are summed in the order of the rank, from zero on. So a negative zero of `weight` becomes a positive one.
    """
    left, right = b.float() * factor, a.float()
    merged = torch.empty_like(weight)
    rows = max(1, (_BLOCK if weight.is_cpu else _DEVICE_BLOCK) // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        here = slice(start, start + rows)
        total = torch.zeros_like(weight[here], dtype=torch.float32)
        product = torch.empty_like(total)
        for k in range(len(right)):
            torch.mul(left[here, k, None], right[k], out=product)
            total.add_(product)  # apart: in one operation a processor may leave out a rounding
        merged[here] = total.add_(weight[here])
    return merged


def merge_version(
    frozen: Tensor,
    layout: Layout,
    adapters: Tensor,
    told: AdapterLayout,
    into: Tensor,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Write the version into `into`: `frozen`, with `adapters` in the matrices that have some.

    `frozen` and `into` [total_bytes] uint8 follow `layout`, `adapters` [total_bytes] uint8 follows that of `told`.
    Raises Mismatch when an adapter fits no matrix, and GivenUp: `given_up` is asked before every tensor.
    """
    found = dict(flat_buffer.view(adapters, told.layout))
    weights = flat_buffer.view(frozen, layout)
    places = flat_buffer.view(into, layout)

    def write(weight: Tensor, place: Tensor, pair: tuple[Tensor, Tensor] | None) -> None:
        if given_up():
            raise GivenUp("given up for another transfer")
        place.copy_(weight if pair is None else merge(weight, *pair, told.factor))

    with ThreadPoolExecutor(THREADS, "merge-weights") as pool:
        work = [
            pool.submit(write, weight, place, _pair(found, name, weight))
            for (name, weight), (_, place) in zip(weights, places, strict=True)
        ]
    for one in work:
        one.result()
    if found:
        raise Mismatch(f"the adapters {', '.join(sorted(found)[:3])} stand beside no matrix")


def names(matrix: str) -> tuple[str, str]:
    """The names of A and B beside a matrix of Hugging Face's name."""
    module = f"{PREFIX}{matrix.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _pair(found: dict[str, Tensor], matrix: str, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Take A and B of a matrix out of `found`; None where it has no adapter."""
    a, b = (found.pop(name, None) for name in names(matrix))
    if a is None and b is None:
        return None
    shapes = [tuple(one.shape) if one is not None else None for one in (a, b)]
    if a is None or b is None or weight.dim() != 2 or (len(b), *a.shape[1:]) != weight.shape or len(a) != b.shape[-1]:
        raise Mismatch(f"{matrix} {tuple(weight.shape)} has an adapter of A {shapes[0]} and B {shapes[1]}")
    return a, b
