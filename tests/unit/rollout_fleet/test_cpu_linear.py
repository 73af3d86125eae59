"""The engine's linear layers on the CPU compute with the parameter as it is now."""

import pytest
import torch
from torch.nn import functional

from rollout_fleet.vllm_patches.worker_process import FEW_ROWS, SMALL_WEIGHT, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, FEW_ROWS - 1, FEW_ROWS, 100])
@pytest.mark.parametrize("columns", [96, SMALL_WEIGHT // 160 + 1])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_torchs_linear(dtype: torch.dtype, rows: int, columns: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, columns), torch.randn(160, columns) / columns**0.5, torch.randn(160)
    got = linear(x.to(dtype), weight.to(dtype), bias.to(dtype) if with_bias else None)
    expected = functional.linear(x, weight, bias if with_bias else None)
    assert got.dtype == dtype and got.shape == (rows, 160)
    torch.testing.assert_close(got.float(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)


def test_a_weight_that_changes_in_place_is_seen_by_the_next_call() -> None:
    x, weight = torch.randn(64, 512), torch.nn.Parameter(torch.randn(512, 512) / 20, requires_grad=False)
    before = linear(x, weight)
    weight.data[7, 3] += 1
    torch.testing.assert_close(linear(x, weight) - before, functional.one_hot(torch.tensor(7), 512) * x[:, 3:4])


def test_rows_of_a_larger_tensor_and_batches_of_sequences_are_taken_too() -> None:
    whole, weight = torch.randn(40, 520), torch.randn(512, 512) / 20
    torch.testing.assert_close(linear(whole[:, 3:515], weight), functional.linear(whole[:, 3:515], weight))
    batch = torch.randn(2, 20, 512)
    torch.testing.assert_close(linear(batch, weight), functional.linear(batch, weight))
