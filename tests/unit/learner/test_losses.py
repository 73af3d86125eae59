"""The whole loss in float64 against formulas written out by hand, and its gradient against finite differences."""

import dataclasses
import itertools
import math

import msgspec
import pytest
import torch
from torch import Tensor

from common.config.loss import loss_problems
from common.config.loss_keys import LossConfig
from learner.backend_protocol import LossFunction, LossOutput, Microbatch
from learner.loss.losses import cross_entropy, policy_loss
from learner.loss.objectives import OBJECTIVES
from tests.rigs.refusals import refused
from tests.unit.learner.loss_reference import Case, double, reference_loss

MAX_TOKENS = 7
CASE = Case(
    lengths=(4, 3, 5, 2, 1, 3),
    mask=[0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1],
    advantages=[1.3] * 4 + [-0.7] * 3 + [0.4] * 5 + [-1.5] * 2 + [9.0] + [0.9] * 3,
    behavior=[-9, -1.0, -0.4, -2.1, -0.9, -9, -1.7, -0.6, -1.1, -2.5, -0.3, -3.0, -1.2, -0.8, -9, -1.0, -1.0, -2.0],
    staleness=[0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8, 12, 1, 0, 0, 0, 0],
    logprobs=[
        -0.1, -1.004, -0.41, -2.1, -0.4, -0.1, -2.9, -1.9, -1.6, -1.9, -0.2, -0.5, -0.3, -0.1, -0.1,
        -1.001, -1.002, -1.999,
    ],
    reference=[0.0, -1.2, -0.5, -1.5, -0.8, 0.0, -2.0, -1.0, -1.0, -2.0, -0.4, -2.0, -0.6, -1.4, 0.0, -1.0, -1.1, -1.9],
    entropy=[9.0, 0.5, 1.0, 1.5, 2.0, 9.0, 0.3, 0.7, 1.1, 1.3, 0.2, 0.9, 0.4, 1.9, 9.0, 0.6, 0.1, 2.2],
    marked=[1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1],
)  # fmt: skip

# In a later update the policy has moved from the one that began the batch, by more than any bound at some tokens.
LATER = dataclasses.replace(
    CASE,
    begin=[
        -0.1, -1.3, -0.4, -2.1, -0.9, -0.1, -2.2, -1.9, -1.5, -2.3, -0.3, -1.4, -0.9, -0.2, -0.1,
        -1.001, -1.0, -2.2,
    ],
)  # fmt: skip

