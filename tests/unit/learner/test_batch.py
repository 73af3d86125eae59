"""Batch assembly: what is refused, what expires, and what is counted."""

import math
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract import StoredGroup
from common.config.loss_keys import DistillationConfig
from common.config.schema import Config
from common.errors import HopelessError
from common.rollouts import Branch, Group, GroupMeta, Sample, TemperatureRun, VersionRun, encode_group
from common.wire_types import Array
from learner.backend_protocol import RoutingShape
from learner.batch.batch import BadGroup, assemble, cache_ages, decode, length_deciles, prepare
from learner.batch.packing import FILLER, build
from learner.batch.updates import ages_of
from learner.loop.step_metrics import Totals
from learner.loss.types import GroupRewards
from tests.rigs.refusals import refused


def sample(
    prompt: int = 2, runs: list[tuple[int, int]] | None = None, reward: float = 0.0, **changes: object
) -> Sample:
    """`runs`: (tokens, version) of the sampled part."""
    runs = [(3, 0)] if runs is None else runs
    n = prompt + sum(count for count, _ in runs)
    mask = np.r_[np.zeros(prompt), np.ones(n - prompt)]
    starts = prompt + np.cumsum([0, *(count for count, _ in runs)])
    made = Sample(
        tokens=Array.of(np.arange(n), "int32"),
        loss_mask=Array.of(mask, "uint8"),
        behavior_logprobs=Array.of(-mask, "float32"),
        version_runs=[VersionRun(int(start), version) for start, (_, version) in zip(starts, runs, strict=False)],
        reward=reward,
        stop_reason="stop",
    )
    return msgspec.structs.replace(made, **changes)


def stored(group: Group, serial: int = 5, payload: bytes | None = None) -> StoredGroup:
    return StoredGroup(serial, "node-a", GroupMeta(0, 0, 0.0, 0), payload or encode_group(group))


SHAPE = RoutingShape(layers=2, chosen=1, experts=4)


def routed(experts: list[int], dtype: str = "int16") -> Array:
    return Array.of(experts, dtype)


# ---------------------------------------------------------------- decode


def test_a_good_group_is_decoded_and_a_failed_sample_may_hold_anything() -> None:
    group = Group(5, [sample(), sample()])
    assert decode(stored(group), vocab_size=10, group_size=2) == group
    broken = sample(error="timeout", reward=math.nan, tokens=Array.of([99] * 5, "int32"))
    decode(stored(Group(5, [broken, sample()])), vocab_size=10, group_size=2)


@pytest.mark.parametrize(
    ("group", "facts"),
    [
        (Group(5, [sample()]), ["1 samples"]),
        (Group(5, [sample(), sample(tokens=Array.of([0, 1, 2, 3, 10], "int32"))]), ["sample 1", "0..9"]),
        (Group(5, [sample(), sample(tokens=Array.of([0, 1, 2, 3, -1], "int32"))]), ["sample 1", "0..9"]),
        (Group(5, [sample(reward=math.nan), sample()]), ["sample 0", "reward nan"]),
        (
            Group(5, [sample(behavior_logprobs=Array.of([0, 0, -1, -math.inf, -1], "float32")), sample()]),
            ["sample 0", "behavior_logprobs", "finite"],
        ),
        (Group(5, [sample(tokens=Array.of(np.zeros(5), "int64")), sample()]), ["int64", "int32"]),
        (Group(5, [sample(loss_mask=Array.of([0, 1], "uint8")), sample()]), ["loss_mask", "2 entries", "5 tokens"]),
        (Group(5, [sample(version_runs=[]), sample()]), ["policy version"]),
        (Group(5, [sample(version_runs=[VersionRun(3, 0)]), sample()]), ["policy version"]),
        (Group(5, [sample(), sample()], schema_version=99), ["schema 99"]),
    ],
)
def test_what_would_poison_training_is_refused_with_the_reason(group: Group, facts: list[str]) -> None:
    with refused(BadGroup, *facts) as caught:
        decode(stored(group), vocab_size=10, group_size=2)
    assert (caught.value.serial, caught.value.node_id) == (5, "node-a")


