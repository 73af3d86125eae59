"""The tensors of all ranks, as the checks of a certificate read them: no rank hides another's error."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from learner.certificate.checks import Found, furthest, furthest_rows, numbered, worst

EXACT = torch.tensor([-1.0, -2.0, -3.0])
OTHER = torch.tensor([-0.5, -0.25])


def found(folder: Path, *ranks: Tensor) -> Found:
    """Ranks that share pack 0; the first also has pack 1, and what the lead alone writes."""
    for number, row in enumerate(ranks):
        own = {"logprobs.0": row}
        if number == 0:
            own |= {"logprobs.1": OTHER, "figures": torch.tensor([0.5, 2.0])}
        save_file(own, folder / f"{number}.safetensors")
    return Found(folder)


def test_ranks_that_found_the_same_are_compared_once(tmp_path: Path) -> None:
    made = found(tmp_path, EXACT, EXACT.clone(), EXACT.clone())
    rows = made.section("logprobs")
    assert {*rows} == {"0", "1"} and made.figures == (0.5, 2.0)
    assert worst(rows, numbered([EXACT, OTHER]), furthest)[0] == 0.0
    assert [row.tolist() for row in furthest_rows(rows, [EXACT, OTHER])] == [EXACT.tolist(), OTHER.tolist()]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", [0.25, math.nan])
def test_the_worst_rank_decides_wherever_it_is(tmp_path: Path, at: int, error: float) -> None:
    wrong = EXACT + torch.tensor([0.0, error, 0.0])
    rows = found(tmp_path, *(wrong if number == at else EXACT for number in range(3))).section("logprobs")
    difference, where = worst(rows, numbered([EXACT, OTHER]), furthest)
    assert not difference <= 5e-5 and where.startswith("0") and (at == 0 or where == f"0 of rank {at}")
    row, other = furthest_rows(rows, [EXACT, OTHER])
    torch.testing.assert_close(row, wrong, equal_nan=True)
    assert torch.equal(other, OTHER)


def test_a_pack_that_no_rank_has_is_an_infinite_difference(tmp_path: Path) -> None:
    rows = found(tmp_path, EXACT, EXACT + 1e-6).section("logprobs")
    assert worst(rows, numbered([EXACT, OTHER, OTHER]), furthest) == (math.inf, "2, which only one of them has")
