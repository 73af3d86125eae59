"""Advantages and returns from a critic's values, and its loss, against their formulas in plain float64 loops."""

import json
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.backend_protocol import LossOutput, Microbatch
from learner.loss.gae import WHITENING_EPS, length_lambda, less_kl, moments, over_tokens, over_turns, whitening
from learner.loss.value_loss import clipped_squares, value_loss
from tests.rigs.processes import ROOT

LEVELS = {"token": over_tokens, "turn": over_turns}
PEERS: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "peer_losses.json").read_text())["values"]

# ---------------------------------------------------------------- advantages and returns


def steps(mask: list[bool], level: str) -> list[list[int]]:
    """The places of every step."""
    found: list[list[int]] = []
    for place, kept in enumerate(mask):
        if kept and level == "turn" and place and mask[place - 1]:
            found[-1].append(place)
        elif kept:
            found.append([place])
    return found


def by_definition(
    rewards: list[float], values: list[float], mask: list[bool], level: str, *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(advantages, advantages + values) by equation 16, term by term and without a recursion."""
    own = steps(mask, level)
    starts = [places[0] for places in own]
    paid = [sum(rewards[a:b]) for a, b in pairwise([*starts, len(mask)])]
    before = [*(values[start] for start in starts), 0.0]
    advantages, targets = [0.0] * len(mask), [0.0] * len(mask)
    for s, places in enumerate(own):
        total = 0.0
        for k in range(s, len(own)):
            total += (gamma * lam) ** (k - s) * (paid[k] + gamma * before[k + 1] - before[k])
        for place in places:
            advantages[place], targets[place] = total, total + before[s]
    return advantages, targets


def arrays(rewards: list[float], values: list[float], mask: list[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(rewards), np.array(values), np.array(mask, dtype=bool)


number = st.floats(-4, 4, width=32)
share = st.sampled_from([0.0, 0.3, 0.95, 1.0])
documents = st.lists(st.tuples(number, number, st.booleans()), max_size=40)


@pytest.mark.parametrize("level", LEVELS)
@given(places=documents, gamma=share, lam=share, lam_values=share)
def test_advantages_and_returns_are_the_sums_of_their_definition(
    level: str, places: list[tuple[float, float, bool]], gamma: float, lam: float, lam_values: float
) -> None:
    rewards, values = ([place[i] for place in places] for i in range(2))
    mask = [kept for *_, kept in places]
    found = LEVELS[level](*arrays(rewards, values, mask), gamma=gamma, lam=lam, lam_values=lam_values)
    wanted, _ = by_definition(rewards, values, mask, level, gamma=gamma, lam=lam)
    _, returns = by_definition(rewards, values, mask, level, gamma=gamma, lam=lam_values)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(found[1], returns, rtol=1e-12, atol=1e-11)


# A prompt of two places, a turn of three, two places of the environment, and a turn of two.
MASK = [False, False, True, True, True, False, False, True, True]
VALUES = [9.0, 9.0, 1.0, 2.0, 3.0, 9.0, 9.0, 4.0, 5.0]
PAID = [0.0, 0.0, 0.0, 0.0, 10.0, 0.0, 0.0, 0.0, 20.0]
BY_HAND = {
    # d = [2 - 1, 3 - 2, 10 + 4 - 3, 5 - 4, 20 - 5] = [1, 1, 11, 1, 15]
    "tokens: the next surprise alone": ("token", 1.0, 0.0, [1, 1, 11, 1, 15]),
    "tokens: all rewards to come, less the value": ("token", 1.0, 1.0, [29, 28, 27, 16, 15]),
    "tokens: half of each later surprise": ("token", 1.0, 0.5, [5.3125, 8.625, 15.25, 8.5, 15]),
    "tokens: a reward counts half a token earlier": ("token", 0.5, 1.0, [2.75, 5.5, 12, 6, 15]),
    # d = [10 + 4 - 1, 20 - 4] = [13, 16]
    "turns: the next surprise alone": ("turn", 1.0, 0.0, [13, 13, 13, 16, 16]),
    "turns: all rewards to come, less the value": ("turn", 1.0, 1.0, [29, 29, 29, 16, 16]),
    "turns: half of each later surprise": ("turn", 1.0, 0.5, [21, 21, 21, 16, 16]),
    "turns: a reward counts half a turn earlier": ("turn", 0.5, 1.0, [19, 19, 19, 16, 16]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_advantages_of_two_turns(name: str) -> None:
    level, gamma, lam, wanted = BY_HAND[name]
    found, returns = LEVELS[level](*arrays(PAID, VALUES, MASK), gamma=gamma, lam=lam, lam_values=lam)
    assert found[MASK].tolist() == wanted
    first = np.array(VALUES)[MASK] if level == "token" else np.array([1, 1, 1, 4, 4])
    assert (returns[MASK] - found[MASK]).tolist() == first.tolist()
    assert not found[~np.array(MASK)].any() and not returns[~np.array(MASK)].any()


@pytest.mark.parametrize("level", LEVELS)
def test_places_outside_the_loss_are_skipped_and_their_rewards_belong_to_the_step_before(level: str) -> None:
    advance = LEVELS[level]
    keys = {"gamma": 0.9, "lam": 0.8, "lam_values": 1.0}
    wanted = advance(*arrays(PAID, VALUES, MASK), **keys)
    other = [0.0 if kept else -7.0 for kept in MASK]
    noise = [value + more for value, more in zip(VALUES, other, strict=True)]
    late = [50.0, 0.0, 0.0, 0.0, 4.0, 6.0, 0.0, 0.0, 20.0]  # 50 before any step; 6 of 10 by the environment's text
    for rewards, values in ((PAID, noise), (late, VALUES)):
        np.testing.assert_array_equal(advance(*arrays(rewards, values, MASK), **keys), wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_documents_without_a_step_and_with_one(level: str) -> None:
    keys = {"gamma": 0.9, "lam": 0.5, "lam_values": 0.5}
    for count in (0, 3):
        found = LEVELS[level](np.ones(count), np.ones(count), np.zeros(count, dtype=bool), **keys)
        assert [each.tolist() for each in found] == [[0.0] * count] * 2
    found = LEVELS[level](*arrays([0.0, 2.0], [5.0, 0.5], [False, True]), **keys)
    assert [each.tolist() for each in found] == [[0.0, 1.5], [0.0, 2.0]]


def test_a_cut_episode_ends_with_the_reward_that_it_got() -> None:
    whole = over_tokens(*arrays([0, 0, 0, 1], [0.5] * 4, [True] * 4), gamma=1.0, lam=0.9, lam_values=1.0)
    cut = over_tokens(*arrays([0, 0, 0], [0.5] * 3, [True] * 3), gamma=1.0, lam=0.9, lam_values=1.0)
    assert whole[1].tolist() == [1.0] * 4 and cut[1].tolist() == [0.0] * 3, "no value replaces what was cut"


def test_lambda_by_length_reaches_over_a_share_of_the_answer() -> None:
    assert [length_lambda(tokens, 0.05) for tokens in (0, 1, 20)] == [0.0, 0.0, 0.0]
    assert length_lambda(100, 0.05) == pytest.approx(0.8)
    for tokens in (200, 1000):
        weights = length_lambda(tokens, 0.05) ** np.arange(100 * tokens)
        assert weights.sum() == pytest.approx(0.05 * tokens)


def test_the_divergence_is_taken_from_the_rewards_of_loss_tokens() -> None:
    logprobs, reference = np.array([-9.0, -1.0, -2.0]), np.array([-1.0, -1.5, -1.0])
    found = less_kl(np.array([0.0, 0.0, 1.0]), logprobs, reference, np.array([False, True, True]), 0.1)
    assert found.tolist() == pytest.approx([0.0, -0.05, 1.1])


@given(parts=st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), max_size=6), order=st.randoms())
def test_whitening_has_the_mean_and_deviation_of_all_loss_places(parts: list[list[float]], order: Any) -> None:
    places = [np.array([99.0, *part]) for part in parts]
    found = [moments(part, np.arange(len(part)) > 0) for part in places]
    mean, deviation = whitening(found)
    everything = np.concatenate([np.zeros(0), *(part[1:] for part in places)])
    assert mean == pytest.approx(everything.mean() if len(everything) else 0.0, abs=1e-9)
    wanted = everything.std(ddof=1) + WHITENING_EPS if len(everything) > 1 else 1.0
    assert deviation == pytest.approx(wanted, rel=1e-6, abs=1e-5)
    order.shuffle(found)
    assert whitening(found) == (mean, deviation), "whatever rank a document is on"


# ---------------------------------------------------------------- the critic's loss


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def microbatch(mask: list[bool], frozen: Tensor | None, returns: Tensor | None) -> Microbatch:
    """One document."""
    ids = torch.zeros(len(mask), dtype=torch.int64)
    ones = torch.ones(len(mask))
    kept = torch.tensor(mask).float()
    batch = Microbatch(ids, ids, ids, (len(mask),), kept, advantages=ones, behavior_logprobs=ones, numbers=(0,))
    return replace(batch, values=frozen, returns=returns)


CLIPPED = {
    # V, V_frozen, R -> 1/2 max((V - R)^2, (V_clipped - R)^2) with a bound of 1
    "within the bound": (0.5, 0.0, 2.0, 1.125, False),
    "beyond it, towards the return": (1.5, 0.0, 2.0, 0.5, True),
    "beyond it, past the return": (5.0, 0.0, 2.0, 4.5, False),
    "beyond it, away from the return": (-1.5, 0.0, 2.0, 6.125, False),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_a_value_counts_as_at_its_bound_where_that_is_worse(name: str) -> None:
    value, frozen, target, wanted, bounded = CLIPPED[name]
    values = tensor(value).requires_grad_()
    squares, clipped = clipped_squares(values, tensor(frozen), tensor(target), 1.0)
    assert (squares.tolist(), clipped.tolist()) == ([wanted], [bounded])
    (gradient,) = torch.autograd.grad(squares.sum(), values)
    assert gradient.tolist() == [0.0 if bounded else value - target]
    unbounded, clipped = clipped_squares(values.detach(), tensor(frozen), tensor(target), None)
    assert (unbounded.tolist(), clipped.any()) == ([(value - target) ** 2 / 2], False)


def test_no_value_within_the_bound_counts_as_clipped() -> None:
    draw = torch.Generator().manual_seed(3)
    frozen, moved, returns = (torch.randn(1000, generator=draw) for _ in range(3))
    squares, clipped = clipped_squares(frozen + moved.clamp(-0.9, 0.9), frozen, returns, 1.0)
    assert squares.all() and not clipped.any(), "rounding decides nothing"


@pytest.mark.parametrize("clip", [None, 0.4])
def test_the_gradient_of_the_value_loss_is_that_of_finite_differences(clip: float | None) -> None:
    draw = torch.Generator().manual_seed(4)
    values, frozen, returns = (torch.randn(40, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(40, generator=draw) < 0.7).tolist()
    loss = value_loss(clip)
    batch = microbatch(mask, frozen, returns)
    assert torch.autograd.gradcheck(lambda x: loss(x, None, batch).loss_sum, values.requires_grad_())
    (gradient,) = torch.autograd.grad(loss(values, None, batch).loss_sum, values)
    assert not gradient[~torch.tensor(mask)].any()


def test_sums_are_those_of_loss_tokens_and_add_over_microbatches() -> None:
    values, frozen, returns = tensor(0.5, 9.0, 1.5, -1.5), tensor(0.0, 9.0, 0.0, 1.0), tensor(2.0, 9.0, 2.0, -4.0)
    mask = [True, False, True, True]
    loss = value_loss(1.0)
    found = loss(values, None, microbatch(mask, frozen, returns))
    assert found.loss_sum.item() == 1.125 + 0.5 + 8.0  # the last one counts as 0
    wanted = {"value_clipped": 2, "steps": 3, "returns": 0, "returns_squared": 24, "errors": -1, "errors_squared": 33}
    assert {name: value.item() for name, value in found.sums.items()} == wanted
    assert found.denominator is None, "it is divided by loss tokens"
    halves = [
        loss(values[part], None, microbatch(mask[part], frozen[part], returns[part]))
        for part in (slice(2), slice(2, None))
    ]
    assert sum(half.loss_sum.item() for half in halves) == found.loss_sum.item()
    assert {name: sum(half.sums[name].item() for half in halves) for name in wanted} == wanted


packs = st.lists(st.lists(st.tuples(number, number, st.booleans()), min_size=1, max_size=9), min_size=1, max_size=5)


@given(places=packs, lam=share, clip=st.sampled_from([None, 0.5]))
def test_by_turns_every_place_learns_the_turns_return_and_figures_are_those_of_turns(
    places: list[list[tuple[float, float, bool]]], lam: float, clip: float | None
) -> None:
    """Documents end to end in a pack: the first place of each may go on where the last one of the other ended."""
    masks = [[kept for *_, kept in own] for own in places]
    frozen = [[value for _, value, _ in own] for own in places]
    returns = [
        by_definition([paid for paid, *_ in own], value, mask, "turn", gamma=1.0, lam=lam)[1]
        for own, value, mask in zip(places, frozen, masks, strict=True)
    ]
    whole, target, mask = tensor(*chain(*frozen)), tensor(*chain(*returns)), [*chain(*masks)]
    positions = torch.cat([torch.arange(len(own)) for own in places])
    batch = replace(microbatch(mask, whole, target), positions=positions)
    newer = (whole + 0.25).requires_grad_()
    out = value_loss(clip, "turn")(newer, None, batch)
    (gradient,) = torch.autograd.grad(out.loss_sum, newer)
    torch.testing.assert_close(gradient, torch.where(torch.tensor(mask), newer.detach() - target, 0.0))
    assert out.denominator is None, "a turn weighs as its tokens"
    rows = zip(returns, frozen, masks, strict=True)
    read = [(r[turn[0]], v[turn[0]]) for r, v, own in rows for turn in steps(own, "turn")]
    wanted = {"steps": len(read), "returns": sum(r for r, _ in read), "returns_squared": sum(r**2 for r, _ in read)}
    wanted |= {"errors": sum(r - v for r, v in read), "errors_squared": sum((r - v) ** 2 for r, v in read)}
    for name, value in wanted.items():
        assert out.sums[name].item() == pytest.approx(value, rel=1e-12, abs=1e-9), name


def test_a_filler_has_no_loss_and_sums_of_the_same_names() -> None:
    values = tensor(3.0).requires_grad_()
    filler = value_loss(0.2)(values, None, microbatch([False], None, None))
    full = value_loss(0.2)(values, None, microbatch([True], tensor(1.0), tensor(1.0)))
    assert [*filler.sums] == [*full.sums]
    assert not any(value.item() for value in filler.sums.values())
    (gradient,) = torch.autograd.grad(filler.loss_sum, values)
    assert (filler.loss_sum.item(), gradient.item()) == (0.0, 0.0)


# ---------------------------------------------------------------- against verl


@pytest.mark.parametrize("row", PEERS["rows"], ids=lambda row: f"gamma {row['gamma']:g}, lambda {row['lam']:g}")
def test_advantages_and_returns_are_verls(row: dict[str, Any]) -> None:
    given = {name: np.array(PEERS["inputs"][name]) for name in ("rewards", "values", "mask")}
    mask = given["mask"] > 0
    keys = {"gamma": row["gamma"], "lam": row["lam"], "lam_values": row["lam"]}
    found = [
        over_tokens(rewards, values, kept, **keys)
        for rewards, values, kept in zip(given["rewards"], given["values"], mask, strict=True)
    ]
    mean, deviation = whitening(moments(own, kept) for (own, _), kept in zip(found, mask, strict=True))
    for (own, returns), kept, wanted, targets in zip(found, mask, row["advantages"], row["returns"], strict=True):
        np.testing.assert_allclose(((own - mean) / deviation)[kept], np.array(wanted)[kept], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(returns[kept], np.array(targets)[kept], rtol=1e-12)


def test_the_value_loss_and_its_gradient_are_verls() -> None:
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in PEERS["inputs"].items()}
    found = PEERS["loss"]
    values = given["newer"].requires_grad_()
    loss = value_loss(found["clip"])
    outs: list[LossOutput] = [
        loss(values[i], None, microbatch((kept > 0).tolist(), given["values"][i], given["targets"][i]))
        for i, kept in enumerate(given["mask"])
    ]
    count = given["mask"].sum()
    total = torch.stack([out.loss_sum for out in outs]).sum() / count
    assert total.item() == pytest.approx(found["loss"], rel=1e-6)
    clipped = sum(out.sums["value_clipped"].item() for out in outs) / count.item()
    assert 0 < clipped == pytest.approx(found["clipped"], rel=1e-6)
    (gradient,) = torch.autograd.grad(total, values)
    torch.testing.assert_close(gradient, torch.tensor(found["gradient"], dtype=torch.float64), rtol=1e-6, atol=1e-12)
