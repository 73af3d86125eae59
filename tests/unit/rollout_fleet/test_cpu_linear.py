"""The engine's linear layers on the CPU compute with the parameter as it is now."""

import pytest
import torch
from torch.nn import functional

from rollout_fleet.vllm_patches.cpu_weights import FEW_ROWS, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, FEW_ROWS - 1, FEW_ROWS, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_torchs_linear(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 96), torch.randn(160, 96) / 10, torch.randn(160)
    got = linear(x.to(dtype), weight.to(dtype), bias.to(dtype) if with_bias else None)
    expected = functional.linear(x, weight, bias if with_bias else None)
    assert got.dtype == dtype and got.shape == (rows, 160)
    torch.testing.assert_close(got.float(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)


def test_a_weight_that_changes_in_place_is_seen_by_the_next_call() -> None:
    x, weight = torch.randn(64, 32), torch.nn.Parameter(torch.randn(48, 32), requires_grad=False)
    before = linear(x, weight)
    weight.data[7, 3] += 1
    torch.testing.assert_close(linear(x, weight) - before, functional.one_hot(torch.tensor(7), 48) * x[:, 3:4])


def test_rows_of_a_larger_tensor_and_batches_of_sequences_are_taken_too() -> None:
    whole, weight = torch.randn(40, 70), torch.randn(24, 64)
    torch.testing.assert_close(linear(whole[:, 3:67], weight), functional.linear(whole[:, 3:67], weight))
    batch = torch.randn(2, 20, 64)
    torch.testing.assert_close(linear(batch, weight), functional.linear(batch, weight))
