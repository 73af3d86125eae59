"""Corrections, proximal policies, divergence, documents and objectives against values computed by hand."""

import inspect
import math
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import torch
from torch import Tensor

from common.config.loss import CLIP_BOUNDS, CORRECTION_BOUNDS, MARK_OPTIONS, MARKING, OPTIONS, UNBOUNDED, WITHOUT_BOUNDS
from common.config.loss_keys import LossConfig
from common.config.types import names_in
from learner.loss.advantages import ADVANTAGES
from learner.loss.corrections import CORRECTIONS, veto
from learner.loss.losses import KL_ESTIMATORS, PROXIMALS, REDUCTIONS, k1, k2, k3, loglinear
from learner.loss.objectives import OBJECTIVES
from learner.loss.types import Corrected, Documents, PolicyTokens
from learner.loss.whole_batch import MARKS

LENGTHS = (3, 2)
MASK = [True, True, False, True, True]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def correct(name: str, level: str, *weights: float, **changes: object) -> Corrected:
    config = msgspec.structs.replace(LossConfig(correction=name, correction_level=level), **changes)
    return CORRECTIONS[name](tensor(*weights).log(), documents(), config)


def documents() -> Documents:
    return Documents(LENGTHS, torch.tensor(MASK))


def test_documents_count_loss_tokens_only() -> None:
    values = tensor(1.0, 2.0, 100.0, 3.0, 5.0)
    found = documents()
    assert found.counts.tolist() == [2, 2]
    assert found.sums(values).tolist() == [3, 8]
    assert found.means(values).tolist() == [1.5, 4]
    assert found.spread(tensor(7.0, 8.0)).tolist() == [7, 7, 7, 8, 8]
    found = Documents((2, 1), torch.tensor([False, False, True]))
    assert found.means(tensor(4.0, 5.0, 6.0)).tolist() == [0, 6], "without loss tokens the mean is 0"


TABLE = {
    "off: every token weighs one": ("none", "token", (0.1, 7, 1, 1, 1), (1, 1, 1, 1, 1), {}),
    "tis caps large weights": ("tis", "token", (0.1, 1, 1, 2, 2.5), (0.1, 1, 1, 2, 2), {"truncated": [4]}),
    "tis multiplies a document's loss tokens": (
        "tis", "sequence", (2, 1.5, 1, 3, 2), (3, 3, 3, 5, 5), {"truncated": [3, 4]},
    ),
    "icepop drops tokens but still counts them": (
        "icepop", "token", (0.4, 0.6, 1, 4, 6), (0, 0.6, 1, 4, 0), {"rejected": [0, 4], "counted": [0, 1, 3, 4]},
    ),
    "icepop keeps own weights in documents that stay": (
        "icepop", "sequence", (2, 0.5005, 1, 4, 2), (2, 0.5005, 1, 0, 0), {},
    ),
    "icepop by the geometric mean": ("icepop", "geometric", (2, 0.5005, 1, 4, 2), (2, 0.5005, 1, 0, 0), {}),
    "mis drops tokens and counts them no more": (
        "mis", "token", (0.4, 0.6, 1, 1.9, 2.1), (0, 0.6, 1, 1.9, 0), {"counted": [1, 3]},
    ),
    "mis weighs documents by their own ratio": (
        "mis", "sequence", (2, 0.5005, 1, 4, 2), (1.001, 1.001, 1.001, 0, 0), {"counted": [0, 1]},
    ),
    "mis by the geometric mean": (
        "mis", "geometric", (2, 0.5005, 1, 4, 2), (*[math.sqrt(1.001)] * 3, 0, 0), {"counted": [0, 1]},
    ),
}  # fmt: skip
UNMARKED = {"none": ("truncated", "rejected")}


@pytest.mark.parametrize(("name", "level", "weights", "expected", "marked"), TABLE.values(), ids=TABLE)
def test_weights_and_marks_are_those_of_the_correction(
    name: str, level: str, weights: tuple[float, ...], expected: tuple[float, ...], marked: dict[str, list[int]]
) -> None:
    found = correct(name, level, *weights)
    torch.testing.assert_close(found.weights, tensor(*expected))
    for field in {*marked, *UNMARKED.get(name, ())}:
        assert getattr(found, field).nonzero().flatten().tolist() == marked.get(field, []), field


