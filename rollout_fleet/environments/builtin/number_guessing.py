"""Find a number in 1..highest: each guess is a turn, the environment answers which side the number lies on.

Guess 1-31        (prompt)
16                (turn 1)
 higher 17-31     (answer: the range that is still possible)
24 ...
"""

from typing import Any

from rollout_fleet.environments.protocol import Action, StepResult


class NumberGuessing:
    """Multi turn. Problem: {"number": 12}.

    Options:
        highest: numbers run from 1 to this.
        guesses: turns until the game is lost.
    """

    def __init__(self, problem: dict[str, Any], *, seed: int, highest: int = 31, guesses: int = 5) -> None:
        number = problem.get("number")
        if not isinstance(number, int) or not 1 <= number <= highest:
            raise ValueError(f"'number' must be an integer in 1..{highest}, the problem has {number!r}")
        self.number = number
        self.guesses = guesses
        self.made = 0
        self.low = 1
        self.high = highest

    async def reset(self) -> str:
        return f"Guess {self.low}-{self.high}\n"

    async def step(self, action: Action) -> StepResult:
        """Reward 1 for the right number; anything but a number, and the last wrong guess, end the game."""
        self.made += 1
        text = action.text.strip()
        guess = int(text) if text.isascii() and text.isdigit() else None
        if not action.ended or guess is None or guess == self.number or self.made >= self.guesses:
            metrics = {"guesses": float(self.made), "malformed": float(guess is None)}
            return StepResult(reward=float(action.ended and guess == self.number), metrics=metrics)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return StepResult(f" higher {self.low}-{self.high}\n", done=False)
        self.high = min(self.high, guess - 1)
        return StepResult(f" lower {self.low}-{self.high}\n", done=False)