LEVELS = [("none", "token")] + [("tis", x) for x in ("token", "sequence")]
LEVELS += [(name, x) for name in ("icepop", "mis") for x in ("token", "sequence", "geometric")]
OBJECTIVE_NAMES = ("ppo_clip", "cispo", "gspo", "gmpo", "sapo")
OBJECTIVE_NAMES += ("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "m2po")
GRID = [
    LossConfig(objective=objective, proximal=proximal, correction=correction, correction_level=level)
    for objective, proximal, (correction, level) in itertools.product(
        OBJECTIVE_NAMES, ("recompute", "behavior", "loglinear"), LEVELS
    )
]
MEANS = [
    LossConfig(correction=c, correction_level=level, correction_normalize=n, correction_veto=v, reduction=r)
    for (c, level), n, v, r in itertools.product(
        LEVELS, (False, True), (None, 0.35), ("token_mean", "sequence_mean", "fixed_length")
    )
]
EXTRAS = [
    LossConfig(proximal="behavior", clip_dual=1.5),
    LossConfig(proximal="behavior", clip_low=0.05, clip_high=0.5, correction="none"),
    LossConfig(proximal="loglinear", correction="mis", correction_low=0.7, correction_cap=1.1),
    LossConfig(objective="clip_cov", proximal="behavior", clip_dual=1.5),
    LossConfig(objective="sapo", proximal="behavior", objective_options={"tau_high": 2.5}),
    LossConfig(objective="kl_cov", proximal="loglinear", objective_options={"share": 0.1, "coefficient": 0.4}),
    LossConfig(log_ratio_penalty=0.2, correction="mis", correction_normalize=True, reduction="sequence_mean"),
    LossConfig(log_ratio_penalty=1e-3, objective="gmpo", proximal="behavior", reduction="sequence_mean"),
    *(LossConfig(kl_coefficient=0.3, kl_estimator=k, entropy_coefficient=0.1) for k in ("k1", "k2", "k3")),
    *(
        LossConfig(
            kl_coefficient=0.3, entropy_coefficient=0.1, correction="mis", correction_normalize=True, reduction=r
        )
        for r in ("token_mean", "sequence_mean", "fixed_length")
    ),
]
ALLOWED = [config for config in GRID + MEANS + EXTRAS if not list(loss_problems(config))]


def describe(config: LossConfig) -> str:
    changed = [x for x in config.__struct_fields__ if getattr(config, x) != getattr(LossConfig(), x)]
    return "-".join(str(getattr(config, x)) for x in changed) or "defaults"


def run(config: LossConfig, case: Case) -> tuple[Tensor, Tensor, LossOutput, Tensor]:
    logprobs, entropy = double(case.logprobs).requires_grad_(), double(case.entropy).requires_grad_()
    out = policy_loss(config, MAX_TOKENS)(logprobs, entropy, case.microbatch())
    assert out.denominator is not None
    return logprobs, entropy, out, out.loss_sum / out.denominator.clamp(min=1e-300)


def test_the_grid_covers_every_registered_part() -> None:
    assert {c.objective for c in ALLOWED} == set(OBJECTIVES)
    assert {c.proximal for c in ALLOWED} == {"recompute", "behavior", "loglinear"}
    assert {(c.correction, c.correction_level) for c in ALLOWED} == set(LEVELS)
    assert {c.reduction for c in ALLOWED} == {"token_mean", "sequence_mean", "fixed_length"}
    assert len(ALLOWED) > 150


@pytest.mark.parametrize("case", [CASE, LATER], ids=["first update", "later update"])
@pytest.mark.parametrize("config", ALLOWED, ids=describe)
def test_value_and_gradient_are_those_of_the_formula_written_out(config: LossConfig, case: Case) -> None:
    logprobs, entropy, _, loss = run(config, case)
    expected = reference_loss(config, MAX_TOKENS, case, logprobs, entropy)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    found = torch.autograd.grad(loss, (logprobs, entropy), materialize_grads=True)
    wanted = torch.autograd.grad(expected, (logprobs, entropy), materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", [CASE, LATER], ids=["first update", "later update"])
@pytest.mark.parametrize("config", EXTRAS + GRID[::9], ids=describe)
def test_the_formula_written_out_agrees_with_finite_differences(config: LossConfig, case: Case) -> None:
    inputs = double(case.logprobs).requires_grad_(), double(case.entropy).requires_grad_()
    torch.manual_seed(0)  # fast: along a random direction
    written = lambda x, h: reference_loss(config, MAX_TOKENS, case, x, h)  # noqa: E731
    assert torch.autograd.gradcheck(written, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "dppo_tv", "cispo"])
def test_in_a_later_update_the_bounds_act_and_in_the_first_one_none_does(objective: str) -> None:
    config = LossConfig(objective=objective)  # type: ignore[arg-type]
    high = {"cispo": 0.5, "dppo_tv": 0.2}.get(objective)
    config = config if high is None else msgspec.structs.replace(config, clip_low=high, clip_high=high)
    assert run(config, CASE)[2].sums["objective_clipped"] == 0
    assert 0 < run(config, LATER)[2].sums["objective_clipped"] < sum(CASE.mask)


def test_all_updates_of_a_batch_have_the_same_weights_and_tell_their_distance_from_its_beginning() -> None:
    assert LATER.begin is not None
    moved = dataclasses.replace(LATER, logprobs=LATER.begin)
    before, after = (run(LossConfig(), case)[2].sums for case in (moved, LATER))
    same = ("weight", "weight_squared", "correction_clipped", "mismatch", "mismatch_by_age", "tokens_by_age", "age")
    for name in same:
        assert torch.equal(before[name], after[name]), name
    assert before["batch_kl"] == 0 < after["batch_kl"] and before["ratio"] != after["ratio"]
    assert "batch_kl" not in run(LossConfig(), CASE)[2].sums, "one update has nothing to compare with"
    places = [t for t, inside in enumerate(CASE.mask) if inside]
    ways = [CASE.logprobs[t] - LATER.begin[t] for t in places]
    assert after["batch_kl"].item() == pytest.approx(math.fsum(math.expm1(x) - x for x in ways))
    assert after["mismatch"].item() == pytest.approx(math.fsum(abs(LATER.begin[t] - CASE.behavior[t]) for t in places))
    assert after["age"].item() == sum(CASE.staleness[t] for t in places)
    assert run(LossConfig(), LATER)[2].maxima["age"].item() == 12


@pytest.mark.parametrize("config", [c for c in MEANS + GRID[1::8] + EXTRAS if c in ALLOWED], ids=describe)
def test_how_documents_are_packed_does_not_matter(config: LossConfig) -> None:
    whole = run(config, CASE)[2]
    parts = [run(config, case)[2] for case in CASE.parts()]
    torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum)
    torch.testing.assert_close(sum(p.denominator for p in parts), whole.denominator)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts), value, msg=name)


