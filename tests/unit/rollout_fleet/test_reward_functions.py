"""Reward functions in place of an environment: prompts, sums, what they may return, and what is refused when."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common import json_lines
from common.config.schema import Config
from common.errors import ConfigError
from common.rollouts import Sample
from launch.resolve_target import load_job
from rollout_fleet import driver_factory
from rollout_fleet.driver_factory import build_driver, build_drivers, check_rows
from rollout_fleet.environments import reward_library
from rollout_fleet.environments.builtin.reward_function import messages_of
from rollout_fleet.environments.description import check_environment
from rollout_fleet.environments.isolation.fork_server import MOST_PROCESSES
from rollout_fleet.environments.protocol import Action, StopReason
from rollout_fleet.environments.reward_library import column_of, soft_overlong
from tests.rigs.configs import job_of, write_job
from tests.unit.rollout_fleet.chat_tokenizers import QWEN, qwen
from tests.unit.rollout_fleet.fleet_fakes import (
    CharacterTokenizer,
    ScriptedSampler,
    in_turn,
    new_host,
    play,
    prompts_of,
    say,
)

ROW = {"prompt": "1+1=", "answer": "2"}
IN_PROCESS = {"process": True, "memory_mib": 2048}
SOURCE = """
import asyncio, math, sys

loops = []

async def client(completion, row):
    loops.append(asyncio.get_running_loop())
    return float(loops[0] is loops[-1])

def length(completion, row): return len(completion)
def right(completion, row, *, bonus=1.0): return bonus * (completion == row["answer"])
async def later(completion, row): return right(completion, row)
def wrapped(completion, row): return later(completion, row)
def both(completion, row): return {"right": right(completion, row), "short": len(completion) < 3}
def starred(*arguments): return float(arguments[0] == arguments[1]["answer"])
def several(completion, row): return {"right": 1.0, "later": 1.0, "wrapped": 1.0}
def tokens(completion, row, *, action): return len(action.tokens) + 100 * action.ended
def spoils(completion, row): return float(row.pop("answer") == "2")
def changing(completion, row): return {"a": 1.0} if completion.startswith("The") else {"b": 1.0}
def unlucky(completion, row): return {"a": 1.0} if completion != "x" else {"b": 1.0}
def bad(completion, row, *, how): return eval(how)
def bad_then(completion, row, *, how): return 1.0 if completion != "x" else eval(how)
def exits(completion, row): sys.exit(3)
def one(completion): return 1.0
def of_trl(completion, answer): return float(completion == answer)
def lists_of_trl(completions, answer, **kwargs): return [1.0 for _ in completions]
def all_of_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def of_verl(solution_str, ground_truth): return float(solution_str == ground_truth)
class Scorer:
    def __init__(self, completion, row): ...
class Called:
    def __call__(self, completion, row): return 0.25
called = Called()
NUMBER = 3
"""
BAD = {  # a return value or an error, and words of the reason
    "None": "None",
    "'1.0'": "'1.0'",
    "math.nan": "nan",
    "math.inf": "inf",
    "10**400": "1000",
    "[1.0]": "[1.0]",
    "{}": "{}",
    "{1: 1.0}": "{1: 1.0}",
    "{'a': None}": "None",
    "{'a': later(completion, row)}": "coroutine",
    "row['anwser']": "KeyError",
    "1/0": "ZeroDivisionError",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of rewards; a job's tokenizer has one token per character."""
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: CharacterTokenizer())
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def job(folder: Path, reward: Any, rows: list[dict[str, Any]] | None = None, **tasks: Any) -> Config:
    config = job_of(folder, tasks={"environment": None, "reward": reward, **tasks}, rollout={"max_tokens": 20})
    Path(config.tasks.dataset).write_text("".join(json.dumps(row) + "\n" for row in rows or [ROW]))
    return config


def samples(config: Config, *answers: Any, row: dict[str, Any] = ROW) -> tuple[list[Sample], ScriptedSampler]:
    """One episode per answer with the config's rewards, on the environments' thread or in processes."""
    sampler = ScriptedSampler(in_turn(*(say(a) if isinstance(a, str) else a for a in answers)))
    driver = build_driver(config, sampler, new_host())

    async def all_of_them() -> list[Sample]:
        try:
            return [await driver.run(row, seed=0) for _ in answers]
        finally:
            await driver.close()

    return asyncio.run(all_of_them()), sampler