def test_bytes_that_are_no_group_and_a_group_of_another_task_are_refused() -> None:
    group = Group(6, [sample()])
    with refused(BadGroup) as caught:
        decode(stored(group, payload=b"\xc1 garbage"), 10, 1)
    assert (caught.value.serial, caught.value.node_id) == (5, "node-a")
    with refused(BadGroup, "task 6"):
        decode(stored(group), 10, 1)


# ---------------------------------------------------------------- staleness and expiry


@pytest.mark.parametrize(("maximum", "mask", "mean"), [(3, [1, 1, 1, 1, 1, 1], 7 / 7), (1, [0, 0, 1, 1, 1, 1], 3 / 5)])
def test_staleness_counts_per_token_and_exactly_those_beyond_the_bound_leave_the_loss(
    make_config: Callable[..., Config], maximum: int, mask: list[int], mean: float
) -> None:
    config = make_config(staleness={"max": maximum})
    batch = assemble([Group(0, [sample(2, [(2, 4), (3, 5), (1, 6)]), sample(2, [(1, 6)])])], 6, config)
    document, figures = batch.documents[0], batch.statistics
    assert document.staleness[2:].tolist() == [2, 2, 1, 1, 1, 0]
    assert document.loss_mask.tolist() == [0, 0, *mask]
    assert (figures.tokens_expired, figures.tokens_trained) == (mask.count(0), mask.count(1) + 1)
    assert (figures.staleness_max, figures.staleness_mean) == (min(maximum, 2), pytest.approx(mean))


@pytest.mark.parametrize(("step", "dtype"), [(127, "int8"), (128, "int32"), (300, "int32")])
def test_staleness_is_small_only_where_that_loses_nothing(
    make_config: Callable[..., Config], step: int, dtype: str
) -> None:
    group = Group(0, [sample(2, [(2, 0), (2, step)]), sample(1, [(1, step)], reward=1.0)])
    old, new = assemble([group], step, make_config(staleness={"max": 1000})).documents
    assert old.staleness is not None and new.staleness is not None
    assert old.staleness.tolist() == [step] * 4 + [0, 0]
    assert old.staleness.dtype == dtype
    assert new.staleness.tolist() == [0, 0]


@pytest.mark.parametrize("truncated", ["counted", "masked", "penalized"])
def test_only_masked_takes_a_cut_answer_out_of_the_loss_and_never_out_of_the_baseline(
    make_config: Callable[..., Config], truncated: str
) -> None:
    config = make_config(
        tasks={"truncated": truncated}, staleness={"max": 1}, learner={"loss": {"advantage": "dr_grpo"}}
    )
    cut = sample(2, [(1, 0), (3, 2)], reward=0.0, stop_reason="length")
    turns = sample(2, [(3, 2)], reward=0.0, stop_reason="turn_limit")
    batch = assemble([Group(0, [cut, sample(2, [(2, 2)], reward=3.0), turns])], 2, config)
    masked = truncated == "masked"
    assert [document.sample for document in batch.documents] == ([1, 2] if masked else [0, 1, 2])
    advantages = [document.advantage for document in batch.documents]
    assert advantages[-2:] == [2.0, -1.0], "its reward is in the mean of 1"
    figures = batch.statistics
    assert (figures.tokens_cut, figures.tokens_expired) == (3 if masked else 0, 1)
    assert figures.tokens_trained == 2 + 3 + (0 if masked else 3)
    assert (figures.samples_truncated, figures.length_max) == (2, 4)
    totals = Totals()
    totals.add(figures)
    assert (totals.tokens_wasted_total, totals.tokens_masked_total) == ((4, 4) if masked else (1, 1))


def test_a_sample_without_any_fresh_token_is_not_processed_but_counts_in_the_baseline(
    make_config: Callable[..., Config],
) -> None:
    config = make_config(staleness={"max": 0}, learner={"loss": {"advantage": "dr_grpo"}})
    batch = assemble([Group(0, [sample(2, [(2, 0)], reward=1.0), sample(2, [(3, 5)], reward=0.0)])], 5, config)
    assert len(batch.documents) == 1
    assert batch.documents[0].advantage == -0.5
    assert batch.statistics.tokens_expired == 2