def test_gmpo_has_the_gradient_of_a_geometric_mean_of_bounded_ratios() -> None:
    """Equation 4 itself: a product over the document's tokens, each ratio bounded where the bound is the smaller."""
    config = LossConfig(objective="gmpo", proximal="behavior", reduction="sequence_mean")
    logprobs, _, _, loss = run(config, CASE)
    terms = []
    for tokens in filter(None, CASE.documents()):
        sign = math.copysign(1.0, CASE.advantages[tokens[0]])
        product = 1.0
        for t in tokens:
            ratio = torch.exp(logprobs[t] - CASE.behavior[t])
            bounded = ratio.clamp(math.exp(-0.4), math.exp(0.4))
            product = product * torch.minimum(sign * ratio, sign * bounded).abs() ** (1 / len(tokens))
        terms.append(product * CASE.advantages[tokens[0]])
    expected = -sum(terms) / len(terms)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logprobs)[0], torch.autograd.grad(expected, logprobs)[0], rtol=1e-12, atol=1e-14
    )


def test_gspo_has_the_gradient_of_one_ratio_per_document() -> None:
    """Equation 5 itself: the mean of the log-ratios is differentiated, not each token on its own."""
    config = LossConfig(objective="gspo", proximal="behavior", clip_low=0.3, clip_high=0.3, reduction="sequence_mean")
    logprobs, _, _, loss = run(config, CASE)
    terms = []
    for tokens in filter(None, CASE.documents()):
        ratio = torch.exp(sum(logprobs[t] - CASE.behavior[t] for t in tokens) / len(tokens))
        advantage = CASE.advantages[tokens[0]]
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage))
    expected = -sum(terms) / len(terms)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logprobs)[0], torch.autograd.grad(expected, logprobs)[0], rtol=1e-12, atol=1e-14
    )


# ---------------------------------------------------------------- what must not happen


EXTREMES = {
    "alternating": [50.0, -50.0] * 3,
    "piling up": [50.0] * 3 + [-50.0] * 3,
    "and down": [-50.0] * 3 + [50.0] * 3,
    "beyond float32": [200.0, -200.0] * 3,  # whose exp is infinite
}


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_absurd_ratios_give_finite_numbers(extreme: list[float]) -> None:
    """Log-ratios of +-50 and more against the sampler, the reference and each other, with advantages of both signs."""
    logprobs = [-60.0, -60.0, -1.0, -55.0, -3.0, -52.0]
    case = Case(
        (3, 3), [1] * 6, [1.0] * 3 + [-1.0] * 3, [x - d for x, d in zip(logprobs, extreme, strict=True)],
        [1, 2, 3, 0, 9, 40], logprobs, [x + d for x, d in zip(logprobs, extreme, strict=True)], [1.0] * 6,
    )  # fmt: skip
    batch = case.microbatch()
    names = ("advantages", "behavior_logprobs", "reference_logprobs")
    batch = dataclasses.replace(batch, **{name: getattr(batch, name).float() for name in names})
    for config in ALLOWED:
        values = torch.tensor(logprobs).requires_grad_()
        out = policy_loss(config, MAX_TOKENS)(values, torch.ones(6), batch)
        gradient = torch.autograd.grad(out.loss_sum, values, materialize_grads=True)[0]
        numbers = [*out.sums.values(), *out.maxima.values()]
        assert all(torch.isfinite(x).all() for x in (out.loss_sum, out.denominator, gradient, *numbers)), config


