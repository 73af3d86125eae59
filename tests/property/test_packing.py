"""Whatever the documents, the ranks and the bound: every loss token is trained exactly once, within the bound."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.backend import shapes_agree
from learner.packing import Document, microbatches_for


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Document], int, int]:
    lengths = draw(st.lists(st.integers(2, 40), max_size=40))
    documents: list[Document] = []
    base = 1
    for length in lengths:
        mask = np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), dtype=np.uint8)
        documents.append(Document(np.arange(base, base + length, dtype=np.int32), mask))
        base += length
    return documents, draw(st.integers(1, 5)), draw(st.integers(max([n - 1 for n in lengths], default=1), 120))


@given(cases())
def test_every_loss_token_exactly_once_and_within_the_bound(case: tuple[list[Document], int, int]) -> None:
    documents, ranks, bound = case
    parts = [microbatches_for(documents, rank, ranks, bound) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    trained: list[int] = []
    seen: list[int] = []
    for batch in (batch for part in parts for batch in part):
        assert shapes_agree(batch)
        assert len(batch.tokens) <= bound
        chosen = batch.loss_mask > 0
        trained += batch.targets[chosen].tolist()
        seen += [t for t in batch.targets.tolist() if t > 0]
        # inputs and targets are neighbours within one document; a filler is all zeros
        assert ((batch.targets == batch.tokens + 1) | (batch.targets == 0)).all()
    assert sorted(trained) == [t for d in documents for t in d.tokens[1:][d.loss_mask[1:] > 0].tolist()]
    assert sorted(seen) == [t for d in documents for t in d.tokens[1:].tolist()]
