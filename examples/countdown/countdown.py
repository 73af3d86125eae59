"""Countdown: reach a target with all of the given numbers and + - * /, as in TinyZero; the last line is the answer."""

import ast
import operator
from collections import Counter
from fractions import Fraction

from rollout_fleet.environments.protocol import Action, Limits, StepResult

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 64  # characters of an answer that is read


def value(expression: str) -> tuple[Fraction, Counter[int]]:
    """The exact value, and how often each number is used.

    Raises ValueError for all but whole numbers, + - * / and parentheses, and for a division by zero.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    used = Counter[int]()

    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used[node.value] += 1
            return Fraction(node.value)
        raise ValueError("neither a whole number nor + - * /")

    try:
        return of(ast.parse(expression.strip(), mode="eval").body), used
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def solves(expression: str, numbers: list[int], target: int) -> bool:
    """Whether it has exactly this value and uses each of the numbers exactly once."""
    try:
        found, used = value(expression)
    except ValueError:
        return False
    return found == target and used == Counter(numbers)


class Countdown:
    """Problem: {"numbers": [7, 4, 2], "target": 26}. One turn; reward 1 for a right last line that the model ended."""

    LIMITS = Limits(step_s=5.0)

    def __init__(self, problem, *, seed):
        self.numbers, self.target = problem["numbers"], problem["target"]

    async def reset(self):
        return f"{' '.join(map(str, self.numbers))} = {self.target}\n"

    async def step(self, action: Action) -> StepResult:
        *attempts, answer = action.text.split("\n")
        right = action.ended and solves(answer, self.numbers, self.target)
        tried = sum(len(line.split()) for line in attempts)
        return StepResult(reward=float(right), metrics={"attempts": float(tried)})