@pytest.mark.parametrize("case", [CASE, LATER], ids=["first update", "later update"])
def test_tokens_outside_the_loss_change_nothing_even_when_their_numbers_are_absurd(case: Case) -> None:
    outside = [t for t, m in enumerate(CASE.mask) if not m]

    def spoil(values: list[float], *absurd: float) -> list[float]:
        out = list(values)
        for t, x in zip(outside, itertools.cycle(absurd), strict=False):
            out[t] = x
        return out

    spoiled = dataclasses.replace(
        case,
        behavior=spoil(CASE.behavior, math.nan, -math.inf, 7.0),
        logprobs=spoil(CASE.logprobs, -math.inf, math.nan, -80.0),
        reference=spoil(CASE.reference, math.nan, -math.inf),
        entropy=spoil(CASE.entropy, math.nan, math.inf),
        advantages=spoil(CASE.advantages, 1e6),
        staleness=[int(x) for x in spoil([float(s) for s in CASE.staleness], 10_000)],
        begin=None if case.begin is None else spoil(case.begin, math.inf, math.nan),
    )
    for config in ALLOWED:
        *inputs, plain, loss = run(config, case)
        *other_inputs, other, other_loss = run(config, spoiled)
        pairs = [(loss, other_loss)]
        pairs += [(plain.sums[name], other.sums[name]) for name in plain.sums]
        wanted = torch.autograd.grad(loss, inputs, materialize_grads=True)
        found = torch.autograd.grad(other_loss, other_inputs, materialize_grads=True)
        assert all(torch.equal(one, two) for one, two in [*pairs, *zip(wanted, found, strict=True)]), config
        assert not any(gradient[outside].any() for gradient in found), config


def test_a_microbatch_that_trains_nothing_adds_nothing() -> None:
    case = dataclasses.replace(CASE, mask=[0] * len(CASE.mask))
    for config in ALLOWED:
        out = run(config, case)[2]
        assert not any(x.any() for x in (out.loss_sum, out.denominator, *out.sums.values()))
    vetoed = dataclasses.replace(CASE, behavior=[0.0] * len(CASE.behavior))
    logprobs, _, out, _ = run(LossConfig(correction_veto=0.999), vetoed)
    assert out.denominator.item() == 0
    assert not torch.autograd.grad(out.loss_sum, logprobs)[0].any()


@pytest.mark.parametrize(
    ("config", "without"),
    [
        (LossConfig(kl_coefficient=0.1), "reference_logprobs"),
        (LossConfig(proximal="loglinear"), "staleness"),
        (LossConfig(objective="clip_cov"), "marked"),
    ],
    ids=["divergence", "loglinear", "marks"],
)
def test_what_a_loss_needs_and_a_microbatch_lacks_is_named(config: LossConfig, without: str) -> None:
    batch = dataclasses.replace(CASE.microbatch(), **{without: None})
    with refused(ValueError, "marks" if without == "marked" else without):
        policy_loss(config, MAX_TOKENS)(double(CASE.logprobs), None, batch)


# ---------------------------------------------------------------- what a user relies on


@pytest.mark.parametrize("coefficient", [0.0, 0.25])
def test_the_entropy_has_a_gradient_only_when_it_is_wanted(coefficient: float) -> None:
    _, entropy, out, loss = run(LossConfig(entropy_coefficient=coefficient), CASE)
    gradient = torch.autograd.grad(loss, entropy, allow_unused=True)[0]
    assert (gradient is not None) == (coefficient > 0)
    assert out.sums["entropy"].item() == pytest.approx(sum(h * m for h, m in zip(CASE.entropy, CASE.mask, strict=True)))
    assert not out.sums["entropy"].requires_grad