def refused(config: Config) -> ConfigError:
    """The error before a launch, of the checks that `up` makes."""
    with pytest.raises(ConfigError) as caught:
        check_rows(config, check_environment(config.tasks, "job.yaml"), "job.yaml")
    assert caught.value.file == "job.yaml"
    return caught.value


# ---------------------------------------------------------------- the sum and its parts


@pytest.mark.parametrize(
    ("reward", "options", "expected", "metrics"),
    [
        ("my_rewards:right", {}, 1.0, {"right": 1.0}),
        ("my_rewards:right", {"bonus": 3.0}, 3.0, {"right": 3.0}),
        ("my_rewards:later", {}, 1.0, {"later": 1.0}),
        ("my_rewards:starred", {}, 1.0, {"starred": 1.0}),
        ("my_rewards:wrapped", {}, 1.0, {"wrapped": 1.0}),
        ("my_rewards:both", {}, 2.0, {"right": 1.0, "short": 1.0}),
        ("my_rewards:called", {}, 0.25, {"called": 0.25}),
        ("my_rewards:tokens", {}, 102.0, {"tokens": 102.0}),
        ("exact_match", {}, 1.0, {"exact_match": 1.0}),
    ],
)
def test_a_reward_by_name_gets_completion_row_and_options(
    folder: Path, reward: str, options: dict[str, Any], expected: float, metrics: dict[str, float]
) -> None:
    config = job(folder, reward, options=options)
    check_rows(config, check_environment(config.tasks), "job.yaml")
    (sample,), _ = samples(config, "2")
    assert (sample.error, sample.reward, sample.metrics) == (None, expected, metrics)


def test_an_answer_that_is_right_in_every_respect_gets_the_sum_of_the_weights(folder: Path) -> None:
    weights = {"right": 0.7, "later": 0.2, "wrapped": 0.1}
    parts = [{"function": f"my_rewards:{name}", "weight": weight} for name, weight in weights.items()]
    (sample,), _ = samples(job(folder, parts), "2")
    assert sample.reward == 1.0
    apart = {"function": "my_rewards:several", "weight": weights}
    (sample,), _ = samples(job(folder, [apart]), "2")
    assert sample.reward == 1.0
    huge = {"function": "my_rewards:bad", "options": {"how": "1e308"}}
    (sample,), _ = samples(job(folder, [huge, huge | {"name": "again"}]), "2")
    assert "not finite" in str(sample.error)


def test_a_node_goes_on_with_the_clients_that_its_launch_check_opened(folder: Path) -> None:
    config = job(folder, "my_rewards:client")
    for _ in range(2):
        check_rows(config, check_environment(config.tasks), "job.yaml")
    found, _ = samples(config, "2", "3")
    assert [(sample.error, sample.reward) for sample in found] == [(None, 1.0), (None, 1.0)]


@pytest.mark.parametrize("process", [False, True])
def test_several_rewards_are_weighed_and_named_also_in_processes(folder: Path, process: bool) -> None:
    rewards = [
        {"function": "my_rewards:right", "weight": 2.0, "options": {"bonus": 3}},
        {"function": "my_rewards:length", "weight": 0, "name": "characters"},
        {"function": "my_rewards:both", "weight": {"right": -1.0, "short": 0.5}, "name": "shape"},
    ]
    config = job(folder, rewards, limits=IN_PROCESS if process else {})
    check_rows(config, check_environment(config.tasks), "job.yaml")
    (good, poor), _ = samples(config, "2", "three")
    assert good.metrics == {"right": 3.0, "characters": 1.0, "shape/right": 1.0, "shape/short": 1.0}
    assert good.reward == 2.0 * 3.0 - 1.0 + 0.5
    assert poor.metrics == {"right": 0.0, "characters": 5.0, "shape/right": 0.0, "shape/short": 0.0}
    assert (poor.reward, poor.error) == (0.0, None)


def test_a_function_that_changes_its_row_changes_it_for_no_other(folder: Path) -> None:
    found, _ = samples(job(folder, "my_rewards:spoils"), "2", "2", row=dict(ROW))
    assert [sample.reward for sample in found] == [1.0, 1.0]


