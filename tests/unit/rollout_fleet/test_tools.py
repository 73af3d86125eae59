"""Tools: run, answered with tool messages through the template, errors told to the policy; and Python as a tool."""

import asyncio
from typing import Any

import pytest

from common.rollouts import Sample
from rollout_fleet.environments.builtin.python_tool import PythonTool, run_python
from rollout_fleet.environments.protocol import Budget
from rollout_fleet.environments.tools import OUTPUT_CHARS, Tool, ToolEnvironment
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import make_driver
from tests.unit.rollout_fleet.fleet_fakes import play as episode

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Adds(ToolEnvironment):
    """Has one tool; 3 is the right answer."""

    def __init__(self, problem: dict[str, Any], *, seed: int) -> None:
        super().__init__()
        self.messages = (("user", "1+2?"),)

        async def add(a: int, b: int = 0) -> Any:
            if a < 0:
                raise ArithmeticError("negative")
            return "x" * a if a > 1000 else a + b

        self.tools = (Tool("add", "adds", SCHEMA, add),)

    async def judge(self, answer: str) -> float:
        return float(answer.strip() == "3")


def play(
    environment: type, said: list[str], budget: Budget | None = None, problem: dict[str, Any] | None = None
) -> tuple[Sample, list[str]]:
    """The sample, and what the template put between the turns, as text."""
    tokenizer = qwen()
    sampler = speaker(tokenizer, *said)
    driver = make_driver(sampler, environment, tokenizer=tokenizer, budget=budget)
    sample = episode(driver, problem or {})
    prompts = [call.prompt for call in sampler.calls]
    between = [tokenizer.decode(prompts[0])]
    for turn in range(1, len(prompts)):
        spoken = len(tokenizer.encode(said[turn - 1])) + 1
        between.append(tokenizer.decode(prompts[turn][len(prompts[turn - 1]) + spoken :]))
    return sample, between


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_call_is_run_and_its_answer_comes_back_as_a_tool_message_and_a_turn_without_calls_is_judged() -> None:
    sample, between = play(Adds, ["Hm. " + call("add", '{"a": 1, "b": 2}'), "3"])
    assert '"name": "add"' in between[0] and between[0].endswith("assistant\n")
    assert between[1] == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><eos>\n<|im_start|>assistant\n"
    assert (sample.reward, sample.turns, sample.stop_reason) == (1.0, 2, "environment_done")
    assert (sample.metrics["tool_calls"], sample.metrics["tool_errors"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("sub", "{}"), "error: LookupError: there is no tool 'sub'; there are add"),
        (call("add", '{"x": 1}'), "error: TypeError"),
        (call("add", '{"a": -1}'), "error: ArithmeticError: negative"),
        ("<tool_call>add</tool_call>", "error: a call that is not JSON"),
    ],
)
def test_a_call_that_fails_is_told_to_the_policy_and_counted(said: str, told: str) -> None:
    sample, between = play(Adds, [said, "3"])
    assert told in between[1]
    assert (sample.reward, sample.metrics["tool_errors"]) == (1.0, 1.0)


def test_several_calls_of_a_turn_are_answered_in_order_and_long_answers_are_cut() -> None:
    _, between = play(
        Adds, [call("add", '{"a": 1}') + call("add", f'{{"a": {OUTPUT_CHARS + 7}}}'), "3"], Budget(4, 1000, 50_000)
    )
    assert between[1].count("<tool_response>") == 2
    assert between[1].index("\n1\n") < between[1].index("xxx")
    assert "(7 more" in between[1]


# ---------------------------------------------------------------- Python as a tool

ROW = {"question": "6 * 7?", "answer": "six times seven #### 42"}


def output(code: str, seconds: float = LIMIT_S, **limits: Any) -> str:
    return asyncio.run(run_python(code, seconds, **limits))


def test_the_policy_s_code_runs_and_its_output_comes_back() -> None:
    code = '{"code": "x = 6 * 7\\nprint(x)"}'
    sample, between = play(PythonTool, [call("python", code), "#### 42"], problem=ROW)
    assert "\n42\n" in between[1]
    assert (sample.error, sample.reward, sample.metrics["tool_calls"]) == (None, 1.0, 1.0)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print('a'); print('b')", "a\nb\n"),
        ("1 + 1", "2\n"),
        ("x = 3", ""),
        ("import sys; print('err', file=sys.stderr)", "err\n"),
        ("import os; os.system('echo out of a shell')", "out of a shell\n0\n"),
        ("import sys; print('so far', flush=True); sys.exit(2)", "so far\n"),
    ],
)
def test_code_shows_what_it_writes_and_the_value_of_a_last_expression(code: str, shown: str) -> None:
    assert output(code) == shown


def test_code_that_raises_shows_the_lines_of_the_code_only() -> None:
    said = output("def f():\n    return 1 / 0\nf()")
    assert "ZeroDivisionError" in said and 'File "<code>", line 2' in said and "python_tool.py" not in said
    assert "SyntaxError" in output("1 +")


FORKS = "import os, time\nfor _ in range(500):\n  if not os.fork(): time.sleep(3600)"


@pytest.mark.parametrize(
    ("code", "said", "seconds"),
    [
        ("while True: pass", "killed", 1.0),
        ("import time; time.sleep(3600)", "killed: it took longer than 1 s", 1.0),
        ("x = bytearray(1 << 30)", "MemoryError", LIMIT_S),
        (FORKS, "more than 64 processes|BlockingIOError", LIMIT_S),
        ("import os; os.kill(os.getpid(), 9)", "killed after", LIMIT_S),
        ("for _ in range(100_000): print('x' * 100)", "... (of ", LIMIT_S),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:9', timeout=5)", "unreachable", LIMIT_S),
    ],
)
def test_code_that_misbehaves_is_ended_and_says_so(code: str, said: str, seconds: float) -> None:
    shown = output(code, seconds, memory_mib=256, output_chars=500)
    assert any(part in shown for part in said.split("|")) and len(shown) < 3000


def test_nothing_of_one_run_is_there_in_the_next() -> None:
    output("x = 1; open('left', 'w').write('x')")
    assert output("import os; print('x' in globals(), os.listdir('.'))") == "False []\n"
