"""`tasks.sources`: what a source inherits, and what is refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.checks import downloaded, problems, resolve_paths
from common.config.loading import build_config, dump_yaml, load_config
from common.config.schema import Config
from common.config.without_effect import without_effect
from common.errors import ConfigError, Problem
from launch.sweep.winner import parse_rule

SUMS = {"environment": "addition", "max_tokens": 8, "weight": 2}
TEXTS = {"reward": [{"function": "exact_match"}, {"scorer": "judge"}], "advantage": "rloo", "kl_coefficient": 0.1}
NO_KL = ["tasks.sources.sums.kl_coefficient=0", "tasks.sources.texts.kl_coefficient=0"]
MAXRL = "tasks.sources.texts.advantage=maxrl"
JUDGE = {"url": "http://h:1/v1", "model": "m", "prompt": "{completion}", "verdict": "(\\d)"}


def document(folder: Path, **tasks: Any) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"pass_rate": i / 4, "n": i}) + "\n" for i in range(5)))
    return {
        "run": {"name": "t", "dir": str(folder), "steps": 2},
        "model": {"path": str(folder)},
        "tasks": {"sources": {n: {"dataset": "rows.jsonl"} | s for n, s in (("sums", SUMS), ("texts", TEXTS))}} | tasks,
        "rollout": {"max_tokens": 16, "max_turns": 3},
        "scorers": {"judge": JUDGE},
    }


def built(folder: Path, *words: str, **tasks: Any) -> Config:
    return build_config(document(folder, **tasks), "job.yaml", words)


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, **tasks: Any) -> list[Problem]:
    """Problems of the checks that need several keys or the disk, without those of the model's folder."""
    monkeypatch.chdir(folder)
    config = resolve_paths(built(folder, *words, **tasks))
    return [problem for problem in problems(config) if problem.key != "model.path"]


def test_a_source_is_a_job_of_its_own_with_the_shared_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"truncated": "penalized", "overlong_buffer_tokens": 4, "limits": {"step_s": 3.0, "cpu_s": 9}}
    words = ("tasks.sources.sums.limits.step_s=1", "tasks.sources.sums.truncated=masked")
    config = built(tmp_path, *words, **shared)
    sums, texts = config.sources.values()
    assert (sums.tasks.environment, sums.tasks.limits.step_s, sums.tasks.limits.cpu_s) == ("addition", 1, 9)
    assert (sums.tasks.truncated, sums.tasks.overlong_buffer_tokens) == ("masked", None)
    assert (texts.tasks.truncated, texts.tasks.overlong_buffer_tokens, texts.tasks.limits.step_s) == ("penalized", 4, 3)
    assert (sums.rollout.max_tokens, sums.rollout.max_turns, texts.rollout.max_tokens) == (8, 3, 16)
    assert (texts.learner.loss.advantage, texts.learner.loss.kl_coefficient) == ("rloo", 0.1)
    assert (sums.learner.loss.advantage, sums.learner.loss.kl_coefficient) == ("grpo", 0)
    assert config.measures_kl and not sums.measures_kl
    assert (list(sums.scorers), list(texts.scorers)) == ([], ["judge"])
    assert list(texts.sources) == [""]
    assert found(tmp_path, monkeypatch, *words, **shared) == []
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
    absolute = resolve_paths(config)
    assert absolute.tasks.sources["sums"].dataset == str(tmp_path / "rows.jsonl")
    assert downloaded(absolute) == absolute


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("tasks.environment=addition", "tasks.environment"),
        ("tasks.dataset=x", "tasks.dataset"),
        ("tasks.reward=exact_match", "tasks.reward"),
        ("tasks.shuffle=false", "tasks.shuffle"),
        ("tasks.sources.Sums={environment: addition, dataset: x}", "tasks.sources.Sums"),
        ("tasks.sources.sums.environment=null", "tasks.sources.sums"),
        ("tasks.sources.sums.reward=exact_match", "tasks.sources.sums.reward"),
        ("tasks.sources.sums.overlong_buffer_tokens=4", "tasks.sources.sums.overlong_buffer_tokens"),
        ("tasks.sources.sums.weight=-1", "tasks.sources.sums.weight"),
        ("tasks.sources.sums.weight=.nan", "tasks.sources.sums.weight"),
        ("tasks.sources.sums.weight=.inf", "tasks.sources.sums.weight"),
        ("tasks.sources.sums.min_success=1.5", "tasks.sources.sums.min_success"),
        ("tasks.curriculum.floor=0", "tasks.curriculum.floor"),
        ("tasks.curriculum.rule=succes", "tasks.curriculum.rule"),
    ],
)
def test_what_no_job_can_have_is_refused_by_its_key(tmp_path: Path, word: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, word)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("sources", "key"),
    [
        ({"a b": SUMS | {"dataset": "x"}}, "tasks.sources"),
        ({"a" * 65: SUMS | {"dataset": "x"}}, "tasks.sources"),
        ({"texts": TEXTS | {"dataset": "x", "reward": [{"scorer": "jduge"}]}}, "tasks.sources.texts.reward[0].scorer"),
        ({"texts": TEXTS | {"dataset": "x", "reward": "exact_match"}}, "scorers.judge"),
    ],
)
def test_names_and_scorers_of_sources_are_checked(tmp_path: Path, sources: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, sources=document(tmp_path)["tasks"]["sources"] | sources)
    assert caught.value.key == key