def branch(prompt: int, runs: list[tuple[int, int]], masked: int = 0, **changes: object) -> Branch:
    """As `sample`; the first `masked` sampled tokens count in an earlier path."""
    made = sample(prompt, runs)
    mask = made.loss_mask.numpy().copy()
    mask[prompt : prompt + masked] = 0
    made = Branch(made.tokens, Array.of(mask, "uint8"), Array.of(mask * -2.0, "float32"), made.version_runs)
    return msgspec.structs.replace(made, **changes)


def test_every_path_of_a_sample_is_a_document_with_its_advantage_and_all_counts_are_over_paths(
    make_config: Callable[..., Config],
) -> None:
    """By hand: at step 6 with a bound of 1, version 4 is expired."""
    config = make_config(staleness={"max": 1}, learner={"loss": {"advantage": "dr_grpo"}})
    branches = [
        branch(2, [(2, 5), (4, 6)], masked=2),
        branch(3, [(1, 4), (2, 6)], name="searcher"),
        branch(2, [(2, 4)]),
    ]
    agent = sample(2, [(2, 5), (3, 6)], reward=2.0, branches=branches)
    failed = sample(2, [(1, 6)], error="timeout", branches=[branch(1, [(5, 6)])])
    batch = assemble([Group(0, [agent, sample(2, [(1, 6)], reward=0.0), failed])], 6, config)
    assert [(d.sample, d.path, d.advantage) for d in batch.documents] == [
        (0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0), (1, 0, -1.0),
    ]  # fmt: skip
    assert [d.loss_mask.tolist() for d in batch.documents] == [
        [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1],
    ]  # fmt: skip
    assert batch.documents[1].behavior_logprobs is not None
    assert batch.documents[1].behavior_logprobs.tolist() == [0, 0, 0, 0, -2, -2, -2, -2]
    figures = batch.statistics
    assert (figures.samples, figures.samples_failed, figures.samples_mixed) == (3, 1, 1)
    assert (figures.tokens_trained, figures.tokens_expired, figures.tokens_failed) == (5 + 4 + 2 + 1, 1 + 2, 6)
    assert figures.sequence_tokens == 6 + 7 + 5 + 2
    assert (figures.length_max, figures.length_mean) == (5 + 4 + 3 + 2, (14 + 1) / 2)
    assert figures.staleness_mean == pytest.approx(2 / 12)
    masked = make_config(staleness={"max": 1}, tasks={"truncated": "masked"})
    cut = msgspec.structs.replace(agent, stop_reason="length")
    batch = assemble([Group(0, [cut, sample(2, [(1, 6)]), failed])], 6, masked)
    assert (batch.statistics.tokens_cut, [d.sample for d in batch.documents]) == (5 + 4 + 2, [1])
    fresh = msgspec.structs.replace(agent, branches=branches[:1])
    groups = [Group(1, [agent]), Group(2, [fresh]), Group(3, [failed])]
    assert with_expired(groups, 6, make_config(staleness={"max": 1})) == [1]


def test_the_learner_computes_at_the_temperature_of_each_token(make_config: Callable[..., Config]) -> None:
    """0 stands for rollout.temperature; the first token of a document is no target."""
    hot = branch(1, [(2, 0)], temperature_runs=[TemperatureRun(1, 2.0)])
    agent = sample(2, [(3, 0)], temperature_runs=[TemperatureRun(3, 0.5), TemperatureRun(4, 1.25)], branches=[hot])
    batch = assemble([Group(0, [agent, sample(1, [(1, 0)])])], 0, make_config())
    (packed,) = build(batch.documents, [[0, 2, 1]])
    assert packed.temperatures is not None
    assert packed.temperatures.tolist() == [0, 0, 0.5, 1.25, 0, 2, 2]
    (plain,) = build(batch.documents, [[2]])
    assert plain.temperatures is None


