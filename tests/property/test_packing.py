"""Whatever the documents, the ranks, the bound and the layout: every token exactly once, within the bound, balanced."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch.balance import cost, counted_places
from learner.batch.packing import FILLER, Document, build, plan


@dataclass(frozen=True)
class Case:
    documents: list[Document]
    ranks: int
    bound: int
    multiple: int
    hidden_size: int

    @property
    def places(self) -> np.ndarray:
        return counted_places(np.array([d.places for d in self.documents], dtype=np.int64), self.multiple)

    def totals(self, roomy: bool = False) -> list[float]:
        """Cost of every rank's microbatches."""
        bound = max(1, int(self.places.sum())) if roomy else self.bound
        costs = cost(self.places, self.hidden_size)
        plans = plan(self.documents, self.ranks, bound, self.multiple, self.hidden_size)
        return [sum(costs[i] for numbers in rank for i in numbers) for rank in plans]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(2, 40), max_size=40))
    documents: list[Document] = []
    base = 1
    for length in lengths:
        mask = np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), dtype=np.uint8)
        documents.append(Document(np.arange(base, base + length, dtype=np.int32), mask))
        base += length
    multiple = draw(st.sampled_from([1, 4, 6, 8]))
    least = -(-max([n - 1 for n in lengths], default=1) // multiple) * multiple
    bound = draw(st.integers(least, 120))
    return Case(documents, draw(st.integers(1, 5)), bound, multiple, draw(st.sampled_from([0, 1, 64])))


@settings(deadline=None)
@given(cases())
def test_every_loss_token_exactly_once_and_within_the_bound(case: Case) -> None:
    plans = plan(case.documents, case.ranks, case.bound, case.multiple, case.hidden_size)
    parts = [build(case.documents, numbers) for numbers in plans]
    assert len({len(part) for part in parts}) == 1
    trained: list[int] = []
    seen: list[int] = []
    for batch in (batch for part in parts for batch in part):
        n = sum(batch.document_lengths)
        arrays = (batch.tokens, batch.targets, batch.positions, batch.loss_mask, batch.advantages)
        assert all(x.shape == (n,) for x in (*arrays, batch.behavior_logprobs))
        counted = counted_places(np.array(batch.document_lengths), case.multiple).sum()
        assert counted <= case.bound or batch.document_lengths == (FILLER.places,)
        chosen = batch.loss_mask > 0
        trained += batch.targets[chosen].tolist()
        seen += [t for t in batch.targets.tolist() if t > 0]
        # inputs and targets are neighbours within one document; a filler is all zeros
        assert ((batch.targets == batch.tokens + 1) | (batch.targets == 0)).all()
    assert sorted(trained) == [t for d in case.documents for t in d.tokens[1:][d.loss_mask[1:] > 0].tolist()]
    assert sorted(seen) == [t for d in case.documents for t in d.tokens[1:].tolist()]


@settings(deadline=None)
@given(cases())
def test_ranks_differ_by_no_more_than_the_most_expensive_document(case: Case) -> None:
    largest = cost(case.places, case.hidden_size).max(initial=0)
    totals = case.totals(roomy=case.hidden_size > 0)
    assert max(totals) - min(totals) <= largest * (1 + 1e-9)


@settings(deadline=None)
@given(cases())
def test_at_most_twice_as_many_microbatches_as_the_tokens_need(case: Case) -> None:
    plans = plan(case.documents, case.ranks, case.bound, case.multiple, case.hidden_size)
    # With a microbatch less all would have been more than half full; their number grows by a rank's or 5 % at a time.
    half_full = 2 * int(case.places.sum()) / case.bound
    assert len(plans[0]) * case.ranks <= 1.05 * half_full + case.ranks