def test_one_impossible_token_vetoes_its_sample() -> None:
    weights = tensor(1e-5, 1.0, 1.0, 0.9, 1.0)
    found, vetoed = veto(correct("tis", "token", *weights), weights.log(), documents(), 1e-4)
    assert vetoed.tolist() == [True, True, True, False, False]
    torch.testing.assert_close(found.weights, tensor(0.0, 0.0, 0.0, 0.9, 1.0))
    assert found.counted.tolist() == [False, False, False, True, True]
    weights = tensor(1.0, 1.0, 1e-9, 1.0, 1.0)
    outside = veto(correct("none", "token", *weights), weights.log(), documents(), 1e-4)[1]
    assert not outside.any(), "a token outside the loss vetoes nothing"


def test_loglinear_is_the_policy_one_version_back() -> None:
    current, behavior = tensor(-1.0, -1.0, -1.0, -1.0), tensor(-2.0, -2.0, -2.0, -2.0)
    found = loglinear(current, behavior, torch.tensor([0, 1, 2, 4], dtype=torch.int32))
    torch.testing.assert_close(found, tensor(-2.0, -2.0, -1.5, -1.25))


@pytest.mark.parametrize("updates", [1, 2, 5])
@pytest.mark.parametrize("age", [1, 2, 3, 8])
def test_loglinear_is_exact_where_every_update_moves_a_token_equally_far(updates: int, age: int) -> None:
    """And only with the frozen policy as the end: the one in training is u updates further."""
    moved, behavior, ages = 0.01, tensor(-2.0), torch.tensor([age])
    begin, before = behavior + moved * updates * age, behavior + moved * updates * (age - 1)
    torch.testing.assert_close(loglinear(begin, behavior, ages), before)
    for u in range(1, updates):
        current = begin + moved * u
        assert age == 1 or not torch.allclose(loglinear(current, behavior, ages), before)
        share = updates * (age - 1) / (updates * age + u)
        torch.testing.assert_close(behavior + share * (current - behavior), before)


def test_estimators_of_the_divergence() -> None:
    x = tensor(0.5, -0.5)  # log r
    torch.testing.assert_close(k1(x), tensor(-0.5, 0.5))
    torch.testing.assert_close(k2(x), tensor(0.125, 0.125))
    torch.testing.assert_close(k3(x), tensor(math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5))
    assert k3(tensor(50.0)).item() == 10.0
    assert k3(tensor(-5.0)).item() == pytest.approx(math.exp(-5) + 4)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_estimators_are_unbiased(name: str) -> None:
    policy, reference = tensor(0.5, 0.3, 0.2), tensor(0.2, 0.3, 0.5)
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * KL_ESTIMATORS[name]((reference / policy).log())).sum(), exact)


def names(key: str) -> set[str]:
    """The names that a key of the loss takes besides import paths."""
    return set(names_in(get_type_hints(LossConfig, include_extras=True)[key].__metadata__[0].pattern))


def test_every_part_is_in_the_config_and_has_bounds() -> None:
    hints = get_type_hints(LossConfig)
    assert names("advantage") == set(ADVANTAGES)
    assert names("objective") == set(OBJECTIVES) == {*CLIP_BOUNDS, *WITHOUT_BOUNDS} == set(UNBOUNDED)
    assert names("correction") == set(CORRECTIONS)
    assert set(get_args(hints["proximal"])) == set(PROXIMALS)
    assert names("kl_estimator") == set(KL_ESTIMATORS)
    assert names("reduction") == set(REDUCTIONS)
    levels = set(get_args(hints["correction_level"]))
    expected = {(c, x) for c in CORRECTIONS for x in levels if c != "none" and (c, x) != ("tis", "geometric")}
    assert set(CORRECTION_BOUNDS) == expected


