"""Every token of a pack has one position on one context rank, and comes back to where it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.parallel_layout import document_multiple
from common.config.schema import ParallelConfig
from learner.megatron.pack_layout import PackPart, pack_multiple

CPU = torch.device("cpu")


def parts(lengths: tuple[int, ...], parallel: ParallelConfig) -> list[PackPart]:
    return [PackPart.of(lengths, parallel, rank, CPU) for rank in range(parallel.context)]


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