def one_token(advantage: float, behavior: float) -> Microbatch:
    return Case((1,), [1], [advantage], [behavior], [0], [0.0], [-1.4], [0.0]).microbatch()


def descend(loss: LossFunction, batch: Microbatch) -> float:
    """Change of the sampled token's log-probability in one gradient step."""
    logits = torch.tensor([[0.0, 0.1, -0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    before = torch.log_softmax(logits, -1)[:, 2]
    loss(before, None, batch).loss_sum.backward()
    after = torch.log_softmax(logits - 0.01 * logits.grad, -1)[0, 2]
    return (after - before[0]).item()


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_gradient_step_moves_a_token_the_way_its_advantage_says(objective: str, advantage: float) -> None:
    loss = policy_loss(LossConfig(objective=objective), MAX_TOKENS)
    assert descend(loss, one_token(advantage, -1.5)) * advantage > 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_pulls_towards_the_reference(estimator: str) -> None:
    loss = policy_loss(LossConfig(kl_coefficient=1.0, kl_estimator=estimator), MAX_TOKENS)
    assert descend(loss, one_token(0.0, -1.5)) > 0  # -1.4 is above the policy's -1.65


def test_the_loss_of_single_precision_is_that_of_double() -> None:
    for config in ALLOWED:
        batch = CASE.microbatch()
        small = policy_loss(config, MAX_TOKENS)(double(CASE.logprobs).float(), double(CASE.entropy).float(), batch)
        assert small.loss_sum.dtype == torch.float32
        torch.testing.assert_close(small.loss_sum.double(), run(config, CASE)[2].loss_sum, rtol=2e-5, atol=2e-5)


def test_cross_entropy_sums_over_loss_tokens_only() -> None:
    batch = Case((3,), [1, 0, 1], [0.0] * 3, [0.0] * 3, [0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3).microbatch()
    assert cross_entropy(double([-1.0, -5.0, -2.0]), None, batch).loss_sum.item() == pytest.approx(3.0)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
def test_documents_of_sources_with_and_without_a_kl_term_give_the_sum_written_out(reduction: str) -> None:
    """Documents 1, 3, 5 have the coefficient 0.1, the others none; their gradient is that of the loss without it."""
    own = [0.1 if number % 2 else 0.0 for number in range(len(CASE.lengths))]
    column = double([value for value, length in zip(own, CASE.lengths, strict=True) for _ in range(length)])
    logprobs = double(CASE.logprobs).requires_grad_()
    config = LossConfig(kl_estimator="k2", reduction=reduction)  # type: ignore[arg-type]
    plain = policy_loss(config, MAX_TOKENS)(logprobs, None, CASE.microbatch())
    out = policy_loss(config, MAX_TOKENS)(
        logprobs, None, dataclasses.replace(CASE.microbatch(), kl_coefficients=column)
    )
    documents = CASE.documents()
    expected = 0.0
    for value, places in zip(own, documents, strict=True):
        terms = [(CASE.reference[t] - CASE.logprobs[t]) ** 2 / 2 for t in places]
        share = len(places) if reduction == "sequence_mean" else 1
        expected += value * math.fsum(terms) / max(share, 1)
    assert (out.loss_sum - plain.loss_sum).item() == pytest.approx(expected, rel=1e-12)
    assert out.denominator == plain.denominator
    both, without = (torch.autograd.grad(x.loss_sum, logprobs, retain_graph=True)[0] for x in (out, plain))
    for value, places in zip(own, documents, strict=True):
        for t in places:
            share = len(places) if reduction == "sequence_mean" else 1
            added = value * (CASE.logprobs[t] - CASE.reference[t]) / share
            assert (both[t] - without[t]).item() == pytest.approx(added, rel=1e-9, abs=1e-15)