def test_the_config_knows_every_option_of_every_part() -> None:
    found: dict[str, set[str]] = {}
    for name, function in [*OBJECTIVES.items(), *ADVANTAGES.items(), *MARKS.items()]:
        options = inspect.signature(function).parameters.values()
        found.setdefault(name, set()).update(o.name for o in options if o.kind is inspect.Parameter.KEYWORD_ONLY)
    assert {name: set(options) for name, options in OPTIONS.items()} == {n: own for n, own in found.items() if own}
    marked = {name for function in MARKS.values() for name in inspect.signature(function).parameters}
    assert marked - {"tokens"} == set(MARK_OPTIONS) and set(MARKS) == set(MARKING)


# ---------------------------------------------------------------- objectives


WEIGHTS = (5.0, math.exp(0.5), math.exp(-2.0))  # e^3 is clipped at 1 + 4, nothing below
HALF, MEAN = {"clip_low": 0.5, "clip_high": 0.5}, math.exp(0.15)
TV = (0.0, -1.5, 0.5, 0.0, 100.0)
KL = (0.0, -1.5, 1.1, 0.0)
SOFT = 1 / (1 + math.exp(-1.05))
GEOMETRIC = (math.exp(0.3), math.exp(0.3), -2 * math.exp(-0.4))


def logs(*values: float) -> tuple[float, ...]:
    return tuple(map(math.log, values))