# ---------------------------------------------------------------- prompts

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("prompt", "row", "messages"),
    [
        (None, {"prompt": "1+1="}, [("user", "1+1=")]),
        (None, {"prompt": CHAT}, [("system", "Add."), ("user", "1+1=")]),
        ("{messages}", {"messages": CHAT}, [("system", "Add."), ("user", "1+1=")]),
        (
            None,
            {"prompt": [{"role": "user", "content": "1+1=", "name": None, "tool_calls": [], "timestamp": 3}]},
            [("user", "1+1=")],
        ),
        ("{q}?", {"q": 3}, [("user", "3?")]),
        ('{q} in \\boxed{} {{q}} {"a": 1} {0}', {"q": "x"}, [("user", 'x in \\boxed{} {q} {"a": 1} {0}')]),
        ("{extra.q} {my column}", {"extra": {"q": "a"}, "my column": "b"}, [("user", "a b")]),
        ("{q}", {"q": "{answer}", "answer": "2"}, [("user", "{answer}")]),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{q}"}],
            {"q": "1"},
            [("system", "Be brief."), ("user", "1")],
        ),
    ],
)
def test_a_prompt_is_a_template_messages_or_a_column_of_messages(
    prompt: Any, row: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    assert list(messages_of(prompt, row)) == messages


def test_the_chat_template_renders_the_prompt_with_its_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: qwen())
    _, sampler = samples(job(folder, "exact_match", prompt="What is {prompt}?"), "2")
    _, thinking = samples(job(folder, "exact_match", chat_template_kwargs={"enable_thinking": False}), "2")
    chat, unthinking = (qwen().decode(each.calls[0].prompt) for each in (sampler, thinking))
    assert "user\nWhat is 1+1=?" in chat and "assistant" in chat and "<think>" not in chat
    assert unthinking.endswith("<think></think>")


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DEFAULTS = {"default": QWEN, "tool_use": "{%- if\nmore_thinking %}{% endif %}"}


@pytest.mark.parametrize(
    ("template", "tasks", "key", "said"),
    [
        (NO_SYSTEM, {"prompt": [{"role": "system", "content": "{prompt}"}]}, "tasks.prompt", "System role not"),
        ("{{ messages", {}, "tasks.prompt", "train.jsonl line 1"),
        (QWEN, {"chat_template_kwargs": {"enable_thinkng": False}}, "tasks.chat_template_kwargs", "'enable_thinking'?"),
        (QWEN, {"chat_template_kwargs": {"bos": False}}, "tasks.chat_template_kwargs", "'bos'"),
        (
            DEFAULTS,
            {"chat_template_kwargs": {"enable_thinkng": False}},
            "tasks.chat_template_kwargs",
            "'enable_thinking'?",
        ),
    ],
)
def test_a_chat_template_that_does_not_fit_is_refused_before_an_engine_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: Any, tasks: dict[str, Any], key: str, said: str
) -> None:
    tokenizer = qwen()
    tokenizer.chat_template = template
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: tokenizer)
    with pytest.raises(ConfigError) as caught:
        build_driver(job(folder, "exact_match", **tasks), ScriptedSampler(say), new_host())
    assert caught.value.key == key and said in str(caught.value)


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (QWEN + "{% generation %}{% endgeneration %}", {"enable_thinking": False}),
        (DEFAULTS, {"enable_thinking": False, "more_thinking": 1}),
        (DEFAULTS, {"chat_template": "tool_use", "enable_thinking": False}),
        (None, {"enable_thinking": False}),
    ],
)
def test_variables_of_any_template_of_the_tokenizer_are_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: Any, options: dict[str, Any]
) -> None:
    tokenizer = qwen()
    tokenizer.chat_template = template
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: tokenizer)
    build_driver(job(folder, "exact_match", chat_template_kwargs=options), ScriptedSampler(say), new_host())


