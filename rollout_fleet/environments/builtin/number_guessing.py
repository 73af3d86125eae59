"""Find a number in 1..highest: each guess is a turn, the environment answers which side the number lies on.

Guess 1-31        (prompt)
16                (turn 1)
 higher 17-31     (answer: the range that is still possible)
24 ...
"""

import math
from typing import Any

from rollout_fleet.environments.protocol import Action, StepResult

MOST_DIGITS = 1000  # Python reads 4300


class NumberGuessing:
    """Multi turn. Problem: {"number": 12}.

    Options:
        highest: numbers run from 1 to this.
        guesses: turns until the game is lost.
        narrowing: reward for the way from the whole range to the number alone, in logarithms; each turn earns its part.
    """

    def __init__(
        self, problem: dict[str, Any], *, seed: int, highest: int = 31, guesses: int = 5, narrowing: float = 0.0
    ) -> None:
        number = problem.get("number")
        if not isinstance(number, int) or not 1 <= number <= highest:
            raise ValueError(f"'number' must be an integer in 1..{highest}, the problem has {number!r}")
        self.number = number
        self.guesses = guesses
        self.narrowing = narrowing
        self.whole = math.log(max(highest, 2))
        self.made = 0
        self.low = 1
        self.high = highest

    async def reset(self) -> str:
        return f"Guess {self.low}-{self.high}\n"

    async def step(self, action: Action) -> StepResult:
        """Reward 1 for the right number; anything but a number, and the last wrong guess, end the game."""
        self.made += 1
        text = action.text.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None
        found = action.ended and guess == self.number
        reward = float(found)
        if action.ended and guess is not None:
            reward += self.narrowing * self._narrow(guess)
        metrics = {"guesses": float(self.made), "malformed": float(guess is None), "found": float(found)}
        if not action.ended or guess is None or found or self.made >= self.guesses:
            return StepResult(reward=reward, metrics=metrics)
        side = "higher" if guess < self.number else "lower"
        return StepResult(f" {side} {self.low}-{self.high}\n", reward, done=False, metrics=metrics)

    def _narrow(self, guess: int) -> float:
        """Rule out what the guess shows to be wrong; the share of the way that this was, in logarithms."""
        before = self.high - self.low + 1
        if guess <= self.number:
            self.low = max(self.low, min(guess + 1, self.number))
        if guess >= self.number:
            self.high = min(self.high, max(guess - 1, self.number))
        return math.log(before / (self.high - self.low + 1)) / self.whole
