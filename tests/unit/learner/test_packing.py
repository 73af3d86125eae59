"""Packing: bounds, balance, determinism and the contents of a microbatch. tests/property has the general claim."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import UsageError
from learner.batch.balance import cost
from learner.batch.packing import Document, build, plan
from tests.rigs.refusals import refused


def document(tokens: int, start: int = 0, advantage: float = 0.0) -> Document:
    ids = np.arange(start, start + tokens, dtype=np.int32)
    mask = np.ones(tokens, dtype=np.uint8)
    logprobs = -ids.astype(np.float32)
    return Document(ids, mask, logprobs, ids % 3, advantage, f"document of {tokens}")


def test_a_microbatch_holds_shifted_targets_and_their_own_figures() -> None:
    (batch,) = build([document(3, 10, 0.5), document(4, 20, -1.0)], [[0, 1]])
    assert batch.tokens.tolist() == [10, 11, 20, 21, 22]
    assert batch.targets.tolist() == [11, 12, 21, 22, 23]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.document_lengths == (2, 3)
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0]
    assert batch.behavior_logprobs.tolist() == [-11, -12, -21, -22, -23]
    assert batch.staleness.tolist() == [11 % 3, 12 % 3, 21 % 3, 22 % 3, 23 % 3]
    assert (batch.tokens.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)


def test_routing_is_of_the_inputs_and_unknown_where_a_document_has_none() -> None:
    routing = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    documents = [document(4), replace(document(3), routed_experts=routing)]
    (batch,) = build(documents, [[0, 1]])
    assert batch.routed_experts is not None and batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts.tolist() == [[[-1, -1]] * 2] * 3 + routing[:2].tolist()
    assert build(documents[:1], [[0]])[0].routed_experts is None


def test_supervised_documents_get_zeros_for_what_they_lack() -> None:
    (batch,) = build([Document(np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, 0], dtype=np.uint8))], [[0]])
    assert batch.loss_mask.tolist() == [0, 1, 1, 0]
    assert batch.behavior_logprobs.tolist() == batch.advantages.tolist() == [0.0] * 4


def test_a_document_longer_than_the_bound_names_the_key_and_says_when_padding_is_why() -> None:
    documents = [document(5), document(12)]
    with refused(UsageError, "document of 12", "11 tokens", "learner.micro_batch_tokens is 10"):
        plan(documents, 1, 10)
    with refused(UsageError, "12 tokens", "learner.parallel.context"):
        plan(documents, 1, 11, multiple=4)
    assert len(plan(documents, 1, 12, multiple=4)[0]) == 2


def test_cost_of_attention_is_kaplans_ratio() -> None:
    # 24 h^2 per token against 2 h p per token of a document of p places
    places, hidden = np.array([1, 6144, 12288]), 1024
    expected = (24 * hidden**2 * places + 2 * hidden * places**2) / (24 * hidden**2)
    assert cost(places, hidden) == pytest.approx(expected)
    assert cost(places, hidden)[2] == 2 * places[2]
    assert cost(places, 0).tolist() == places.tolist()


def test_long_documents_weigh_more_than_their_tokens() -> None:
    documents = [document(9), *[document(2)] * 8]
    by_places = plan(documents, 2, 100)
    assert sorted(sum(documents[i].places for i in rank[0]) for rank in by_places) == [8, 8]
    by_cost = plan(documents, 2, 100, hidden_size=1)  # 8 + 64 / 12 = 13.3 against 1.08
    assert sorted(len(rank[0]) for rank in by_cost) == [1, 8]
    assert [0] in [rank[0] for rank in plan([document(9), *[document(2)] * 12], 2, 100, hidden_size=1)]


def test_a_rank_with_less_so_far_gets_the_larger_microbatch_of_the_next_round() -> None:
    documents = [document(n + 1) for n in (5, 4, 3, 2)]  # no two fit into a microbatch
    assert sorted(plan(documents, 2, 5)) == [[[0], [3]], [[1], [2]]]


def test_the_number_of_microbatches_is_near_the_least_possible() -> None:
    draw = np.random.default_rng(1)
    documents = [document(int(n)) for n in draw.integers(100, 1000, 500)]
    count = len(plan(documents, 1, 4096)[0])
    assert count <= 1.1 * sum(d.places for d in documents) / 4096 + 1


def test_the_order_of_documents_is_kept_and_a_rank_without_any_has_one_microbatch() -> None:
    assert plan([document(n) for n in (5, 30, 6, 20, 7)], 1, 1000) == [[[0, 1, 2, 3, 4]]]
    assert plan([], 3, 100) == [[[]], [[]], [[]]]


def test_ranks_trade_until_long_tails_are_even() -> None:
    lengths = np.exp(np.random.default_rng(3).normal(np.log(3000), 1.0, 512)).clip(2, 32768).astype(int)
    documents = [Document(np.zeros(n, np.int32), np.ones(n, np.uint8)) for n in lengths]
    costs = cost(lengths - 1, 1024)
    plans = plan(documents, 32, 32768, hidden_size=1024)
    loads = [sum(costs[i] for numbers in rank for i in numbers) for rank in plans]
    assert max(loads) <= 1.05 * sum(loads) / len(loads)  # 1.4 without trades
    for rank in plans:
        weights = [sum(costs[i] for i in numbers) for numbers in rank]
        assert weights == sorted(weights, reverse=True)  # ranks compute similar microbatches at the same time
