"""Rounding to 8 bits, against every value that 8 bits have, in float64."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_fleet.weights.rounding import FP8, LARGEST, per_channel

VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).double()
VALUES = VALUES[VALUES.isfinite()].unique()  # in order; zero once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-9, 0.02, 300.0])
def test_each_element_is_the_nearest_value_under_the_scale_of_its_row(dtype: torch.dtype, size: float) -> None:
    weight = (torch.randn(24, 40, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    rounded, scale = per_channel(weight)
    assert (rounded.shape, rounded.dtype, scale.shape, scale.dtype) == (weight.shape, FP8, (24, 1), torch.float32)
    largest = weight.double().abs().amax(1, keepdim=True)
    assert scale.equal((largest / LARGEST).clamp(min=1 / (LARGEST * 512)).float())
    wanted = weight.double() / scale.double()
    error = (rounded.double() - wanted).abs()
    best = (VALUES - wanted.unsqueeze(-1)).abs().amin(-1)
    assert (error <= best + 1e-6 * wanted.abs()).all()  # the quotient itself is rounded to float32
    if size > 1e-6:
        assert (rounded.double().abs().amax(1) == LARGEST).all()


def test_a_row_of_zeros_stays_zero_and_ties_go_to_the_even_value() -> None:
    rounded, scale = per_channel(torch.tensor([[0.0, 0.0, 0.0], [448.0, 17.0, 19.0]]))
    assert rounded[0].float().tolist() == [0, 0, 0] and scale[0].isfinite().all()
    assert rounded[1].float().tolist() == [448, 16, 20]  # between 16, 18 and 20


def test_roundings_of_parts_are_parts_of_the_rounding() -> None:
    """vLLM fuses projections by rows, and workers cut them by rows."""
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))
    whole, parts = per_channel(weight), [per_channel(part) for part in weight.split([8, 2, 2])]
    for i in range(2):
        assert whole[i].view(torch.uint8).equal(torch.cat([part[i].view(torch.uint8) for part in parts]))


def test_the_divisors_are_where_the_weights_are() -> None:
    """CUDA multiplies by the reciprocal of a number and of a tensor on the CPU, which vLLM's rounding does not."""
    divisors: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.div.Tensor:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        per_channel(torch.empty(4, 8, device="meta"))
    assert [isinstance(each, torch.Tensor) and each.device.type for each in divisors] == ["meta", "meta"]
