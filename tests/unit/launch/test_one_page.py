"""The first page of `slipstream report`: its verdict, its lines, and the rules that name a key."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from common.metrics import StepMetrics
from common.process.run_dir import write_json
from common.run_reader import MetricsTail, read_tail
from launch.results.one_page import changes, page_rows, shares, trend
from launch.results.report import summarise
from tests.rigs.configs import status_of
from tests.unit.launch.test_report import line

STEPS = 20
RISE, NOISE = [n / 20 for n in range(20)], [0.4 + 0.1 * (n % 2) for n in range(20)]
QUIET = {"advantage_zero_fraction": 0.0, "truncated_fraction": 0.0, "samples": 64, "tokens_expired": 0}


def written(run, **figures: Any) -> MetricsTail[StepMetrics]:
    """The metrics of a run of STEPS steps with these figures; a list has one of each step."""
    rows = []
    for step in range(STEPS):
        own = {
            name: each[step] if isinstance(each, list) and len(each) == STEPS else each
            for name, each in figures.items()
        }
        rows.append({**line(step), **QUIET, **own})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_tail(run.metrics, StepMetrics)


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        (RISE, "rose"),
        (RISE[::-1], "fell"),
        ([*RISE, *[0.1, 0.12] * 10], "fell"),  # from its best, though it ends where it began
        ([*RISE, *[0.94, 0.9] * 10], "rose"),
        (NOISE, "flat"),
        ([0.5] * 20, "flat"),
        (RISE[:14], "short"),
    ],
)
def test_a_verdict_is_about_more_than_noise(rewards: list[float], found: str) -> None:
    assert trend(rewards) == found


@pytest.mark.parametrize("steps", [15, 20, 29, 100, 1000])
def test_pure_noise_seldom_falls_and_a_real_fall_is_found_in_it(steps: int) -> None:
    noise = np.random.default_rng(steps).normal(size=(400, steps))
    assert sum(trend(list(run)) == "fell" for run in noise) <= 0.06 * len(noise)
    peak = np.sin(np.linspace(0, np.pi, steps))  # it ends where it began
    assert steps < 50 or sum(trend(list(run)) == "fell" for run in 3 * peak + noise) >= 0.95 * len(noise)


def test_the_page_has_every_line_of_a_run_and_fits_a_chat(run, config) -> None:
    tail = written(run, groups_filtered=2, samples_failed_by_reason={"timeout": 3})
    write_json(run.status_json, status_of(groups_dead=7))
    rows = page_rows(summarise(run, tail, config), tail, config)
    text = dict(rows)
    assert [label for label, _ in rows if label] == [
        "verdict", "reward", "held out", "staleness", "time", "wasted", "change",
    ]  # fmt: skip
    assert text["verdict"].startswith("it learned: reward 0.100 (first 5 steps) to 0.725 (last 10); 20 of ")
    assert "slipstream eval RUN" in text["held out"]
    assert text["staleness"] == f"mean 1.00, largest 2 of {config.staleness.max} allowed, in versions"
    whole = "\n".join(each for _, each in rows)
    assert "7 tasks given up" in whole
    assert "5 of 2,400 generated tokens (0.2%): 5 lost" in whole
    assert "40 groups filtered, without signal, 60 samples failed (timeout)" in whole
    assert "█ training 50%  ░ waiting for groups 25%  · other 25%" in whole
    assert text["time"].startswith("█" * 24 + "░" * 12 + "·" * 12)
    assert len(rows) <= 16 and all(len(each) <= 130 for _, each in rows)


@pytest.mark.parametrize(("start", "per_step", "found"), [(500.0, 0.0, []), (0.0, 1.0, ["50%"]), (500.0, 1.0, ["50%"])])
def test_nodes_without_work_are_counted_between_the_first_and_the_last_line(
    run, config, start: float, per_step: float, found: list[str]
) -> None:
    waited = [start + per_step * step for step in range(STEPS)]
    tail = written(run, seconds_wasted_waiting=waited, nodes_live=2, step_s=1.0)
    said = [text for _, text in page_rows(summarise(run, tail, config), tail, config)]
    assert [each for each in said if "no work" in each] == [
        f"nodes had no work {share} of their time" for share in found
    ]


def test_what_nodes_wait_for_while_no_learner_is_there_is_no_share_of_the_steps(run, config) -> None:
    lives = [0] * (STEPS // 2) + [1] * (STEPS - STEPS // 2)
    waited = [step + 1e5 * life for step, life in enumerate(lives)]
    pause = [1000.0 + step - 1800.0 * life for step, life in enumerate(lives)]  # its clock is behind that of the first
    tail = written(run, seconds_wasted_waiting=waited, nodes_live=2, step_s=1.0, time_s=pause, incarnation=lives)
    rows = page_rows(summarise(run, tail, config), tail, config)
    assert [text for _, text in rows if "no work" in text] == ["nodes had no work 50% of their time"]


def test_evaluations_are_a_curve_with_the_newest_interval(run, config) -> None:
    tail = written(run)
    known = {"kind": "evaluation", "time_s": 1.0, "dataset": "held.jsonl", "problems": 64, "samples": 1, "failed": 0}
    known |= {"temperature": 0.0, "pass_at": {}, "pass_at_low": {}, "pass_at_high": {}, "truncated_fraction": 0.0}
    known |= {"length_mean": 1.0, "tokens": 1, "seconds": 1.0}
    values = [(version, 0.2 + version / 40) for version in (0, 10, 20)]
    more = [
        {
            **known,
            "step": v,
            "policy_version": v,
            "mean_reward": x,
            "mean_reward_low": x - 0.1,
            "mean_reward_high": x + 0.1,
        }
        for v, x in values
    ]
    run.metrics.write_text(run.metrics.read_text() + "".join(json.dumps(each) + "\n" for each in more))
    tail = read_tail(run.metrics, StepMetrics)
    found = dict(page_rows(summarise(run, tail, config), tail, config))["held out"]
    assert found == "0.200 ▁▅█ 0.700 (95 %: 0.600 to 0.800) on 64 problems of held.jsonl, version 20"


@pytest.mark.parametrize(
    ("figures", "key", "evidence"),
    [
        ({"reward_mean": RISE[::-1]}, "learner.optimizer.lr: less than", "fell from its best"),
        ({"truncated_fraction": 0.25}, "rollout.max_tokens: more than", "25% of samples are cut"),
        ({"advantage_zero_fraction": 0.75}, "tasks.dataset: harder problems", "75% of groups have equal rewards"),
        ({"advantage_zero_fraction": 0.75, "reward_mean": NOISE}, "learner.dynamic_sampling: true", "75% of groups"),
        ({"tokens_expired": 100}, "staleness.max: more than 2", "2,000 tokens were too old"),
        ({"effective_sample_fraction": 0.25}, "staleness.max: less than 2", "25% of the tokens"),
        ({"samples_failed": 16}, "tasks: ", "25% of samples failed"),
        ({"checkpoint_s": 0.5}, "learner.checkpoint.every: more than", "25% of the time"),
    ],
)
def test_a_rule_names_its_key_and_its_evidence(run, config, figures: dict[str, Any], key: str, evidence: str) -> None:
    staleness = msgspec.structs.replace(config.staleness, max=2)
    config = msgspec.structs.replace(config, staleness=staleness)
    quiet, said = changes(written(run), config), changes(written(run, **figures), config)
    assert not any(each.startswith(key) for each in quiet)
    assert [each for each in said if each.startswith(key)] and any(evidence in each for each in said)


def test_zeros_of_steps_that_trained_nothing_are_in_no_mean_and_advise_nothing(run, config) -> None:
    ratios = ("effective_sample_fraction", "ratio_p1", "entropy", "kl_mean", "staleness_mean", "mismatch_abs_mean")
    some = [step % 4 == 0 for step in range(STEPS)]
    zeros = {name: [0.98 * each for each in some] for name in ratios}
    failed = {"samples": 64, "samples_failed": [0 if each else 64 for each in some]}
    cut = {"reward_mean": [0.5 * each for each in some], "truncated_fraction": [0.25 * each for each in some]}
    tail = written(run, **zeros, **failed, **cut, tokens_trained=[100 * each for each in some])
    found = summarise(run, tail, config)
    assert found["staleness"]["mean"] == pytest.approx(0.98)
    shown = ("effective_sample_fraction", "ratio_p1", "mismatch_abs_mean", "entropy_last_10", "kl_last_10")
    assert [found["off_policy"][name] for name in shown] == [pytest.approx(0.98)] * 5
    assert found["reward"]["last_10_steps"] == 0.5
    said = changes(tail, config)
    assert any("25% of samples are cut" in each for each in said) and not any("effective" in each for each in said)


def test_a_run_whose_samples_all_failed_has_a_page(run, config) -> None:
    tail = written(run, samples=64, samples_failed=64, reward_mean=0.0, tokens_trained=0)
    verdict = dict(page_rows(summarise(run, tail, config), tail, config))["verdict"]
    assert verdict.startswith("it did not learn: reward 0.000")


def test_lines_without_times_have_no_bar(run) -> None:
    assert shares(written(run, step_s=None)) == {}


def test_groups_with_equal_rewards_teach_what_a_teacher_says(run, config) -> None:
    tail = written(run, advantage_zero_fraction=0.75, teacher_s=0.5)
    assert not any("equal rewards" in each for each in changes(tail, config))


@pytest.mark.parametrize("estimator", ["reinforce_pp", "gdpo", "my.module:estimator"])
@pytest.mark.parametrize("rewards", [RISE, NOISE])
def test_groups_with_equal_rewards_may_teach_where_they_are_compared_over_the_batch(
    run, config, estimator: str, rewards: list[float]
) -> None:
    loss = msgspec.structs.replace(config.learner.loss, advantage=estimator)
    config = msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, loss=loss))
    tail = written(run, advantage_zero_fraction=1.0, reward_mean=rewards)
    assert not any("equal rewards" in each for each in changes(tail, config))
