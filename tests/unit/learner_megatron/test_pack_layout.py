"""Every token of a pack has one position on one context rank, and comes back; those in the loss have one row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.parallel_layout import document_multiple
from common.config.schema import ParallelConfig
from learner.megatron.pack_layout import LossRows, PackPart, pack_multiple


def parts(lengths: tuple[int, ...], parallel: ParallelConfig) -> list[PackPart]:
    return [PackPart.of(lengths, parallel, rank) for rank in range(parallel.context)]


def test_zigzag_of_two_documents_on_two_ranks() -> None:
    first, second = parts((5, 3), ParallelConfig(context=2))
    assert first.lengths == second.lengths == (8, 4)
    # chunks of 2 and of 1; 8 stands for a pad
    assert first.source.tolist() == [0, 1, 8, 8, 5, 8]
    assert second.source.tolist() == [2, 3, 4, 8, 6, 7]
    assert first.pads.tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize(
    ("layout", "multiples"),
    [
        ({}, (1, 1)),
        ({"tensor": 2}, (1, 2)),
        ({"tensor": 4, "sequence": False}, (1, 1)),
        ({"context": 2}, (4, 4)),
        ({"tensor": 2, "context": 2}, (4, 4)),
        ({"tensor": 8, "context": 2}, (4, 16)),
        ({"tensor": 2, "context": 3}, (6, 6)),
    ],
)
def test_no_more_padding_than_the_layout_needs(layout: dict[str, int], multiples: tuple[int, int]) -> None:
    parallel = ParallelConfig(**layout)
    assert (document_multiple(parallel), pack_multiple(parallel)) == multiples


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 8])
)
def test_every_token_has_one_position_and_comes_back(lengths: list[int], context: int, tensor: int) -> None:
    parallel = ParallelConfig(context=context, tensor=tensor)
    ranks = parts(tuple(lengths), parallel)
    values = torch.arange(1, sum(lengths) + 1)
    cut = [part.local(values) for part in ranks]
    assert len({len(x) for x in cut}) == 1
    assert sum(len(x) for x in cut) == sum(ranks[0].lengths)
    assert len(cut[0]) % tensor == 0
    for part, mine in zip(ranks, cut, strict=True):
        assert torch.equal(part.whole(torch.cat(cut)), values)
        assert torch.equal(part.pads, mine == 0)
        assert part.padded == (sum(part.lengths) > sum(lengths))
    multiple = document_multiple(parallel)
    for real, padded in zip(lengths[:-1], ranks[0].lengths, strict=False):
        assert padded % multiple == 0 and 0 <= padded - real < multiple
    assert 0 <= ranks[0].lengths[-1] - lengths[-1] < multiple + pack_multiple(parallel)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_ranks_share_a_documents_causal_work_equally(chunks: list[int]) -> None:
    context = 3
    lengths = tuple(2 * context * n for n in chunks)
    position = torch.cat([torch.arange(n) for n in lengths])
    work = [part.local(position + 1).sum().item() for part in parts(lengths, ParallelConfig(context=context))]
    # a document of chunks of n tokens: rank r's chunks r and 5 - r see 5 n (n) + n (n + 1) pairs, whatever r
    assert len(set(work)) == 1


def test_rows_of_more_dimensions_travel_with_their_token() -> None:
    experts = torch.arange(12, dtype=torch.int16).view(3, 2, 2)
    part = parts((3,), ParallelConfig(context=2))[1]
    assert torch.equal(part.local(experts, -1)[0], experts[1])
    assert part.local(torch.full((3, 2), 7), -1).tolist() == [[7, 7], [7, 7]]


def test_rows_of_two_documents_on_two_ranks_are_those_in_the_loss() -> None:
    mask = torch.tensor([0.0, 0, 0, 1, 1, 0, 1, 1])
    first, second = (LossRows.of(part, mask) for part in parts((5, 3), ParallelConfig(context=2)))
    assert first.tokens.tolist() == first.positions.tolist() == []
    assert (second.tokens.tolist(), second.positions.tolist()) == ([3, 4, 6, 7], [1, 2, 4, 5])
    assert second.spread(torch.tensor([5.0, 6, 7, 8])).tolist() == [0, 5, 6, 0, 7, 8]
    assert first.spread(torch.zeros(0, 3)).tolist() == [[0.0] * 3] * 6


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([0.0, 0.1, 0.7, 1.0]),
)
def test_every_token_in_the_loss_has_one_row_whose_value_and_gradient_come_back(
    lengths: list[int], context: int, tensor: int, share: float
) -> None:
    ranks = parts(tuple(lengths), ParallelConfig(context=context, tensor=tensor))
    draw = torch.Generator().manual_seed(sum(lengths))
    mask = (torch.rand(sum(lengths), generator=draw) < share).float()
    values = torch.randn(sum(lengths), 2, generator=draw)
    rows = [LossRows.of(part, mask) for part in ranks]
    assert torch.equal(torch.cat([each.tokens for each in rows]).sort().values, mask.nonzero().squeeze(1))
    local = [part.local(values).requires_grad_() for part in ranks]
    asked = [each.of_part(mine) for each, mine in zip(rows, local, strict=True)]
    for each, found in zip(rows, asked, strict=True):
        assert torch.equal(found, each.of_pack(values))
    spread = [each.spread(found) for each, found in zip(rows, asked, strict=True)]
    whole = ranks[0].whole(torch.cat(spread))
    assert torch.equal(whole, values * mask[:, None])
    weights = torch.randn(sum(lengths), 2, generator=draw)
    gradients = torch.autograd.grad((whole * weights).sum(), local)
    for part, gradient in zip(ranks, gradients, strict=True):
        assert torch.equal(gradient, part.local(weights * mask[:, None]))
