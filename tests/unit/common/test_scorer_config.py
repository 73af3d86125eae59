"""The section `scorers`: what is refused, with its key, and what a run's config.yaml says of a key."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.checks import problems, resolve_paths
from common.config.loading import build_config, dump_yaml, load_config
from common.config.schema import Config
from common.errors import ConfigError
from common.process.run_dir import OtherRun, RunDir
from tests.rigs.configs import document_of
from tests.rigs.refusals import refused

JUDGE: dict[str, Any] = {
    "url": "http://judge:8000/v1",
    "model": "big",
    "prompt": "{question} {completion}",
    "verdict": "Score: (.*)",
}


def document(folder: Path, reward: Any = None, name: str = "judge", **keys: Any) -> dict[str, Any]:
    """A job with one scorer, which one reward names; `keys` change the scorer, None takes a key out."""
    scorer = {key: value for key, value in {**JUDGE, **keys}.items() if value is not None}
    tasks = {"environment": None, "reward": [{"scorer": name}] if reward is None else reward}
    return {**document_of(folder, tasks=tasks), "scorers": {name: scorer}}


def built(folder: Path, **keys: Any) -> Config:
    return build_config(document(folder, **keys), "job.yaml")


def test_a_scorer_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    labels = {"right": 1, "wrong": -0.5}
    talk = [{"role": "system", "content": "{rubric}"}, {"role": "user", "content": "{completion}"}]
    config = built(tmp_path, verdict=labels, prompt=talk, extra={"seed": 1}, requests_per_minute=60, api_key_env="KEY")
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert config.scorers["judge"].templates == [("system", "{rubric}"), ("user", "{completion}")]
    assert config.scorers["judge"].verdict == labels


@pytest.mark.parametrize(
    ("keys", "key", "fact"),
    [
        ({"url": "judge:8000/v1"}, "url", "http://judge:8000/v1"),
        ({"url": "ftp://judge/v1"}, "url", "ftp://"),
        ({"url": "http:///v1"}, "url", "http:///v1"),
        ({"url": "http://judge:many/v1"}, "url", "many"),
        ({"url": "http://judge:999999/v1"}, "url", "999999"),
        ({"url": "http://judge/v1?key=a"}, "url", "?key=a"),
        ({"url": 3}, "url", "3"),
        ({"model": None}, "model", "required"),
        ({"modle": "big"}, "modle", "'model'"),
        ({"kind": "rubrik"}, "kind", "'rubric'"),
        ({"prompt": "{question}"}, "prompt", "{completion}"),
        ({"prompt": "Rate: {{completion}}"}, "prompt", "{completion}"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": [{"role": "user", "content": "{question}"}]}, "prompt", "{completion}"),
        ({"prompt": [{"role": "judge", "content": "{completion}"}]}, "prompt[0].role", "'judge'"),
        ({"verdict": None}, "verdict", "none"),
        ({"verdict": {}}, "verdict", "none"),
        ({"verdict": "Score: .*"}, "verdict", "0 groups"),
        ({"verdict": "(a)(b)"}, "verdict", "2 groups"),
        ({"verdict": "(a"}, "verdict", "(a"),
        ({"verdict": {"yes": 1, "Yes": 0}}, "verdict", "'Yes'"),
        ({"verdict": {"yes": 1, " ": 0}}, "verdict", "' '"),
        ({"verdict": {"yes": 1, "no": "zero"}}, "verdict.no", "'zero'"),
        ({"kind": "classification"}, "verdict", "label"),
        ({"kind": "classification", "verdict": None, "label": -1}, "label", "-1"),
        ({"kind": "pairwise"}, "prompt", "{other}"),
        ({"kind": "pairwise", "prompt": "{other}"}, "prompt", "{completion}"),
        ({"kind": "pairwise", "prompt": "{other} {completion}", "verdict": None}, "verdict", "none"),
        ({"kind": "pairwise", "prompt": "{other} {completion}", "opponents": 0}, "opponents", "0"),
        ({"extra": {"n": 2}}, "extra.n", "n"),
        ({"extra": {"temperature": "hot"}}, "extra.temperature", "'hot'"),
        ({"extra": {"max_tokens": 64}}, "extra.max_tokens", "scorers.judge.max_tokens"),
        ({"kind": "classification", "verdict": None, "extra": {"temperature": 1}}, "extra.temperature", "temperature"),
        ({"timeout_s": 500}, "timeout_s", "120"),
        ({"deadline_s": 600}, "deadline_s", "600"),
        ({"concurrency": 0}, "concurrency", "0"),
        ({"requests_per_minute": 0}, "requests_per_minute", "0"),
        ({"failures": 0}, "failures", "0"),
    ],
)
def test_a_bad_scorer_is_refused_with_its_key(tmp_path: Path, keys: dict[str, Any], key: str, fact: str) -> None:
    with refused(ConfigError, "job.yaml", fact) as caught:
        built(tmp_path, **keys)
    assert caught.value.key == f"scorers.judge.{key}"


def test_a_password_in_the_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with refused(ConfigError, "api_key_env") as caught:
        built(tmp_path, url="http://me:secret@judge/v1")
    assert (caught.value.key, "secret" in str(caught.value)) == ("scorers.judge.url", False)


@pytest.mark.parametrize(
    ("reward", "key", "fact"),
    [
        ([{"weight": 1}, {"scorer": "judge"}], "tasks.reward[0]", "neither"),
        ([{"scorer": "judge", "function": "regex"}], "tasks.reward[0]", "both"),
        ([{"scorer": "jugde"}], "tasks.reward[0].scorer", "'judge'"),
        ([{"scorer": "other"}], "tasks.reward[0].scorer", "judge"),
        ([{"scorer": "judge", "weight": {"a": 1}}], "tasks.reward[0].weight", "mapping"),
        ([{"scorer": "judge", "options": {"a": 1}}], "tasks.reward[0].options", "a"),
        ([{"scorer": "judge"}, {"scorer": "judge"}], "tasks.reward[1].name", "judge"),
        ([{"scorer": "judge", "weight": 0}], "tasks.reward", "weight"),
        ([{"function": "regex"}], "scorers.judge", "scorer: judge"),
        ("regex", "scorers.judge", "scorer: judge"),
    ],
)
def test_rewards_and_scorers_that_do_not_fit_are_refused(tmp_path: Path, reward: Any, key: str, fact: str) -> None:
    with refused(ConfigError, "job.yaml", fact) as caught:
        built(tmp_path, reward=reward)
    assert caught.value.key == key


def test_a_group_of_one_has_nothing_to_compare(tmp_path: Path) -> None:
    job = document(tmp_path, kind="pairwise", prompt="{completion} {other}")
    job["rollout"]["group_size"] = 1
    with refused(ConfigError, "rollout.group_size") as caught:
        build_config(job, "job.yaml")
    assert caught.value.key == "scorers.judge.kind"


def test_a_scorer_is_named_by_a_word(tmp_path: Path) -> None:
    with refused(ConfigError, "'a.b'") as caught:
        built(tmp_path, name="a.b")
    assert caught.value.key == "scorers"


def test_yes_and_no_without_quotes_are_told_to_be_quoted(tmp_path: Path) -> None:
    text = yaml.safe_dump(document(tmp_path)).replace("'Score: (.*)'", "{yes: 1}").replace("Score: (.*)", "{yes: 1}")
    (tmp_path / "job.yaml").write_text(text)
    with refused(ConfigError, "True", "quotes"):
        load_config(tmp_path / "job.yaml")


def test_a_key_must_be_in_the_environment_where_nodes_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = built(tmp_path, api_key_env="SOME_JUDGES_KEY")
    for value in (None, ""):
        monkeypatch.delenv("SOME_JUDGES_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("SOME_JUDGES_KEY", value)
        for reader in ("all", "node"):
            (problem,) = problems(config, reader)
            assert (problem.key, "SOME_JUDGES_KEY" in problem.found) == ("scorers.judge.api_key_env", True)
        assert list(problems(config, "learner")) == []
    monkeypatch.setenv("SOME_JUDGES_KEY", "sk-secret")
    assert list(problems(config)) == []
    assert os.environ["SOME_JUDGES_KEY"] not in dump_yaml(config)


def test_a_run_continues_with_a_scorer_elsewhere_but_not_with_another_question(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "run"))
    run.prepare(built(tmp_path))
    run.prepare(built(tmp_path, url="http://other/v1", failures=3))
    with refused(OtherRun, "scorers.judge.prompt"):
        run.prepare(built(tmp_path, prompt="{completion}"))


# ---------------------------------------------------------------- teachers

TEACHER: dict[str, Any] = {"url": "http://teacher:8000/v1", "model": "big", "kind": "teacher"}


def distilled(folder: Path, told: dict[str, Any] | None, scorers: dict[str, Any], **sections: Any) -> Config:
    loss = {} if told is None else {"learner": {"loss": {"distillation": told}, **sections.pop("learner", {})}}
    return build_config({**document_of(folder, **loss, **sections), "scorers": scorers}, "job.yaml")


def test_a_teacher_is_a_scorer_that_the_loss_names(tmp_path: Path) -> None:
    told = {"teacher": "t", "objective": "forward_kl", "coefficient": 0.5, "alone": True}
    config = distilled(tmp_path, told, {"t": {**TEACHER, "serve": {"max_model_len": 600}}})
    assert list(problems(config)) == []
    assert config.learner.loss.distillation is not None and config.learner.loss.distillation.wanted == 20
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("told", "changes", "key", "fact"),
    [
        ({"teacher": "tutor"}, {}, "learner.loss.distillation.teacher", "scorers has t"),
        ({"teacher": "t"}, {"kind": "rubric", "prompt": "{completion}", "verdict": "(.)"}, "scorers.t", "none"),
        (None, {}, "scorers.t", "none"),
        ({"teacher": "t"}, {"prompt": "{completion}"}, "scorers.t.prompt", "teacher"),
        ({"teacher": "t"}, {"verdict": "(.)"}, "scorers.t.verdict", "teacher"),
        ({"teacher": "t"}, {"extra": {"prompt_logprobs": 1}}, "scorers.t.extra.prompt_logprobs", "prompt_logprobs"),
        ({"teacher": "t", "top_k": 5}, {}, "learner.loss.distillation.top_k", "reverse_kl"),
        ({"teacher": "t", "objective": "forwards"}, {}, "learner.loss.distillation.objective", "forward_kl"),
        ({"teacher": "t", "coefficient": 0}, {}, "learner.loss.distillation.coefficient", "0"),
        (
            {"teacher": "t", "objective": "forward_kl", "top_k": 21},
            {"serve": {"dtype": "float32"}},
            "learner.loss.distillation.top_k",
            "max_logprobs",
        ),
        (
            {"teacher": "t", "objective": "forward_kl"},
            {"serve": {"max_logprobs": 8}},
            "learner.loss.distillation.top_k",
            "8",
        ),
    ],
)
def test_a_teacher_that_cannot_work_is_refused_with_its_key(
    tmp_path: Path, told: dict[str, Any] | None, changes: dict[str, Any], key: str, fact: str
) -> None:
    with refused(ConfigError, "job.yaml", fact) as caught:
        distilled(tmp_path, told, {"t": {**TEACHER, **changes}})
    assert caught.value.key == key


@pytest.mark.parametrize("limit", [-1, 32])
def test_a_teacher_may_be_served_with_a_higher_limit(tmp_path: Path, limit: int) -> None:
    told = {"teacher": "t", "objective": "forward_kl", "top_k": 32}
    distilled(tmp_path, told, {"t": {**TEACHER, "serve": {"max_logprobs": limit}}})


def test_a_teacher_gives_no_rewards_and_a_judge_has_no_tokenizer(tmp_path: Path) -> None:
    tasks = {"environment": None, "reward": [{"scorer": "t"}]}
    with refused(ConfigError, "teacher") as caught:
        distilled(tmp_path, {"teacher": "t"}, {"t": TEACHER}, tasks=tasks)
    assert caught.value.key == "tasks.reward[0].scorer"
    with refused(ConfigError, "rubric") as caught:
        built(tmp_path, tokenizer="somewhere")
    assert caught.value.key == "scorers.judge.tokenizer"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"rollout": {"temperature": 0.9}}, "rollout.temperature"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p"),
        ({"learner": {"dynamic_sampling": True}}, "learner.dynamic_sampling"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size"),
    ],
)
def test_what_a_teacher_cannot_go_with_is_refused(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    config = distilled(tmp_path, {"teacher": "t"}, {"t": TEACHER}, **sections)
    assert [problem.key for problem in problems(config)] == [key]


def test_a_group_of_one_learns_from_its_teacher_alone(tmp_path: Path) -> None:
    told = {"teacher": "t", "alone": True}
    assert list(problems(distilled(tmp_path, told, {"t": TEACHER}, rollout={"group_size": 1}))) == []


def test_a_run_continues_with_a_teacher_elsewhere_but_not_with_another_one(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "run"))
    run.prepare(distilled(tmp_path, {"teacher": "t"}, {"t": TEACHER}))
    moved = TEACHER | {"url": "http://other/v1", "tokenizer": "elsewhere"}
    run.prepare(distilled(tmp_path, {"teacher": "t"}, {"t": moved}))
    for told, scorer in (({"teacher": "t", "coefficient": 2.0}, TEACHER), ({"teacher": "t"}, TEACHER | {"model": "b"})):
        with refused(OtherRun):
            run.prepare(distilled(tmp_path, told, {"t": scorer}))


def test_a_teachers_tokenizer_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scorers = {"t": TEACHER | {"tokenizer": "teacher"}}
    found = resolve_paths(distilled(tmp_path, {"teacher": "t"}, scorers)).scorers["t"]
    assert (found.tokenizer, found.model) == (str(tmp_path / "teacher"), TEACHER["model"])
