r"""Problems whose answer is a number or an expression: `gsm8k` and `math`.

`gsm8k` compares the last number (Cobbe et al., arXiv 2110.14168). `math` compares by value with math-verify: fractions,
roots, intervals and LaTeX, however they are spelt. Its judging runs in the episode's own process, because expressions
exist on which a computer algebra system does not come back.
"""

import re
import threading
from decimal import Decimal
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, Limits, StepResult

PROMPT = "{question}\nReason step by step, then give the final number after ####."
BOXED_PROMPT = "{question}\nReason step by step, then give the final answer in \\boxed{}."
JUDGE_S = 5
FORMAT = '{"question": text, "answer": text that ends with "#### NUMBER"}'
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


class Gsm8k:
    """Single turn. Problem: a line of the published files, {"question": "...", "answer": "... #### 42"}.

    The prompt goes through the tokenizer's chat template where it has one.

    Options:
        prompt: template of the prompt, with {question}; other braces are left as they are.
        thinking: for templates that know `enable_thinking` (Qwen3): reason inside <think> before the answer.
    """

    def __init__(self, problem: dict[str, Any], *, seed: int, prompt: str = PROMPT, thinking: bool = False) -> None:
        question, self.gold = read_row(problem)
        self.prompt = prompt.replace("{question}", question)
        self.thinking = thinking

    async def reset(self) -> Chat:
        return Chat((("user", self.prompt),), (("enable_thinking", self.thinking),))

    async def step(self, action: Action) -> StepResult:
        """Reward 1 when the policy ended its turn and its final number is the right one."""
        given = final_number(action.text)
        metrics = {"answered": float(given is not None)}
        return StepResult(reward=float(action.ended and given == self.gold), metrics=metrics)


def read_row(problem: dict[str, Any]) -> tuple[str, Decimal]:
    """(question, right number) of a row; raises ValueError for any other row."""
    question = problem.get("question")
    answer = problem.get("answer")
    _, mark, last = answer.rpartition("####") if isinstance(answer, str) else ("", "", "")
    gold = _NUMBER.fullmatch(last.strip().lstrip("$")) if mark else None
    if not isinstance(question, str) or gold is None:
        raise ValueError(f"expected a row {FORMAT}, found {problem}")
    return question, _value(gold.group())


def final_number(text: str) -> Decimal | None:
    r"""The number in the last \boxed{}, else the last number of all; commas are ignored. None: there is none."""
    boxed = _BOXED.findall(text)
    numbers = _NUMBER.findall(boxed[-1]) if boxed else []
    numbers = numbers or _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


class MathProblem(Gsm8k):
    """Single turn, with the options of Gsm8k. Problem: {"question": text, "answer": text}.

    An answer of GSM8K's form ends with `#### 42`; any other is taken whole, as LaTeX or plain.
    """

    LIMITS = Limits(process=True, step_s=30.0, cpu_s=60, memory_mib=2048)
    PRELOAD = NEEDS = ("math_verify",)

    def __init__(
        self, problem: dict[str, Any], *, seed: int, prompt: str = BOXED_PROMPT, thinking: bool = False
    ) -> None:
        question = problem.get("question")
        answer = problem.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str) or not answer.strip():
            raise ValueError(f'expected {{"question": text, "answer": text}}, found {problem}')
        self.prompt = prompt.replace("{question}", question)
        self.thinking = thinking
        self.right = answer.rpartition("####")[2].strip()

    async def step(self, action: Action) -> StepResult:
        """Reward 1 when the policy ended its turn and its answer equals the right one."""
        answered, equal = judge(self.right, action.text)
        return StepResult(reward=float(action.ended and equal), metrics={"answered": float(answered)})


def judge(gold: str, answer: str) -> tuple[bool, bool]:
    """(whether an answer was found, whether it equals `gold`); raises ValueError for a `gold` that cannot be read."""
    from math_verify import parse, verify

    # math-verify's own limit needs the main thread
    limit: Any = JUDGE_S if threading.current_thread() is threading.main_thread() else None
    bare = gold.strip("$ ")
    right = parse(f"\\boxed{{{bare}}}", parsing_timeout=limit) or parse(gold, parsing_timeout=limit)
    if not right:
        raise ValueError(f"the dataset's answer {gold!r} is nothing that math-verify reads")
    given = parse(answer, parsing_timeout=limit)
    return bool(given), bool(given) and bool(verify(right, given, timeout_seconds=limit))
