"""Tools of an MCP server that a command starts: schemas to the template, calls to it, faults to the sample."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.rollouts import Sample
from rollout_fleet.environments.builtin.mcp_tools import McpTools
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.protocol import Budget
from tests.rigs.waiting import LIMIT_S, until
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import make_driver
from tests.unit.rollout_fleet.fleet_fakes import play as episode

SERVER = Path(__file__).with_name("mcp_server.py")
PATH = f"{McpTools.__module__}:McpTools"
ROW = {"question": "1 + 2?", "answer": "1003"}


def play(said: list[str], server: str, **options: Any) -> tuple[Sample, list[str]]:
    """The sample, and the prompts as text."""
    tokenizer = qwen()
    sampler = speaker(tokenizer, *said)
    limits = replace(McpTools.LIMITS, reset_s=LIMIT_S, step_s=LIMIT_S, cpu_s=600)
    given = {"command": f"{sys.executable} {SERVER} {server}", "call_s": LIMIT_S, "start_s": LIMIT_S, **options}
    with contextlib.closing(ProcessHost((McpTools.__module__, "mcp"))) as processes:
        backend = ProcessBackend(PATH, given, limits, LIMIT_S, processes, False)
        driver = make_driver(sampler, backend, tokenizer=tokenizer, budget=Budget(8, 1000, 50_000), limits=limits)
        sample = episode(driver, ROW)
    return sample, [tokenizer.decode(call.prompt) for call in sampler.calls]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ADD = call("add", '{"a": 1, "b": 2}')


def test_the_policy_sees_the_server_s_tools_calls_them_and_is_judged_by_a_reward() -> None:
    wrong = call("divide", '{"a": 1, "b": 0}')
    unfit = call("add", '{"a": "x", "b": 2}')
    said = [ADD, wrong, unfit, "1003"]
    sample, prompts = play(said, "", reward="exact_match")
    assert (sample.error, sample.reward, sample.turns) == (None, 1.0, 4)
    assert "Adds two numbers, far away." in prompts[0] and '"required": ["a", "b"]' in prompts[0]
    assert "\n1003\n" in prompts[1][len(prompts[0]) :]
    assert "error: ToolFailed" in prompts[2][len(prompts[1]) :] and "error: ToolFailed" in prompts[3][len(prompts[2]) :]
    assert (sample.metrics["tool_calls"], sample.metrics["tool_errors"]) == (3.0, 2.0)


def test_half_a_character_is_the_policy_s_mistake_and_not_the_end_of_the_server() -> None:
    halves = [call("add", '{"a": "\\ud800", "b": 2}'), call("\\ud800", "{}")]
    sample, prompts = play([*halves, ADD, "1003"], "")
    assert (sample.error, sample.reward, sample.metrics["tool_errors"]) == (None, 1.0, 2.0)
    assert "error: UnicodeEncodeError" in prompts[1] and "\n1003\n" in prompts[3]


def test_arguments_that_are_nested_too_deeply_are_the_policy_s_mistake() -> None:
    deep = call("add", f'{{"a": {"[" * 200}{"]" * 200}, "b": 2}}')
    sample, prompts = play([deep, ADD, "1003"], "")
    assert (sample.error, sample.reward, sample.metrics["tool_errors"]) == (None, 1.0, 1.0)
    assert "error: ValueError" in prompts[1] and "\n1003\n" in prompts[2]


def test_tools_of_all_pages_of_the_server_s_list_are_offered() -> None:
    sample, prompts = play([ADD, "1003"], "pages")
    assert '"name": "divide"' in prompts[0] and '"name": "add"' in prompts[0]
    assert (sample.error, sample.metrics["tool_errors"]) == (None, 0.0) and "add was called" in prompts[1]


def test_long_answers_are_cut_and_lines_that_are_no_protocol_are_passed_over() -> None:
    _, prompts = play([ADD, "1003"], "long")
    assert "more characters" in prompts[1] and len(prompts[1]) < 10_000
    sample, _ = play([ADD, "1003"], "babble")
    assert (sample.error, sample.reward) == (None, 1.0)


@pytest.mark.parametrize("fault", ["absent", "lie", "die", "hang", "flood"])
def test_a_server_that_fails_fails_the_sample_and_is_gone(tmp_path: Path, fault: str) -> None:
    options = {"call_s": 5.0} if fault in ("hang", "flood") else {}
    sample, _ = play([ADD, "1003"], f"{fault} {tmp_path}", **options)
    assert sample.stop_reason == "environment_error" and "ToolServerFailed" in str(sample.error)
    until(lambda: not any(str(tmp_path) in command for command in commands()))


def commands() -> Iterator[str]:
    """The command lines of all processes, those in namespaces too."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            yield (folder / "cmdline").read_text(errors="replace") if folder.name.isdigit() else ""


def test_a_command_that_does_not_exist_fails_the_sample() -> None:
    sample, _ = play([ADD], "", command="no-such-program-at-all")
    assert sample.stop_reason == "environment_error" and "no-such-program-at-all" in str(sample.error)