def test_a_branch_that_would_poison_training_is_refused() -> None:
    outside = branch(2, [(1, 0)], tokens=Array.of([0, 1, 99], "int32"))
    with refused(BadGroup, "0..9"):
        decode(stored(Group(5, [sample(branches=[outside])])), vocab_size=10, group_size=1)


def with_expired(groups: list[Group], step: int, config: Config) -> list[int]:
    """As learner/loop/gathering.py finds what is generated again."""
    prepared = {group.serial: prepare(group, step, config.sources, None) for group in groups}
    return [serial for serial, found in prepared.items() if any(played.expired for played, _ in found)]


def test_groups_with_expired_tokens_are_found(make_config: Callable[..., Config]) -> None:
    fresh, old = Group(1, [sample(2, [(3, 5)])]), Group(2, [sample(2, [(1, 3), (3, 5)])])
    failed = Group(3, [sample(2, [(3, 0)], error="timeout")])
    assert with_expired([fresh, old, failed], 5, make_config(staleness={"max": 1})) == [2]
    assert with_expired([fresh, old, failed], 5, make_config(staleness={"max": 2})) == []


def test_expired_tokens_are_counted_by_length_of_their_sample() -> None:
    lengths = list(range(20, 0, -1))
    counts = [1 if n > 10 else 0 for n in lengths]
    assert length_deciles(lengths, counts) == (0, 0, 0, 0, 0, 2, 2, 2, 2, 2)
    assert length_deciles([], []) == (0,) * 10
    assert sum(length_deciles([5, 5, 5], [1, 2, 3])) == 6


# ---------------------------------------------------------------- advantages, failures, figures


def group(serial: int, *samples: Sample) -> Group:
    return Group(serial, list(samples))


FAILED, GOOD, FLAT = sample(error="timeout"), sample(reward=1.0), sample()
FIGURES: dict[str, tuple[list[Group], dict[str, object]]] = {
    "failed samples of a filtered group are not counted twice": (  # the broker counts all of it
        [group(0, GOOD, GOOD, FAILED), group(1, GOOD, FLAT, FAILED)],
        {"groups_filtered": 1, "samples_failed": 2, "tokens_failed": 3},
    ),
    "failed samples by their stop reason": (
        [group(0, *(sample(error="no", stop_reason=r) for r in ("timeout", "environment_error", "timeout")), FLAT)],
        {"samples_failed": 3, "failed_by_reason": {"environment_error": 1, "timeout": 2}},
    ),
    "samples of several versions": (
        [group(0, sample(runs=[(2, 0), (1, 1)]), sample(runs=[(1, 1), (1, 1)]), FLAT)], {"samples_mixed": 1},
    ),
    "environment metrics are averaged over samples that have them": (
        [group(0, sample(metrics={"guesses": 3.0, "won": 1.0}), sample(metrics={"guesses": 5.0}))],
        {"environment": {"guesses": 4.0, "won": 1.0}},
    ),
    "groups of equal rewards": ([group(0, GOOD, GOOD), group(1, GOOD, FLAT)], {"groups_without_signal": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "figures"), FIGURES.values(), ids=FIGURES)
def test_the_figures_count(groups: list[Group], figures: dict[str, object], make_config: Callable[..., Config]) -> None:
    config = make_config(learner={"dynamic_sampling": "groups_filtered" in figures})
    found = assemble(groups, 1, config).statistics
    assert {name: getattr(found, name) for name in figures} == figures


def test_failed_samples_train_nothing_and_enter_no_baseline(make_config: Callable[..., Config]) -> None:
    config = make_config(learner={"loss": {"advantage": "dr_grpo"}})
    samples = [sample(reward=1.0), sample(reward=9.0, error="environment raised"), sample(reward=0.0)]
    batch = assemble([Group(0, samples)], 0, config)
    assert [d.advantage for d in batch.documents] == [0.5, -0.5]
    figures = batch.statistics
    assert (figures.samples, figures.samples_failed, figures.failures) == (3, 1, ("environment raised",))
    assert (figures.reward_mean, figures.reward_std, figures.tokens_failed) == (0.5, 0.5, 3)


def test_the_batch_does_not_depend_on_the_order_of_arrival(make_config: Callable[..., Config]) -> None:
    groups = [Group(n, [sample(reward=float(n)), sample(reward=0.0)]) for n in (2, 0, 1)]
    one, two = assemble(groups, 0, make_config()), assemble(groups[::-1], 0, make_config())
    assert [d.advantage for d in one.documents] == [d.advantage for d in two.documents]
    assert one.statistics == two.statistics


# ------ estimators that pass the launch's checks, whose rewards are not these


def root(groups: list[GroupRewards]) -> list[np.ndarray]:
    return [np.nan_to_num(group.totals, nan=0.0) ** 0.5 for group in groups]


def two_alone(groups: list[GroupRewards]) -> list[np.ndarray]:
    return [np.nan_to_num(group.totals)[:2] for group in groups]


def first_alone(groups: list[GroupRewards]) -> list[np.ndarray]:
    return [group.totals for group in groups[:1]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (root, "[nan, 1.0, 0.0] for the rewards [-4.0, 1.0, nan]"),
        (two_alone, "[-4.0, 1.0] for the rewards [-4.0, 1.0, nan]"),
        (first_alone, "1 groups of advantages for 2 groups of rewards"),
    ],
)
def test_an_estimator_without_a_finite_number_for_a_sample_ends_the_run_for_good(
    function: Callable[..., object], found: str, make_config: Callable[..., Config]
) -> None:
    name = f"{__name__}:{function.__name__}"
    config = make_config(learner={"loss": {"advantage": name}})
    samples = [sample(reward=-4.0), sample(reward=1.0), sample(reward=0.0, error="timeout")]
    with pytest.raises(HopelessError, match=re.escape("learner.loss.advantage: expected a finite number")) as raised:
        assemble([group(0, *samples), group(1, *samples)], 0, config)
    assert f"found {found} by {name};" in str(raised.value)


