"""Which groups each update of a batch trains on, on which rank, and without which tokens."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.schema import Config
from common.errors import UsageError
from learner.batch.balance import balance_at_home, cost, homes_of_groups
from learner.batch.packing import Document, build, plan_for
from learner.batch.updates import Part, build_updates, minibatches, numbers, plan_updates, trimmed
from tests.rigs.refusals import refused

GROUPS, GROUP_SIZE, BOUND = 12, 6, 256


def documents(ages: tuple[int, ...] = (0,)) -> list[Document]:
    """Groups of samples of many lengths; the tokens of each sample have one of `ages`."""
    draw = np.random.default_rng(1)
    made = []
    for number in range(GROUPS * GROUP_SIZE):
        length = int(draw.integers(4, 120))
        mask = np.r_[0, 0, np.ones(length - 2)].astype(np.uint8)
        age = np.full(length, ages[number % len(ages)], dtype=np.int8)
        tokens = np.full(length, number, dtype=np.int32)
        made.append(
            Document(tokens, mask, staleness=age, serial=100 + number // GROUP_SIZE, sample=number % GROUP_SIZE)
        )
    return made


def backend(ranks: int) -> Any:
    return SimpleNamespace(data_parallel_size=ranks, document_multiple=1, hidden_size=64)


@pytest.fixture
def config_of(make_config: Callable[..., Config]) -> Callable[..., Config]:
    def make(epochs: int = 1, parts: int = 1, most: int | None = None) -> Config:
        learner = {"epochs": epochs, "minibatches": parts, "micro_batch_tokens": BOUND, "groups_per_step": GROUPS}
        return make_config(learner=learner, staleness={"max_updates": most})

    return make


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_minibatches_have_whole_groups_and_every_document_once(
    serials: list[int], count: int, step: int, epoch: int
) -> None:
    parts = minibatches(serials, count, seed=3, step=step, epoch=epoch)
    assert sorted(n for part in parts for n in part) == list(range(len(serials)))
    groups = [{serials[n] for n in part} for part in parts]
    assert sum(map(len, groups)) == len(set(serials)), "no group is in two parts"
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert parts == minibatches(serials, count, seed=3, step=step, epoch=epoch)


def test_the_order_follows_from_seed_step_and_epoch_and_from_nothing_else() -> None:
    serials = [n // 4 for n in range(64)]
    orders = [
        minibatches(serials, 4, seed=seed, step=step, epoch=epoch)
        for seed in (1, 2) for step in (0, 1) for epoch in (0, 1)
    ]  # fmt: skip
    assert len({str(order) for order in orders}) == 8
    backwards = minibatches(serials[::-1], 4, seed=1, step=0, epoch=0)
    assert [{serials[::-1][n] for n in part} for part in backwards] == [{serials[n] for n in p} for p in orders[0]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_update_has_the_plan_of_the_whole_batch(config_of: Callable[..., Config], ranks: int) -> None:
    whole = plan_for(backend(ranks), documents(), BOUND)
    assert plan_updates(backend(ranks), documents(), config_of(), 7) == [[Part(0, 0, own)] for own in whole]


@pytest.mark.parametrize(("epochs", "parts"), [(1, 4), (3, 1), (3, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_epoch_has_every_document_once_on_one_home_with_as_many_microbatches_on_every_rank(
    config_of: Callable[..., Config], ranks: int, epochs: int, parts: int
) -> None:
    all_documents = documents()
    found = plan_updates(backend(ranks), all_documents, config_of(epochs, parts), 7)
    homes: dict[int, int] = {}
    for epoch in range(epochs):
        seen = []
        for number in range(epoch * parts, (epoch + 1) * parts):
            of_ranks = [own[number] for own in found]
            assert {part[:2] for part in of_ranks} == {(number, epoch)}
            assert len({len(part.microbatches) for part in of_ranks}) == 1
            for rank, part in enumerate(of_ranks):
                for batch in part.microbatches:
                    assert sum(all_documents[n].places for n in batch) <= BOUND
                for n in numbers([part]):
                    assert homes.setdefault(n, rank) == rank
                    seen.append(n)
            groups = {all_documents[n].serial for part in of_ranks for n in numbers([part])}
            assert len(groups) == GROUPS // parts
        assert sorted(seen) == list(range(len(all_documents)))
    orders = [[set(numbers(own[epoch * parts : epoch * parts + 1])) for own in found] for epoch in range(epochs)]
    assert all((one == other) == (parts == 1) for one, other in pairwise(orders)), "each epoch has an order of its own"
    if parts == 1:
        assert len({str(part.microbatches) for part in found[0]}) == 1, "the same set is packed alike"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("epochs", "parts", "worst"), [(1, 3, 1.02), (2, 1, 1.02), (3, 3, 1.25)])
def test_the_work_of_every_update_is_about_even(
    config_of: Callable[..., Config], ranks: int, epochs: int, parts: int, worst: float
) -> None:
    """Exactly where homes can be chosen for an update; else because every group is spread over the ranks."""
    all_documents = documents()
    costs = cost(np.array([d.places for d in all_documents]), 64)
    found = plan_updates(backend(ranks), all_documents, config_of(epochs, parts), 2)
    for number in range(epochs * parts):
        loads = [costs[numbers([own[number]])].sum() for own in found]
        assert max(loads) <= worst * sum(loads) / ranks, number


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_ranks_take_turns_where_a_minibatch_has_few_documents(config_of: Callable[..., Config], ranks: int) -> None:
    """The frozen policy computes the whole batch at once; 12 minibatches of 6 documents would load the first ranks."""
    all_documents = documents()
    costs = cost(np.array([d.places for d in all_documents]), 64)
    found = plan_updates(backend(ranks), all_documents, config_of(1, GROUPS), 7)
    loads = [costs[numbers(own)].sum() for own in found]
    assert max(loads) - min(loads) <= 1.01 * costs.max()
    for update in range(GROUPS):
        own = sorted(n for parts in found for n in numbers([parts[update]]))
        alone = plan_for(backend(ranks), [all_documents[n] for n in own], BOUND)
        expected = sorted([[own[i] for i in batch] for batch in rank] for rank in alone)
        assert sorted(parts[update].microbatches for parts in found) == expected, "as the update balances best"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 90)), min_size=1, max_size=60), st.integers(1, 5))
def test_spread_groups_differ_between_ranks_by_no_more_than_a_document(rows: list[tuple[int, int]], ranks: int) -> None:
    groups, costs = np.array([g for g, _ in rows]), np.array([float(c) for _, c in rows])
    homes = homes_of_groups(costs, groups, ranks)
    assert homes.shape == groups.shape and set(homes.tolist()) <= set(range(ranks))
    for group in np.unique(groups):
        own = groups == group
        loads = [costs[own & (homes == rank)].sum() for rank in range(ranks)]
        assert max(loads) - min(loads) <= costs[own].max()
    plan = balance_at_home(costs.astype(np.int64), homes, ranks, 90)
    assert [sorted(n for batch in own for n in batch) for own in plan] == [
        np.flatnonzero(homes == rank).tolist() for rank in range(ranks)
    ]
    assert len({len(own) for own in plan}) == 1


def test_a_document_that_no_microbatch_takes_is_named(config_of: Callable[..., Config]) -> None:
    long = Document(np.zeros(BOUND + 2, np.int32), np.ones(BOUND + 2, np.uint8), name="the long one", serial=1)
    for epochs, parts in ((1, 1), (1, 2), (2, 2)):
        with refused(UsageError, "the long one", str(BOUND)):
            plan_updates(backend(2), [*documents(), long], config_of(epochs, parts), 0)


# ---------------------------------------------------------------- tokens that are too old for an update


def test_a_token_leaves_the_updates_for_which_it_is_too_old(config_of: Callable[..., Config]) -> None:
    """Four updates a version; a sample of two versions."""
    tokens, ages = np.zeros(6, np.int32), np.array([0, 0, 2, 2, 1, 1], np.int8)
    document = Document(tokens, np.array([0, 0, 1, 1, 0, 1], np.uint8), staleness=ages)
    config = config_of(2, 2, most=8)
    masks = [trimmed(document, update, config).loss_mask.tolist() for update in range(4)]
    assert masks == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]]
    assert trimmed(document, 3, config_of(2, 2)) is document
    assert trimmed(document, 0, config_of(2, 2, most=8)).loss_mask.dtype == np.uint8


def test_documents_and_updates_without_a_token_left_are_left_out(config_of: Callable[..., Config]) -> None:
    config = config_of(2, 2, most=5)  # ages 0, 4 and 8 at the beginning of the batch
    found = plan_updates(backend(2), aged := documents(ages=(0, 1, 2)), config, 3)
    for own in found:
        for part in own:
            assert all(aged[n].staleness[0] * 4 + part.update <= 5 for n in numbers([part]))
    assert [part.update for part in found[0]] == [0, 1, 2, 3]
    fresh = {n for own in found for n in numbers(own[2:])}
    assert fresh == set(range(0, len(aged), 3)), "in the second epoch only tokens of this version are left"
    old = config_of(1, 2, most=2)
    found = plan_updates(backend(2), documents(ages=(1,)), old, 3)
    assert [[part.update for part in own] for own in found] == [[0]] * 2, "the second update would train nothing"
    assert plan_updates(backend(2), documents(ages=(2,)), old, 3) == [[], []]
    assert plan_updates(backend(2), [], config_of(2, 2), 3) == [[], []]


def test_the_tensors_of_an_update_are_those_of_its_documents_without_such_tokens(
    config_of: Callable[..., Config],
) -> None:
    config = config_of(2, 2, most=5)
    aged = documents(ages=(0, 1))
    (own,) = plan_updates(backend(1), aged, config, 3)
    updates = build_updates(dict(enumerate(aged)), own, config)
    assert [(u.number, u.epoch) for u in updates] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for update, part in zip(updates, own, strict=True):
        plain = build(aged, part.microbatches)
        for batch, whole in zip(update.microbatches, plain, strict=True):
            assert batch.numbers == whole.numbers and batch.tokens.tolist() == whole.tokens.tolist()
            kept = whole.loss_mask * (whole.staleness * 4 + update.number <= 5)
            assert batch.loss_mask.tolist() == kept.tolist()
            assert batch.loss_mask.sum() > 0
