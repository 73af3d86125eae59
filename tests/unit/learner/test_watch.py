"""Watch rules over series made by hand: when they act, when they may act again, and what a restart remembers."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from common.config.loading import build_config
from common.config.observing import WatchRule
from common.config.schema import Config
from common.config.without_effect import without_effect
from common.errors import ConfigError
from common.metrics import NEEDING, OF_EPISODES, OF_TRAINED, EvaluationMetrics, StepMetrics, judged, numbers
from common.rollouts import Group, Sample, VersionRun
from common.wire_types import Array
from learner.backend_protocol import NOTHING_TRAINED
from learner.batch.batch import BatchStatistics, TrainingBatch
from learner.batch.packing import Document
from learner.loop.step_metrics import loss_figures
from learner.loop.watcher import FEWEST, LIKE, MEDIAN_OF, OF_SAMPLES, OF_TOKENS, RuleState, largest
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused
from tests.rigs.telemetry import read_line
from tests.unit.learner.conftest import BASE
from tests.unit.learner.test_best import config_of, evaluating

NAN, INF = math.nan, math.inf


def line(step: int, value: float, metric: str = "reward_mean", **more: Any) -> StepMetrics:
    """A step that trained some tokens."""
    return read_line(step, **{"tokens_trained": 4, metric: value, **more})


def acts(rule: WatchRule, *series: float) -> list[int]:
    """The steps at which the rule acts."""
    state, found, before = RuleState(0, rule), [], None
    for step, value in enumerate(series):
        state.see(line(step, value, rule.metric))
        if state.firing is not None and state.firing is not before:
            assert state.firing.step == step
            found.append(step)
        before = state.firing
    return found


def rule(metric: str = "reward_mean", **condition: Any) -> WatchRule:
    return WatchRule(metric=metric, **condition)


@pytest.mark.parametrize(
    ("watched", "series", "steps"),
    [
        (rule(below=0.5), [0.5, 0.4, 0.3, 0.5, 0.4], [1, 4]),
        (rule(above=2.0, steps=3), [3, 3, 2, 3, 3, 3, 3, 1, 3, 3, 3], [5, 10]),
        (rule(below=0.5, steps=2), [0.4, 0.6, 0.4, 0.6], []),
        (rule(below=0.5), [NAN, 1, INF, INF, 1], [0, 2]),
        (rule(above=2.0, steps=2), [1, NAN, 3, 1], [2]),
        (rule(drops=0.5, steps=1), [0.2, 0.8, 0.4, 0.39, 0.2, 0.4, 0.3], [3, 6]),
        (rule(drops=0.5, steps=2), [1, 1, 0, 1, 0.4, 0.4, 0.4, 2], [5]),
        (rule(drops=0.5, steps=2), [1, 1, NAN, 1, 1], [2]),
        (rule(drops=0.5, steps=1), [-1, -1.4, -1.6], [2]),
        (rule(drops=0.2, steps=3), [0.9, 0.1], []),
        (rule(spikes=3.0), [1.0] * FEWEST + [2.9, 3.1, 1, 3.1], [FEWEST + 1, FEWEST + 3]),
        (rule(spikes=3.0), [1.0] * (FEWEST - 1) + [100], []),
        (rule(spikes=3.0), [0.0] * FEWEST + [100], []),
        (rule(spikes=3.0, steps=2), [1.0] * FEWEST + [9, 1, 9, 9], [FEWEST + 3]),
        (rule(spikes=2.0), [1.0] * MEDIAN_OF + [10.0] * MEDIAN_OF + [19, 21], [MEDIAN_OF, 2 * MEDIAN_OF + 1]),
        (rule(spikes=3.0), [1.0, NAN] * FEWEST + [3.1], [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]),
    ],
)
def test_a_rule_acts_once_and_again_only_after_the_metric_was_well(
    watched: WatchRule, series: list[float], steps: list[int]
) -> None:
    assert acts(watched, *series) == steps


@pytest.mark.parametrize(
    ("watched", "series", "text"),
    [
        (rule(below=0.5), [0.25], "watch[0]: reward_mean was 0.25, below 0.5 at step 0"),
        (rule(above=2, steps=2), [3, 4], "watch[0]: reward_mean was 4, above 2, for 2 steps at step 1"),
        (
            rule(drops=0.5, steps=2), [1, 1, 0, 0],
            "watch[0]: the mean of reward_mean over 2 steps was 0, below 0.5 (its best mean less 50%) at step 3",
        ),
        (
            rule(spikes=3), [2.0] * FEWEST + [7],
            f"watch[0]: reward_mean was 7, above 6 (3 times the median of the steps before) at step {FEWEST}",
        ),
        (rule(below=0.5), [NAN], "watch[0]: reward_mean was not finite at step 0"),
    ],
)  # fmt: skip
def test_the_sentence_has_value_limit_and_step(watched: WatchRule, series: list[float], text: str) -> None:
    state = RuleState(0, watched)
    for step, value in enumerate(series):
        state.see(line(step, value))
    assert state.firing is not None
    assert state.firing.text == text
    assert (state.firing.value is None) == math.isnan(series[-1])


def test_the_rules_of_the_page_are_valid_and_each_acts_when_its_metric_goes_astray() -> None:
    page = (ROOT / "docs" / "watch.md").read_text()
    block = page[page.index("    watch:\n") :].partition("\n\n")[0]
    config = build_config(BASE | yaml.safe_load(block), "docs/watch.md", schema=Config)
    series = {
        "reward_mean": ([1.0] * 20 + [0.0] * 20, 30),  # 9 of the last 20 are still 1
        "entropy": ([0.5, 0.01, 0.5] + [0.01] * 6, 7),
        "effective_sample_fraction": ([0.9, 0.2, 0.9] + [0.2] * 6, 7),
        "mismatch_abs_mean": ([0.01, 0.2, 0.01] + [0.2] * 4, 5),
        "truncated_fraction": ([0.1, 0.9, 0.1] + [0.9] * 12, 12),
        "grad_norm": ([1.0] * FEWEST + [9.0, 11.0], FEWEST + 1),
    }
    assert {rule.metric: acts(rule, *series[rule.metric][0]) for rule in config.watch} == {
        metric: [step] for metric, (_, step) in series.items()
    }
    assert {rule.do for rule in config.watch} == {"stop", "pause", "warn", "run"}


def test_a_state_rebuilt_from_the_lines_at_any_step_continues_as_if_never_killed() -> None:
    rules = [rule(below=-0.8, steps=2), rule(above=0.9), rule(drops=0.5, steps=4), rule(spikes=2.0)]
    draw = np.random.default_rng(3)
    series = [float(x) for x in draw.normal(0.2, 0.7, 120)]
    series[40], series[41] = NAN, INF
    lines = [line(step, value) for step, value in enumerate(series)]
    never = [RuleState(number, one) for number, one in enumerate(rules)]
    for end, newest in enumerate(lines):
        for state in never:
            state.see(newest)
        if end % 7 == 0 or 38 < end < 44:
            again = [RuleState(number, one) for number, one in enumerate(rules)]
            for earlier in lines[: end + 1]:
                for state in again:
                    state.see(earlier)
            assert [vars(state) for state in again] == [vars(state) for state in never]
    assert all(acts(one, *series) for one in rules), "each rule acts in this series"


@pytest.mark.parametrize("watched", [{"drops": 0.1, "steps": 1}, {"below": 0.55, "steps": 2}])
def test_a_rule_judges_an_evaluation_by_those_that_were_made_in_the_same_way(watched: dict[str, Any]) -> None:
    def see(version: int, reward: float, digest: str) -> None:
        state.see(read_line(version, EvaluationMetrics, dataset="d", mean_reward=reward, digest=digest))

    state = RuleState(0, rule("evaluation/d/mean_reward", **watched))
    for version, reward, digest in ((1, 0.6, "greedy"), (2, 0.54, "greedy"), (3, 0.3, "sampled")):
        see(version, reward, digest)
        assert state.firing is None
    see(4, 0.2, "sampled")
    assert state.firing is not None and state.firing.step == 4


def test_values_are_found_by_name_and_a_step_that_trained_nothing_has_no_figures_of_tokens() -> None:
    found = line(1, 0.5, environment={"solved": 0.25, "broken": NAN}, entropy=0.0)
    expected = {"reward_mean": 0.5, "environment/solved": 0.25, "environment/lost": None, "kl_mean": None}
    expected |= {"entropy": 0.0, "evaluation/addition-held_out/mean_reward": None}
    assert {name: judged(found, name) for name in expected} == expected
    assert math.isnan(judged(found, "environment/broken") or 0.0)
    evaluated = read_line(1, EvaluationMetrics, dataset="addition-held_out", mean_reward=0.75, length_mean=3.0)
    expected = {"evaluation/addition-held_out/mean_reward": 0.75, "evaluation/addition-held_out/pass_at": None}
    expected |= {"length_mean": None, "evaluation/other/mean_reward": None}
    assert {name: judged(evaluated, name) for name in expected} == expected
    nothing = msgspec.structs.replace(found, tokens_trained=0)
    assert judged(nothing, "entropy") is None
    assert judged(nothing, "reward_mean") == 0.5
    state = RuleState(0, rule("entropy", below=0.1))
    state.see(nothing)
    assert state.firing is None


def test_zeros_of_a_step_that_trained_nothing_and_of_one_without_episodes_are_not_judged() -> None:
    figures = set(loss_figures(NOTHING_TRAINED)) & set(numbers(StepMetrics))
    updates = {"grad_norm_max", "batch_kl", "update_age_mean", "update_age_max"}
    assert figures | updates | {"loss", "grad_norm", "lr", "staleness_mean", "staleness_max"} <= OF_TRAINED
    assert set(StepMetrics.__struct_fields__) >= OF_TRAINED | OF_EPISODES
    assert {name for names in NEEDING.values() for name in names} <= {*numbers(StepMetrics), "validation_loss"}
    zeros = dict.fromkeys(OF_TRAINED | OF_EPISODES, 0) | {"groups_ready": 0}
    filtered = read_line(1, **zeros, tokens_trained=0, samples=8, samples_failed=0)
    assert {name for name in zeros if judged(filtered, name) is not None} == OF_EPISODES | {"groups_ready"}
    failed = read_line(1, **zeros, tokens_trained=0, samples=8, samples_failed=8)
    assert {name for name in zeros if judged(failed, name) is not None} == {"groups_ready"}
    assert judged(read_line(1, reward_mean=0.5), "reward_mean") == 0.5, "a line without the counts of samples"


# ---------------------------------------------------------------- contributions


def document(serial: int, advantage: float, *logprobs: float, age: int = 0) -> Document:
    """Two tokens of a prompt, whose figures do not count, then a trained one for each log-probability."""
    count = len(logprobs)
    return Document(
        tokens=np.zeros(count + 2, dtype=np.int32),
        loss_mask=np.r_[0, 0, np.ones(count)].astype(np.uint8),
        behavior_logprobs=np.r_[-99, -99, logprobs].astype(np.float32),
        staleness=np.r_[50, 50, [age] * count].astype(np.int32),
        advantage=advantage,
        serial=serial,
    )


def group(serial: int, *samples: tuple[int, float, str]) -> Group:
    def sample(tokens: int, reward: float, stop: str) -> Sample:
        return Sample(
            tokens=Array.of(np.zeros(tokens + 1), "int32"),
            loss_mask=Array.of(np.r_[0, np.ones(tokens)], "uint8"),
            behavior_logprobs=Array.of(np.zeros(tokens + 1), "float32"),
            version_runs=[VersionRun(1, 0)],
            reward=reward,
            stop_reason=stop,
            error="it broke" if stop == "error" else None,
        )

    return Group(serial, [sample(*one) for one in samples])


BATCH = TrainingBatch(
    3,
    [
        document(7, 2.0, math.log(0.5), math.log(0.5), age=1),
        document(7, -1.0, math.log(0.9)),
        document(8, -3.0, math.log(0.99), math.log(0.01)),
        document(9, 0.0, math.log(0.001), age=4),
    ],
    BatchStatistics(),
)
GROUPS = [
    group(7, (5, 1.0, "stop"), (9, 1.0, "length")),
    group(8, (4, 0.5, "turn_limit"), (4, 0.0, "length")),
    group(9, (2, 0.0, "error"), (2, 0.0, "stop")),
]


@pytest.mark.parametrize(
    ("metric", "serials", "first"),
    [
        ("grad_norm", [8, 7], 3 * (0.01 + 0.99)),  # 9 has no advantage
        ("entropy", [9, 8, 7], -math.log(0.001)),
        ("ratio_max", [9, 8, 7], -math.log(0.001)),
        ("staleness_mean", [9, 7], 4),
        ("truncated_fraction", [8, 7], 2),
        ("length_mean", [7, 8, 9], 14),
        ("length_max", [7, 8, 9], 9),
        ("reward_mean", [7, 8], 2.0),
        ("samples_failed", [9], 1),
        ("step_s", [], 0),
    ],
)
def test_the_groups_that_contribute_most_come_first(metric: str, serials: list[int], first: float) -> None:
    found = largest(metric, BATCH, GROUPS)
    assert [one["serial"] for one in found] == serials
    assert not found or found[0]["contribution"] == pytest.approx(first, rel=1e-5)


def test_every_metric_with_a_contribution_exists() -> None:
    from common.metrics import StepMetrics

    assert (OF_TOKENS.keys() | OF_SAMPLES.keys() | LIKE.keys()) - set(StepMetrics.__struct_fields__) == set()


@pytest.mark.parametrize("metric", ["evaluation/data-held-uot/mean_reward", "evaluation/data-held-out/mean_rewrad"])
def test_a_rule_on_an_evaluation_that_the_run_does_not_have_is_refused_with_the_nearest_name(metric: str) -> None:
    told = {"watch": [{"metric": "loss", "above": 1}, {"metric": metric, "below": 0.5}], **evaluating()}
    with refused(ConfigError, metric) as caught:
        config_of("reward_mean", **told).validate("job.yaml", "broker")
    assert caught.value.key == "watch[1].metric"
    assert "'evaluation/data-held-out/mean_reward'" in str(caught.value.hint)
    told["watch"][1]["metric"] = "evaluation/data-held-out/mean_reward_low"
    config_of("reward_mean", **told).validate("job.yaml", "broker")


TEACHER = {
    "scorers": {"t": {"url": "http://t/v1", "model": "t", "kind": "teacher"}},
    "learner": {"loss": {"distillation": {"teacher": "t"}}},
}
CRITIC = {"learner": {"critic": {"kl_coefficient": 0.1}, "loss": {"advantage": "gae"}}}


@pytest.mark.parametrize(
    ("metric", "needed", "sections"),
    [
        ("kl_mean", "learner.loss.kl_coefficient", {"learner": {"loss": {"kl_coefficient": 0.1}}}),
        ("kl_mean", "learner.loss.kl_coefficient", CRITIC),
        ("teacher_kl_mean", "learner.loss.distillation", TEACHER),
        ("value_loss", "learner.critic", CRITIC),
        ("return_mean", "learner.critic", CRITIC),
        ("routing_mismatch_fraction", "learner.moe.replay_routing", {"learner": {"moe": {"replay_routing": True}}}),
        ("kv_cache_usage", "rollout.concurrency: auto", {"rollout": {"concurrency": "auto"}}),
        ("evaluation/data-held-out/mean_reward", "evaluation.every", evaluating()),
    ],
)
def test_a_rule_on_a_metric_that_the_run_does_not_measure_is_told_with_the_key_that_it_needs(
    metric: str, needed: str, sections: dict[str, Any]
) -> None:
    told = {"watch": [{"metric": metric, "above": 0.5}], **evaluating(every=0)}
    config = config_of("reward_mean", **told)
    config.validate("job.yaml", "broker")
    [sentence] = without_effect(config)
    assert sentence.startswith("watch[0] ") and metric in sentence and sentence.endswith(f" needs {needed}.")
    config = config_of("reward_mean", **told | sections)
    config.validate("job.yaml", "broker")
    assert list(without_effect(config)) == []