def test_an_estimator_may_give_anything_for_a_failed_sample(make_config: Callable[..., Config]) -> None:
    config = make_config(learner={"loss": {"advantage": f"{__name__}:itself"}})
    batch = assemble([group(0, sample(reward=2.0), sample(error="timeout"))], 0, config)
    assert [document.advantage for document in batch.documents] == [2.0]


def itself(groups: list[GroupRewards]) -> list[list[float]]:
    return [group.totals.tolist() for group in groups]


def test_an_estimator_sees_all_groups_of_the_step(make_config: Callable[..., Config]) -> None:
    groups = [Group(n, [sample(reward=r), sample(reward=r)]) for n, r in ((0, 1.0), (1, 0.0))]
    config = make_config(learner={"loss": {"advantage": "reinforce_pp"}})
    found = [d.advantage for d in assemble(groups, 0, config).documents]
    assert found == pytest.approx([0.5 / (3**-0.5 + 1e-6)] * 2 + [-0.5 / (3**-0.5 + 1e-6)] * 2)


def test_a_first_token_is_never_a_target_and_environment_text_stays_masked(make_config: Callable[..., Config]) -> None:
    batch = assemble([Group(0, [sample(0, [(4, 0)]), sample(0, [(1, 0)])])], 0, make_config())
    assert [d.loss_mask.tolist() for d in batch.documents] == [[0, 1, 1, 1]]
    assert batch.statistics.tokens_trained == 3
    assert batch.statistics.sequence_tokens == 3, "places of the sequences that train something"
    turns = sample(1, [(5, 0)], loss_mask=Array.of([0, 1, 1, 0, 0, 1], "uint8"), turns=2, stop_reason="turn_limit")
    batch = assemble([Group(0, [turns, sample()])], 0, make_config())
    assert batch.documents[0].loss_mask.tolist() == [0, 1, 1, 0, 0, 1]
    assert batch.statistics.turns_mean == 1.5
    assert batch.statistics.samples_truncated == 1