@pytest.mark.parametrize(
    ("prompt", "row"),
    [
        ("{questoin}", {"question": "?", "answer": "2"}),
        ("{question.text}", {"question": {"txt": "?"}, "answer": "2"}),
        ("{question}", {"question": None, "answer": "2"}),
        (None, {"question": "?", "answer": "2"}),
        (None, {"prompt": [{"role": "user"}], "answer": "2"}),
        (None, {"prompt": [{"role": "boss", "content": "?"}], "answer": "2"}),
        (None, {"prompt": ["?"], "answer": "2"}),
        ([{"role": "user", "content": "{questoin}"}], {"question": "?", "answer": "2"}),
        (None, {"prompt": [], "answer": "2"}),
        ("{messages}", {"messages": [*CHAT, {"role": "assistant", "content": "2"}], "answer": "2"}),
    ],
)
def test_a_prompt_that_does_not_fit_the_dataset_is_refused_with_the_row(
    folder: Path, prompt: Any, row: dict[str, Any]
) -> None:
    error = refused(job(folder, "exact_match", rows=[row], prompt=prompt))
    assert error.key == "tasks.prompt"
    assert "train.jsonl line 1" in error.found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tool_calls", [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]),
        ("function_call", {"name": "add", "arguments": "{}"}),
        ("tool_call_id", "call_1"),
        ("name", "add"),
    ],
)
def test_a_message_with_a_key_that_the_policy_would_not_read_is_refused(folder: Path, key: str, value: Any) -> None:
    said = {"role": "assistant", "content": "", key: value}
    rows = [{"prompt": CHAT, "answer": "2"}, {"prompt": [CHAT[1], said, CHAT[1]], "answer": "2"}]
    error = refused(job(folder, "exact_match", rows=rows))
    assert error.key == "tasks.prompt"
    assert "train.jsonl line 2" in error.found and repr(key) in error.found


@pytest.mark.parametrize(
    ("prompt", "hint"),
    [
        ("Think step by step.\n{}", "the row has {question}, {answer}"),
        ("Think step by step.", "the row has {question}, {answer}"),
        ("{{question}}", "did you mean '{question}'?"),
        ("Q: { question }", "did you mean '{question}'?"),
        ("{question:>5}", "did you mean '{question}'?"),
        ("{question!r} in \\boxed{}", "did you mean '{question}'?"),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{Question}}"}],
            "did you mean '{question}'?",
        ),
    ],
)
def test_a_prompt_that_would_be_the_same_for_every_row_is_refused(folder: Path, prompt: Any, hint: str) -> None:
    error = refused(job(folder, "exact_match", rows=[{"question": "?", "answer": "2"}], prompt=prompt))
    assert error.key == "tasks.prompt"
    assert "train.jsonl line 1" in error.found and hint in error.found


def test_every_row_must_have_the_prompt_s_columns_not_only_the_first(folder: Path) -> None:
    rows = [{"question": "?", "answer": "2"}, {"qustion": "?", "answer": "2"}]
    error = refused(job(folder, "exact_match", rows=rows, prompt="{question}"))
    assert error.key == "tasks.prompt"
    assert "train.jsonl line 2" in error.found


def test_each_of_the_first_rows_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    check = json_lines._check_object
    monkeypatch.setattr(json_lines, "_check_object", lambda text, where: (read.append(where), check(text, where)))
    config = job(folder, "exact_match", rows=[ROW] * (json_lines.FIRST_ROWS + 5))
    check_rows(config, check_environment(config.tasks), "job.yaml")
    file = config.tasks.dataset
    assert read == [f"tasks.dataset: {file} line {n}" for n in range(1, json_lines.FIRST_ROWS + 1)]