# objective, config, logprobs, proximal, advantages; values, clipped, gradient where it says more
OBJECTIVE_TABLE: dict[str, tuple[Any, ...]] = {
    "ppo_clip takes the lower branch on every side": (
        "ppo_clip", {}, logs(0.5, 0.5, 1.0, 1.1, 2.0, 2.0), (0,) * 6, (1, -1, 3, 1, 1, -1),
        (0.5, -0.8, 3, 1.1, 1.28, -2), [1, 4], None,
    ),
    "low and high bounds are separate": (
        "ppo_clip", {"clip_low": 0.1, "clip_high": 0.5}, logs(0.5, 2.0), (0, 0), (-1, 1), (-0.9, 1.5), [0, 1], None,
    ),
    "the dual clip bounds the loss where the advantage is negative": (
        "ppo_clip", {"clip_dual": 3.0}, logs(2, 5, 5), (0,) * 3, (-2, -2, 2), (-4, -6, 2.56), [1, 2], None,
    ),
    "a clipped token has no gradient": (
        "ppo_clip", {"clip_dual": 3.0}, (1, -1, 2), (0,) * 3, (1, -1, -1), (1.28, -0.8, -3), [0, 1, 2], (0,) * 3,
    ),
    "cispo keeps the gradient of a token whose weight it clips": (
        "cispo", {}, (-0.1, -2, -3), (-3.1, -2.5, -1), (2, -1, 1),
        (WEIGHTS[0] * -0.2, WEIGHTS[1] * 2, WEIGHTS[2] * -3), [0], (2 * WEIGHTS[0], -WEIGHTS[1], WEIGHTS[2]),
    ),
    "gspo gives all tokens of a document the geometric mean of their ratios": (
        "gspo", HALF, (-1, -2, -3), (-1.2, -2.1, -2), (1, 1, 1), (MEAN, MEAN, math.exp(-1)), None, None,
    ),
    "gspo clips whole documents": (
        "gspo", {}, (-1, -2, -3), (-1.001, -2, -3), (1, 1, 1), (1.0004, 1.0004, 1), [0, 1], None,
    ),
    "gmpo bounds each ratio, and tokens have the geometric mean": (
        "gmpo", {}, (0.6, 0.2, -1), (0,) * 3, (1, 1, -2), GEOMETRIC, [0, 2], (0, GEOMETRIC[1], 0),
    ),
    "sapo is r A at 1 but for its level, and fades beyond": (
        "sapo", {}, logs(1, 2), (0, 0), (1, -2), (2, -8 / 1.05 * SOFT), [], (1, -16 * SOFT * (1 - SOFT)),
    ),
    "dppo_kl drops a rare token that has become less rare": (  # 0.144, 0.144, 0.005 and 0.100 nat
        "dppo_kl", {}, logs(0.75, 0.75, 0.55, 0.1), logs(0.5, 0.5, 0.5, 0.001), (1, -1, 1, 1), KL, [0, 3],
        (0, -1.5, 1.1, 0),
    ),
    "dppo_tv drops tokens whose probability went too far already": (  # the last: ratio 100, but only 0.099 apart
        "dppo_tv", {}, logs(0.75, 0.75, 0.25, 0.25, 0.1), logs(0.5, 0.5, 0.5, 0.5, 0.001), (1, -1, 1, -1, 1),
        TV, [0, 3], TV,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", OBJECTIVE_TABLE.values(), ids=OBJECTIVE_TABLE)
def test_values_marks_and_gradients_are_those_of_the_objective(row: tuple[Any, ...]) -> None:
    name, changes, logprobs, proximal, advantages, values, clipped, gradient = row
    inputs = [torch.tensor(x, dtype=torch.float64) for x in (logprobs, proximal, advantages)]
    inputs[0].requires_grad_()
    lengths = (2, 1) if name in ("gspo", "gmpo") else (len(logprobs),)
    tokens = PolicyTokens(*inputs, Documents(lengths, torch.ones(len(logprobs), dtype=torch.bool)))
    found = OBJECTIVES[name](tokens, msgspec.structs.replace(LossConfig(objective=name), **changes))
    torch.testing.assert_close(found.values.detach(), torch.tensor(values, dtype=torch.float64))
    if clipped is not None:
        assert found.clipped.nonzero().flatten().tolist() == clipped
    if gradient is not None:
        found.values.sum().backward()
        torch.testing.assert_close(inputs[0].grad, torch.tensor(gradient, dtype=torch.float64))


def gradient_of_a_likely_token(name: str, options: dict[str, float], **bounds: float) -> float:
    """Its advantage is 1, and its probability has gone from 0.09 to 0.85; its document has seven more, which stand."""
    logprobs = tensor(0.85, *[0.5] * 7).log().requires_grad_()
    before, advantages = tensor(0.09, *[0.5] * 7).log(), torch.ones(8, dtype=torch.float64)
    tokens = PolicyTokens(logprobs, before, advantages, Documents((8,), torch.ones(8, dtype=torch.bool)))
    found = OBJECTIVES[name](tokens, LossConfig(objective=name, **bounds), **options)
    return torch.autograd.grad(found.values.sum(), logprobs)[0][0].item()


@pytest.mark.parametrize("name", UNBOUNDED)
def test_from_its_value_on_a_bound_lets_a_likely_token_keep_its_gradient(name: str) -> None:
    loose = UNBOUNDED[name]
    options = {"tau_high": 1 / loose} if name == "sapo" else {}
    assert gradient_of_a_likely_token(name, options, **({"clip_high": loose} if name in CLIP_BOUNDS else {})) > 1
    if name not in ("cispo", "kl_cov", "m2po"):  # their tokens keep it
        assert gradient_of_a_likely_token(name, {}) < 0.05


# marked tokens: objective, options; values and gradients of ratio 2 with the advantages 1, 1, -1, the first marked
MARKED_TABLE = {
    "clip_cov": ({}, (0.0, 1.2, -2.0), (0.0, 0.0, -2.0)),
    "kl_cov": ({"coefficient": 0.5}, (2 - 0.5 * math.log(2), 2.0, -2.0), (1.5, 2.0, -2.0)),
    "m2po": ({}, (0.0, 2.0, -2.0), (0.0, 2.0, -2.0)),
}


@pytest.mark.parametrize("name", MARKED_TABLE)
def test_a_marked_token_leaves_the_objective_or_is_pulled_back(name: str) -> None:
    options, values, gradient = MARKED_TABLE[name]
    logprobs = torch.full((3,), math.log(2), dtype=torch.float64, requires_grad=True)
    whole = Documents((3,), torch.ones(3, dtype=torch.bool))
    marked = torch.tensor([True, False, False])
    tokens = PolicyTokens(logprobs, torch.zeros(3, dtype=torch.float64), tensor(1, 1, -1), whole, marked)
    found = OBJECTIVES[name](tokens, LossConfig(objective=name), **options)
    torch.testing.assert_close(found.values.detach(), tensor(*values))
    assert found.clipped[0] and bool(found.clipped[1]) == (name == "clip_cov")
    found.values.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(*gradient))