# ---------------------------------------------------------------- routing to replay


@pytest.mark.parametrize(
    ("experts", "fact"),
    [
        (None, "learner.moe.replay_routing"),
        (routed([0] * 5), "int16 5,"),
        (routed([0] * 10, "int32"), "int32 10,"),
        (routed([0] * 9 + [4]), "-1..3"),
        (routed([0] * 9 + [-2]), "-1..3"),
    ],
)
def test_routing_of_another_model_is_refused(experts: Array | None, fact: str) -> None:
    group = stored(Group(5, [sample(routed_experts=experts)]))
    with refused(BadGroup, fact):
        decode(group, 10, 1, SHAPE)
    decode(group, 10, 1)  # no learner replays it


@pytest.mark.parametrize(("row", "fits"), [((2, 0), True), ((-1, -1), True), ((3, 3), False), ((2, -1), False)])
def test_a_token_goes_to_experts_of_which_none_is_another_s_double(row: tuple[int, int], fits: bool) -> None:
    experts = routed([0, 1] * 9 + list(row))
    group = stored(Group(5, [sample(routed_experts=experts)]))
    shape = RoutingShape(layers=2, chosen=2, experts=4)
    if fits:
        decode(group, 10, 1, shape)
        return
    with refused(BadGroup, "sample 0", "2 distinct"):
        decode(group, 10, 1, shape)


def test_a_document_carries_the_routing_of_its_tokens(make_config: Callable[..., Config]) -> None:
    made = sample(routed_experts=routed([0, 1, 2, 3, 3, 2, 1, 0, -1, -1]))
    group = decode(stored(Group(5, [made, sample(reward=1.0, routed_experts=routed([0] * 10))])), 10, 2, SHAPE)
    first, _ = assemble([group], 0, make_config(), SHAPE).documents
    assert first.routed_experts is not None
    assert first.routed_experts.tolist() == [[[0], [1]], [[2], [3]], [[3], [2]], [[1], [0]], [[255], [255]]]
    assert all(d.routed_experts is None for d in assemble([group], 0, make_config()).documents)


@pytest.mark.parametrize(
    ("kv_cache", "mean", "largest"),
    [("keep", (2 * 2 / 3 + 2 * 2 / 4) / 6, 2), ("keep_episode", (2 * 2 / 3 + 2 * 2 / 4) / 6, 2), ("recompute", 0, 0)],
)
def test_the_age_of_the_kv_cache_is_that_behind_trained_tokens(
    kv_cache: str, mean: float, largest: int, make_config: Callable[..., Config]
) -> None:
    config = make_config(weights={"kv_cache": kv_cache}, staleness={"max": 9})
    groups = [Group(0, [sample(runs=[(1, 5), (2, 7)]), sample(runs=[(3, 7)])])]
    batch = assemble(groups, 7, config)
    figures = batch.statistics
    assert figures.kv_cache_age_mean == pytest.approx(mean)
    assert figures.kv_cache_age_max == largest
    for documents, share in ((batch.documents, 1.0), (batch.documents[:1], 2.0), (batch.documents[1:], 0.0)):
        found = ages_of(documents, groups, config)
        assert found["kv_cache_age_mean"] == pytest.approx(mean * share)
        assert found["kv_cache_age_max"] == (largest if share else 0)
        assert (found["staleness_mean"], found["staleness_max"]) == (pytest.approx(share / 3), 2 if share else 0)
    assert set(ages_of([], groups, config).values()) == {0.0}


# ---------------------------------------------------------------- age of the KV cache


