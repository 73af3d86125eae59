"""Mathematics judged by math-verify: fractions, roots, intervals and LaTeX compare by value, not by spelling.

Rows are one JSON object a line: {"question": text, "answer": text}. An answer of GSM8K's form ends with `#### 42`; any
other is taken whole, as LaTeX or plain. Judging runs in the episode's own process, because expressions exist on which
a computer algebra system does not come back.
"""

import threading
from typing import Any

from rollout_fleet.environments.builtin.gsm8k import Gsm8k
from rollout_fleet.environments.protocol import Action, Limits, StepResult

PROMPT = "{question}\nReason step by step, then give the final answer in \\boxed{}."
JUDGE_S = 5


class MathProblem(Gsm8k):
    """Single turn, with the options of Gsm8k."""

    LIMITS = Limits(process=True, step_s=30.0, cpu_s=60, memory_mib=2048)
    PRELOAD = NEEDS = ("math_verify",)

    def __init__(self, problem: dict[str, Any], *, seed: int, prompt: str = PROMPT, thinking: bool = False) -> None:
        question, answer = problem.get("question"), problem.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str) or not answer.strip():
            raise ValueError(f'expected {{"question": text, "answer": text}}, found {problem}')
        self.prompt, self.thinking = prompt.replace("{question}", question), thinking
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