def test_a_missing_column_is_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'question'"):
        column_of({"answer": "2", "question": "?"}, "questoin")
    assert column_of({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


# ---------------------------------------------------------------- refused before a launch


@pytest.mark.parametrize(
    ("reward", "key", "hint"),
    [
        ("exact_mach", "tasks.reward", "exact_match"),
        ("my_rewards:rihgt", "tasks.reward", "right"),
        ("no_such_module:right", "tasks.reward", "no_such_module.py"),
        ("my_rewards:NUMBER", "tasks.reward", ""),
        ("my_rewards:Scorer", "tasks.reward", "tasks.environment"),
        ("my_rewards:one", "tasks.reward", "docs/migrate.md"),
        ("my_rewards:lists_of_trl", "tasks.reward", "docs/migrate.md"),
        ("my_rewards:all_of_verl", "tasks.reward", "docs/migrate.md"),
        ("regex", "tasks.options", "pattern"),
        ("my_rewards:changing", "tasks.reward", ""),
        ([{"function": "exact_match"}, {"function": "regx"}], "tasks.reward[1].function", "regex"),
        ([{"function": "my_rewards:right", "options": {"bonsu": 1}}], "tasks.reward[0].options", "bonus"),
        ([{"function": "exact_match"}, {"function": "exact_match", "weight": 2}], "tasks.reward", ""),
        ([{"function": "my_rewards:both", "weight": {"right": 1}}], "tasks.reward", ""),
        ([{"function": "my_rewards:right", "weight": {"right": 1}}], "tasks.reward", ""),
        ([{"function": "regex", "options": {"pattern": "("}}], "tasks.reward", ""),
        ([{"function": "exact_match", "options": {"column": "anwser"}}], "tasks.reward", ""),
        ([{"function": "length_penalty", "options": {"max_tokens": 8, "buffer_tokens": 0}}], "tasks.reward", ""),
        ([{"function": "length_penalty", "options": {"max_tokens": 8, "buffer_tokens": -4}}], "tasks.reward", ""),
        ([{"function": "length_penalty", "options": {"max_tokens": 8, "buffer_tokens": 9}}], "tasks.reward", ""),
        ([{"function": "regex", "options": {"pattern": "#+", "column": "anwser"}}], "tasks.reward", ""),
        ([{"function": "my_rewards:right", "name": "x" * 64 + each} for each in "ab"], "tasks.reward", ""),
        ("my_rewards:of_trl", "tasks.reward", ""),
        ([{"function": "json_schema", "options": {"schema": '{"type": "objet"}'}}], "tasks.reward", ""),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_a_launch(
    folder: Path, reward: Any, key: str, hint: str
) -> None:
    error = refused(job(folder, reward))
    assert error.key == key
    assert hint in (error.hint or "")


def test_a_function_that_takes_a_value_of_verl_s_rows_is_refused(folder: Path) -> None:
    row = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    assert refused(job(folder, "my_rewards:of_verl", rows=[row])).key == "tasks.reward"


def test_a_reward_named_like_the_penalty_is_refused_with_it_and_fails_its_sample(folder: Path) -> None:
    reward = [{"function": "my_rewards:right", "name": "overlong_penalty"}]
    config = job(folder, reward, truncated="penalized")
    assert refused(config).key == "tasks.reward"
    (sample,), _ = samples(config, "2")
    assert sample.stop_reason == StopReason.ENVIRONMENT_ERROR
    (sample,), _ = samples(job(folder, reward), "2")
    assert (sample.error, sample.metrics) == (None, {"overlong_penalty": 1.0})


@pytest.mark.parametrize("how", BAD)
def test_what_is_no_reward_is_refused_before_a_launch_with_the_row(folder: Path, how: str) -> None:
    error = refused(job(folder, "my_rewards:bad", options={"how": how}))
    assert error.key == "tasks.reward"
    assert "train.jsonl line 1" in error.found and BAD[how] in error.found


def test_a_function_that_ends_the_process_is_refused(folder: Path) -> None:
    assert refused(job(folder, "my_rewards:exits")).key == "tasks.reward"


def test_without_the_dataset_nothing_is_tried_and_names_are_still_checked(folder: Path) -> None:
    config = job(folder, "my_rewards:bad", options={"how": "None"})
    Path(config.tasks.dataset).unlink()
    check_rows(config, check_environment(config.tasks), "job.yaml")


def test_a_library_that_a_function_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_library.json_schema, "NEEDS", ("no_such_library",))
    assert refused(job(folder, "json_schema", options={"schema": "{}"})).key == "tasks.reward"
    check_environment(job(folder, "json_schema").tasks, libraries=False)


def launched(folder: Path, tasks: dict[str, Any], *words: str) -> None:
    """The checks that `up` makes of a job."""
    file = write_job(folder, tasks={"environment": None, **tasks}, rollout={"max_tokens": 20})
    (folder / "train.jsonl").write_text(json.dumps({**ROW, "question": "1+1"}) + "\n")
    load_job(str(file), words, environment=True)


BOTH = {"reward": "my_rewards:both"}
MIXED = {"dataset": "", "sources": {"sums": {**BOTH, "dataset": "train.jsonl"}}}
GDPO = "learner.loss.advantage=gdpo"


@pytest.mark.parametrize(
    ("tasks", "words", "key"),
    [
        (BOTH, ["watch=[{metric: environment/rihgt, below: 0.1}]"], "watch[0].metric"),
        (MIXED, ["watch=[{metric: loss, above: 9}, {metric: environment/sums/rihgt, below: 0.1}]"], "watch[1].metric"),
        (BOTH, [GDPO, "learner.loss.advantage_options={rihgt: 1}"], "learner.loss.advantage_options"),
    ],
)
def test_a_name_that_no_reward_has_is_refused_before_a_launch(
    folder: Path, tasks: dict[str, Any], words: list[str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        launched(folder, tasks, *words)
    assert caught.value.key == key
    assert "'right'" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (BOTH, ["watch=[{metric: environment/right, below: 0.1}]", GDPO, "learner.loss.advantage_options={short: 1}"]),
        (BOTH, ["watch=[{metric: environment/overlong_penalty, below: -1}]", "tasks.truncated=penalized"]),
        (MIXED, ["watch=[{metric: environment/sums/short, below: 0.1}]"]),
        ({"environment": "addition"}, ["watch=[{metric: environment/anything, below: 0.1}]"]),
    ],
)
def test_names_of_rewards_and_any_of_an_environment_pass_a_launch(
    folder: Path, tasks: dict[str, Any], words: list[str]
) -> None:
    launched(folder, tasks, *words)


def test_sources_share_the_tokenizer_of_their_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[str]()
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: loaded.append(path) or CharacterTokenizer())
    (folder / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    source = {**BOTH, "dataset": str(folder / "train.jsonl")}
    config = job_of(folder, tasks={"environment": None, "dataset": "", "sources": {"a": source, "b": source}})
    drivers = build_drivers(config, ScriptedSampler(say), new_host())
    assert list(drivers) == ["a", "b"] and loaded == [config.model.path]


# ---------------------------------------------------------------- failed samples


@pytest.mark.parametrize("how", BAD)
def test_what_is_no_reward_fails_its_sample_alone_with_the_reason(folder: Path, how: str) -> None:
    (good, bad, last), _ = samples(job(folder, "my_rewards:bad_then", options={"how": how}), "2", "x", "2")
    assert (good.error, good.reward, last.error) == (None, 1.0, None)
    assert bad.stop_reason == StopReason.ENVIRONMENT_ERROR
    assert BAD[how] in (bad.error or "") and "bad_then" in (bad.error or "")


@pytest.mark.parametrize("process", [False, True])
def test_names_that_change_fail_the_sample_that_differs(folder: Path, process: bool) -> None:
    config = job(folder, "my_rewards:unlucky", limits=IN_PROCESS if process else {})
    found, _ = samples(config, "2", "x", "2")
    assert [sample.stop_reason for sample in found] == ["stop", "environment_error", "stop"]


def test_a_row_without_the_prompt_s_column_fails_its_samples_only(folder: Path) -> None:
    config = job(folder, "exact_match", prompt="{question}")
    (sample,), _ = samples(config, "2", row={"qustion": "?", "answer": "2"})
    assert sample.stop_reason == StopReason.ENVIRONMENT_ERROR


# ---------------------------------------------------------------- cut answers


def dapo(length: int, most: int, buffer: int) -> float:
    """Equation 13 of arXiv 2503.14476, case by case."""
    if length <= most - buffer:
        return 0.0
    return ((most - buffer) - length) / buffer if length <= most else -1.0


@pytest.mark.parametrize(("most", "buffer"), [(20, 5), (20, 20), (7, 1), (20480, 4096)])
def test_the_soft_penalty_is_dapo_s(most: int, buffer: int) -> None:
    lengths = {*range(0, 30), most - buffer, most - 1, most, most + 1, most - buffer // 2}
    assert all(soft_overlong(n, most, buffer) == pytest.approx(dapo(n, most, buffer)) for n in lengths)


@pytest.mark.parametrize(
    ("truncated", "buffer", "answer", "penalty"),
    [
        ("counted", None, say("x" * 18), None),
        ("masked", None, say("x" * 20, ended=False), None),
        ("penalized", None, say("x" * 15), 0.0),  # with the end token 16 of 20 tokens; the buffer is a fifth
        ("penalized", None, say("x" * 17), -0.5),
        ("penalized", 10, say("x" * 14), -0.5),
        ("penalized", 10, say("x" * 20, ended=False), -1.0),
        ("penalized", 10, say("x" * 3, ended=False), -1.0),  # the context cut it
    ],
)
@pytest.mark.parametrize("environment", ["reward", "number_guessing"])
def test_a_penalty_is_added_to_the_reward_of_long_and_cut_answers_of_every_environment(
    folder: Path, environment: str, truncated: str, buffer: int | None, answer: Any, penalty: float | None
) -> None:
    kind = {"reward": "my_rewards:right"} if environment == "reward" else {"environment": environment, "reward": None}
    row = {**ROW, "number": 3}
    config = job(folder, **{"reward": None, "truncated": truncated, "overlong_buffer_tokens": buffer, **kind})
    (sample,), _ = samples(config, answer, row=row)
    assert sample.error is None
    assert sample.metrics.get("overlong_penalty") == (None if penalty is None else pytest.approx(penalty))
    assert sample.reward == pytest.approx(penalty or 0.0)
    assert sum(sample.turn_rewards) == sample.reward


def test_an_evaluation_is_not_penalised(folder: Path) -> None:
    config = job(folder, "my_rewards:right", truncated="penalized")
    driver = build_driver(config, ScriptedSampler(lambda _: say("x" * 20, ended=False)), new_host())
    assert play(driver.at(0.0), ROW).metrics == {"right": 0.0}


# ---------------------------------------------------------------- built in


def judged(function: Callable[..., Any], completion: str, row: dict[str, Any], **options: Any) -> float:
    found = function(completion, row, **options)

    async def value(awaited: Coroutine[Any, Any, float]) -> float:
        return await awaited

    return asyncio.run(value(found)) if asyncio.iscoroutine(found) else found


GSM8K = {"answer": "1 + 1 = 2\n#### 2"}
PERSON = '{"type": "object", "required": ["name"], "properties": {"age": {"type": "integer"}}}'
ADD = ["assert add(1, 1) == 2", "assert add(2, 2) == 4", "assert add(1, 2) == 4"]


@pytest.mark.parametrize(
    ("name", "completion", "row", "options", "reward"),
    [
        ("exact_match", " 2\n", {"answer": "2"}, {}, 1.0),
        ("exact_match", "2.0", {"answer": 2.0}, {}, 1.0),
        ("exact_match", "It is 2", {"answer": "2"}, {}, 0.0),
        ("exact_match", "so #### 2", GSM8K, {"after": "####"}, 1.0),
        ("exact_match", "#### 2 or #### 3", GSM8K, {"after": "####"}, 0.0),
        ("exact_match", "yes", {"reward_model": {"ground_truth": "yes"}}, {"column": "reward_model.ground_truth"}, 1.0),
        ("regex", "<think>a\nb</think> 2", {}, {"pattern": r"(?s)^<think>.*</think>"}, 1.0),
        ("regex", "2", {}, {"pattern": "^<think>"}, 0.0),
        ("regex", "A: 1. A: 2.", {"answer": "2"}, {"pattern": r"A: (\d)", "column": "answer"}, 1.0),
        ("regex", "A: 2. A: 1.", {"answer": "2"}, {"pattern": r"A: (\d)", "column": "answer"}, 0.0),
        ("regex", "1 then 2", {"answer": 2}, {"pattern": r"\d", "column": "answer"}, 1.0),
        ("json_schema", '{"name": "a", "age": 3}', {}, {"schema": PERSON}, 1.0),
        ("json_schema", 'Here:\n```json\n{"name": "a"}\n```\nDone.', {}, {"schema": PERSON}, 1.0),
        ("json_schema", '{"name": "a", "age": "3"}', {}, {"schema": PERSON}, 0.0),
        ("json_schema", '{"name": "a"', {}, {"schema": PERSON}, 0.0),
        ("json_schema", "[" * 100_000, {}, {"schema": PERSON}, 0.0),
        ("json_schema", "NaN", {}, {"schema": '{"minimum": 1}'}, 0.0),
        ("json_schema", "1e999", {}, {"schema": '{"multipleOf": 0.5}'}, 0.0),
        ("json_schema", "1" + "0" * 400, {}, {"schema": '{"multipleOf": 0.5}'}, 0.0),
        ("json_schema", "[" * 300 + "]" * 300, {}, {"schema": '{"type": "array", "items": {"$ref": "#"}}'}, 0.0),
        ("json_schema", "[1]", {"schema": {"type": "array"}}, {}, 1.0),
        ("json_schema", "{}", {"rules": '{"type": "array"}'}, {"column": "rules"}, 0.0),
        ("math_verify", "so \\boxed{\\frac{1}{2}}", {"answer": "0.5"}, {}, 1.0),
        ("math_verify", "the answer is 2", GSM8K, {}, 1.0),
        ("math_verify", "the answer is 3", GSM8K, {}, 0.0),
        ("code", "```python\ndef add(a, b):\n    return a + b\n```", {"tests": ADD}, {}, 2 / 3),
        ("code", "def add(a, b): return a + b", {"tests": ADD[0]}, {}, 1.0),
        ("code", "def add(a, b): return a - b", {"tests": ADD}, {}, 0.0),
        ("code", "def add(a, b) return", {"tests": ADD}, {}, 0.0),
        ("code", "import sys; sys.exit(0)", {"tests": ["pass"]}, {}, 0.0),
        ("code", "import os; os._exit(0)", {"tests": ["pass"]}, {}, 0.0),
        ("code", "while True: pass", {"tests": ["pass"]}, {"seconds": 1.0}, 0.0),
        ("code", "print('x' * 10**7)\ndef add(a, b): return a + b", {"tests": ADD[0]}, {}, 1.0),
        ("code", "x = ' ' * 10**9", {"tests": ["pass"]}, {}, 0.0),
        ("code", "import asyncio; asyncio.run(asyncio.sleep(0))", {"tests": ["pass"]}, {}, 1.0),
        ("code", "import os; os.fork()", {"tests": ["pass"]}, {}, 1.0),
        ("code", "def add(a, b): return a + b", {"tests": [ADD[0], "assert add(", ADD[1]]}, {}, 2 / 3),
    ],
)
def test_a_built_in_judges(
    name: str, completion: str, row: dict[str, Any], options: dict[str, Any], reward: float
) -> None:
    found = judged(getattr(reward_library, name), completion, row, **options)
    assert found == pytest.approx(reward)


EVERYWHERE = """
import os, socket
for fd in range(1, 64):
    try:
        {}
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "program",
    [
        *(
            EVERYWHERE.format(f"os.write(fd, len({frame!r}).to_bytes(4, 'little') + {frame!r})")
            for frame in (b'{"answer": 1e9}', b'{"answer": 1}', b'{"error": "x"}', b'{"died": "x"}', b"{}", b"{")
        ),
        EVERYWHERE.format("os.write(fd, b'x' * 10**6)"),
        EVERYWHERE.format("socket.socket(fileno=fd).shutdown(2)"),
        "import builtins; builtins.compile = lambda *_: ''",
        "import builtins; builtins.exec = builtins.sum = lambda *_: 1",
        "import builtins; builtins.BaseException = KeyError",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.fork() and os._exit(0)",
    ],
)
def test_a_program_gets_no_reward_and_no_error_in_the_place_of_its_tests(program: str) -> None:
    assert judged(reward_library.code, program, {"tests": ["assert False"]}) == 0.0


def test_an_answer_whose_comparison_is_ended_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_library, "MATH_S", 1e-3)
    with ThreadPoolExecutor(1) as thread:  # the main thread compares by itself
        assert thread.submit(judged, reward_library.math_verify, "2", {"answer": "2"}).result() == 0.0


def test_length_penalty_counts_sampled_tokens() -> None:
    action = Action("abc", tokens=(1,) * 15, ended=True)
    found = reward_library.length_penalty("abc", {}, action=action, max_tokens=20, buffer_tokens=10)
    assert found == dapo(15, 20, 10)


@pytest.mark.parametrize(("name", "row"), [("code", {"tests": []}), ("code", {"tests": 3}), ("exact_match", {})])
def test_a_reference_that_a_built_in_cannot_use_raises(name: str, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        judged(getattr(reward_library, name), "2", row)


@pytest.mark.parametrize("process", [False, True])
def test_expressions_are_compared_and_code_runs_on_the_thread_and_within_an_episode_s_process(
    folder: Path, process: bool
) -> None:
    rewards = [{"function": "math_verify"}, {"function": "code"}]
    row = {"prompt": "?", "answer": "\\frac{1}{2}", "tests": "assert True"}
    config = job(folder, rewards, [row], limits=IN_PROCESS if process else {})
    ended = threading.Event()
    others = [threading.Thread(target=ended.wait) for _ in range(2 * MOST_PROCESSES)]
    for thread in others:  # the user has more processes than an episode may have
        thread.start()
    try:
        check_rows(config, check_environment(config.tasks), "job.yaml")
        (sample,), _ = samples(config, "0.5", row=row)
    finally:
        ended.set()
    assert (sample.error, sample.metrics) == (None, {"math_verify": 1.0, "code": 1.0})


def test_a_prompt_reaches_a_model_without_a_chat_template_as_it_is(folder: Path) -> None:
    _, sampler = samples(job(folder, "exact_match", prompt="{prompt} "), "2")
    assert prompts_of(sampler) == ["1+1= "]