def test_options_of_an_estimator_belong_to_the_source_that_names_it(tmp_path: Path) -> None:
    job = {"learner.loss.advantage=pass_at_k", "learner.loss.advantage_options={k: 2}"}
    sums, texts = built(tmp_path, *job).sources.values()
    assert (sums.learner.loss.advantage, sums.learner.loss.advantage_options) == ("pass_at_k", {"k": 2})
    assert (texts.learner.loss.advantage, texts.learner.loss.advantage_options) == ("rloo", {})
    sums, texts = built(tmp_path, *job, "tasks.sources.sums.advantage_options={k: 3}").sources.values()
    assert sums.learner.loss.advantage_options == {"k": 3}


def test_weights_whose_sum_is_0_unknown_keys_and_a_curriculum_of_one_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, "tasks.sources.sums.weight=0", "tasks.sources.texts.weight=0")
    assert caught.value.key == "tasks.sources.sums.weight"
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, "tasks.sources.sums.wieght=1")
    assert caught.value.key == "tasks.sources.sums.wieght" and "weight" in (caught.value.hint or "")
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, "scorers={}", "tasks.curriculum.rule=success", sources={}, environment="addition", dataset="x")
    assert caught.value.key == "tasks.curriculum.rule"
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, "scorers={}", sources={}, environment="addition")
    assert caught.value.key == "tasks.dataset"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["tasks.sources.sums.max_tokens=17"], "tasks.sources.sums.max_tokens"),
        (["tasks.sources.sums.max_turns=4"], "tasks.sources.sums.max_turns"),
        (["tasks.sources.sums.dataset=absent.jsonl"], "tasks.sources.sums.dataset"),
        (["tasks.sources.sums.dataset=empty.jsonl"], "tasks.sources.sums.dataset"),
        (["tasks.sources.sums.min_success=0.3", "tasks.sources.sums.max_success=0.4"], "tasks.sources.sums.dataset"),
        (["tasks.sources.sums.min_success=0.3", "tasks.sources.sums.success_column=x"], "tasks.sources.sums.dataset"),
        (["tasks.sources.sums.limits.python=/absent"], "tasks.sources.sums.limits.python"),
        (["evaluation.datasets=[rows.jsonl]"], "evaluation.datasets"),
        (["evaluation.datasets={smus: [rows.jsonl]}"], "evaluation.datasets.smus"),
        (["learner.dynamic_sampling=true", "tasks.sources.sums.advantage=reinforce_pp"], "learner.dynamic_sampling"),
        (["rollout.group_size=1", "tasks.sources.texts.advantage=reinforce_pp"], "rollout.group_size"),
        (["tasks.sources.sums.advantage_options={k: 2}"], "tasks.sources.sums.advantage_options"),
        (["tasks.sources.texts.truncated=penalized", MAXRL], "tasks.sources.texts.advantage"),
        (["tasks.sources.sums.advantage=gdpo"], "tasks.sources.sums.advantage_options"),
        (["watch=[{metric: sources/smus/success, below: 0.1}]"], "watch[0].metric"),
        (["watch=[{metric: sources/sums/succes, below: 0.1}]"], "watch[0].metric"),
        (["watch=[{metric: environment/exact_match, below: 0.1}]"], "watch[0].metric"),
        (["learner.loss.reference=x", "tasks.sources.texts.kl_coefficient=0"], "learner.loss.reference"),
        (["learner.loss.kl_coefficient=0.1", *NO_KL], "learner.loss.kl_coefficient"),
    ],
)
def test_what_does_not_fit_the_job_or_its_files_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], key: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert key in [problem.key for problem in found(tmp_path, monkeypatch, *words)]


def test_keys_of_a_curriculum_without_a_rule_are_told_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "tasks.curriculum={target: 0.3, every: 1}"
    assert found(tmp_path, monkeypatch, word) == []
    assert [text.split()[0] for text in without_effect(built(tmp_path, word))] == [
        "tasks.curriculum.target",
        "tasks.curriculum.every",
    ]
    assert list(without_effect(built(tmp_path, word, "tasks.curriculum.rule=success"))) == []


def test_a_rule_and_a_sweep_may_name_the_metrics_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ("sources/sums/success, below: 0.1", "sources/texts/weight, above: 0.9", "environment/sums/x, above: 0")
    word = f"watch=[{', '.join(f'{{metric: {rule}}}' for rule in rules)}]"
    assert found(tmp_path, monkeypatch, word) == []
    assert parse_rule("sources/sums/success", built(tmp_path)).metric == "sources/sums/success"
    with pytest.raises(ConfigError) as caught:
        parse_rule("sources/smus/success", built(tmp_path))
    assert (caught.value.key, "sources/sums/success" in (caught.value.hint or "")) == ("--winner", True)


def test_held_out_problems_belong_to_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = "evaluation.datasets={texts: [rows.jsonl], sums: [rows.jsonl]}"
    config = built(tmp_path, word)
    assert config.evaluation.held_out == [("texts", "rows.jsonl"), ("sums", "rows.jsonl")]
    monkeypatch.chdir(tmp_path)
    assert resolve_paths(config).evaluation.paths == [str(tmp_path / "rows.jsonl")] * 2