def episode(turns: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Versions, and what was sampled; per turn: tokens of text, then the version that sampled each token."""
    versions = [version for text, own in turns for version in [0] * text + own]
    sampled = np.array([i >= text for text, own in turns for i in range(text + len(own))], bool)
    sampled[:1] = False
    return np.array(versions, np.int64), sampled


def counted(turns: list[tuple[int, list[int]]], kept: bool) -> tuple[list[float], list[int]]:
    """The same, one entry at a time, as an engine fills its cache, which it empties before a turn or not."""
    mean: list[float] = []
    largest: list[int] = []
    cache: list[int] = []
    for text, versions in turns:
        mean += [0.0] * text
        largest += [0] * text
        cache = cache if kept else []
        for version in versions:
            cache += [version] * (len(mean) - len(cache))  # missing entries are computed before they are read
            ages = [version - entry for entry in cache] or [0]
            mean.append(sum(ages) / len(ages))
            largest.append(max(ages))
    return mean, largest


steps = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 5), steps), min_size=1, max_size=4),
    first=st.integers(0, 9),
    kept=st.booleans(),
)
def test_ages_are_those_of_an_entry_by_entry_count(turns: list[tuple[int, list[int]]], first: int, kept: bool) -> None:
    at, rising = first, []
    for text, jumps in turns:  # versions only rise
        versions = [at := at + (jump if jump > 1 else 0) for jump in jumps]
        rising.append((text, versions))
    mean, largest = cache_ages(*episode(rising), kept)
    expected = counted(rising, kept)
    np.testing.assert_allclose(mean, expected[0], atol=1e-9)
    assert largest.tolist() == expected[1]


@pytest.mark.parametrize(
    ("turns", "mean", "largest"),
    [
        # The token after the flip is sampled over two entries of version 5 and one that is computed with it.
        ([(2, [5, 7, 7]), (3, [7, 7])], [0, 0, 0, 4 / 3, 1, 0, 0, 0, 0, 0], [0, 0, 0, 2, 2, 0, 0, 0, 0, 0]),
        ([(0, [1, 2])], [0, 0], [0, 0]),
        ([], [], []),
        ([(3, [4, 4, 4]), (2, [4])], [0] * 9, [0] * 9),
        ([(2, [9, 3, 3])], [0] * 5, [0] * 5),
    ],
    ids=["a flip within a call", "no prompt", "no tokens", "one version", "a learner that started again lower"],
)
def test_only_a_call_in_flight_has_an_old_cache(
    turns: list[tuple[int, list[int]]], mean: list[float], largest: list[int]
) -> None:
    found = cache_ages(*episode(turns))
    assert (found[0].tolist(), found[1].tolist()) == (pytest.approx(mean), largest)


def test_a_later_turn_has_an_old_cache_where_episodes_keep_theirs() -> None:
    mean, largest = cache_ages(*episode([(2, [5, 5]), (2, [7, 7])]), kept=True)
    assert mean.tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 2 * 3 / 6, 2 * 3 / 7])
    assert largest.tolist() == [0, 0, 0, 0, 0, 0, 2, 2]
    assert not any(cache_ages(*episode([]), kept=True)[0])
    restarted = cache_ages(*episode([(2, [9, 9]), (2, [3, 3])]), kept=True)
    assert not restarted[0].any() and not restarted[1].any(), "a learner that started again lower"


# ---------------------------------------------------------------- a teacher's columns

TEACHER = {"scorers": {"t": {"url": "http://t/v1", "model": "t", "kind": "teacher"}}}


def taught(top_k: int = 2, **changes: object) -> Sample:
    """Two tokens of prompt and three sampled ones."""
    ids = np.arange(3 * top_k) % 10
    columns = {
        "teacher_logprobs": Array.of([0, 0, -0.5, -1.0, -1.5], "float32"),
        "teacher_top_ids": Array.of(ids, "int32"),
        "teacher_top_logprobs": Array.of(-1.0 - ids, "float32"),
    }
    return sample(**{**columns, **changes})


def distillation(**keys: object) -> DistillationConfig:
    return DistillationConfig(**{"teacher": "t", "objective": "forward_kl", "top_k": 2, **keys})


def test_what_the_loss_does_not_read_of_a_teacher_may_be_missing() -> None:
    told = distillation(objective="reverse_kl", top_k=None)
    plain = taught(teacher_top_ids=None, teacher_top_logprobs=None)
    for group in (Group(5, [plain]), Group(5, [taught()]), Group(5, [sample(error="no teacher")])):
        assert decode(stored(group), 10, 1, distillation=told) == group
    assert decode(stored(Group(5, [taught()])), 10, 1, distillation=distillation()).samples == [taught()]


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"teacher_logprobs": None}, "teacher_logprobs"),
        ({"teacher_logprobs": Array.of([0, 0, -1], "float32")}, "3 entries"),
        ({"teacher_logprobs": Array.of([0, 0, -1, -1, -1], "int32")}, "int32"),
        ({"teacher_logprobs": Array.of([0, 0, -1, math.nan, -1], "float32")}, "finite"),
        ({"teacher_top_ids": None}, "0 tokens"),
        ({"teacher_top_ids": Array.of([1] * 5, "int32")}, "5 tokens"),
        ({"teacher_top_ids": Array.of([1] * 6, "int64")}, "int64"),
        ({"teacher_top_ids": Array.of([1, 1, 1, 1, 1, 10], "int32")}, "0..9"),
        ({"teacher_top_ids": Array.of([1, 1, -1, 1, 1, 1], "int32")}, "0..9"),
        ({"teacher_top_logprobs": Array.of([-math.inf] * 6, "float32")}, "finite"),
        ({"teacher_top_logprobs": Array.of([-1.0] * 3, "float32")}, "3 log-probabilities"),
    ],
)
def test_what_is_wrong_with_a_teachers_columns_is_refused_with_the_reason(
    changes: dict[str, object], fact: str
) -> None:
    with refused(BadGroup, "sample 0", fact):
        decode(stored(Group(5, [taught(**changes)])), 10, 1, distillation=distillation())


def test_another_number_of_the_teachers_tokens_is_refused() -> None:
    with refused(BadGroup, "9 tokens", "6"):
        decode(stored(Group(5, [taught(top_k=3)])), 10, 1, distillation=distillation())


def test_a_path_without_sampled_tokens_needs_no_teacher(make_config: Callable[..., Config]) -> None:
    """A frozen sub-agent's, or an episode whose turns were all left out of the loss."""
    silent = {"loss_mask": Array.of([0] * 5, "uint8"), "behavior_logprobs": Array.of([0] * 5, "float32")}
    own = sample(**silent)
    branch = Branch(own.tokens, own.loss_mask, own.behavior_logprobs, [], name="frozen")
    group = Group(5, [taught(branches=[branch]), own])
    assert decode(stored(group), 10, 2, distillation=distillation()) == group
    told = {"teacher": "t", "objective": "forward_kl", "top_k": 2}
    batch = assemble([group], 0, make_config(learner={"loss": {"distillation": told}}, **TEACHER))
    assert [(document.sample, document.path) for document in batch.documents] == [(0, 0)]


@pytest.mark.parametrize("rewards", [True, False])
def test_a_document_carries_its_teacher_and_rewards_train_only_where_they_should(
    make_config: Callable[..., Config], rewards: bool
) -> None:
    told = {"teacher": "t", "objective": "forward_kl", "top_k": 2, "alone": not rewards}
    config = make_config(learner={"loss": {"distillation": told}}, **TEACHER)
    group = Group(0, [taught(reward=1.0, teacher_s=2.0), taught(reward=0.0, teacher_s=4.0)])
    batch = assemble([group], 0, config)
    assert [document.advantage != 0 for document in batch.documents] == [rewards] * 2
    assert (batch.statistics.reward_mean, batch.statistics.teacher_s) == (0.5, 3.0)
    (packed,) = build(batch.documents, [[0, 1]])
    assert packed.teacher_logprobs is not None and packed.teacher_top_ids is not None
    assert packed.teacher_logprobs.tolist() == [0, -0.5, -1.0, -1.5] * 2
    assert packed.teacher_top_ids.tolist() == [[0, 0], [0, 1], [2, 3], [4, 5]] * 2
    assert packed.teacher_top_logprobs is not None
    assert packed.teacher_top_logprobs.tolist() == [[0, 0], [-1, -2], [-3, -4], [-5, -6]] * 2
    assert build([FILLER], [[0]])[0].teacher_logprobs is None
