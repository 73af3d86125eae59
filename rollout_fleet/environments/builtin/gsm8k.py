r"""GSM8K: word problems whose answer is a number (Cobbe et al., arXiv 2110.14168).

A row is one line of the published files: {"question": "...", "answer": "... #### 42"}.
"""

import re
from decimal import Decimal
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, StepResult

PROMPT = "{question}\nReason step by step, then give the final number after ####."
FORMAT = '{"question": text, "answer": text that ends with "#### NUMBER"}'
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


class Gsm8k:
    """Single turn; the prompt goes through the tokenizer's chat template where it has one.

    Options:
        prompt: template of the prompt, with {question}; other braces are left as they are.
        thinking: for templates that know `enable_thinking` (Qwen3): reason inside <think> before the answer.
    """

    def __init__(self, problem: dict[str, Any], *, seed: int, prompt: str = PROMPT, thinking: bool = False) -> None:
        question, self.gold = read_row(problem)
        self.prompt, self.thinking = prompt.replace("{question}", question), thinking

    async def reset(self) -> Chat:
        return Chat((("user", self.prompt),), (("enable_thinking", self.thinking),))

    async def step(self, action: Action) -> StepResult:
        """Reward 1 when the policy ended its turn and its final number is the right one."""
        given = final_number(action.text)
        metrics = {"answered": float(given is not None)}
        return StepResult(reward=float(action.ended and given == self.gold), metrics=metrics)


def read_row(problem: dict[str, Any]) -> tuple[str, Decimal]:
    """(question, right number) of a row; raises ValueError for any other row."""
    question, answer = problem.get("question"), problem.get("answer")
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
