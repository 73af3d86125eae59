"""Digits in order: the environment draws them, and every digit in its place earns a share of the reward."""

import random

from rollout_fleet.environments.protocol import Action, Limits, StepResult


class Sorting:
    """Problem: {"digits": 4}. All samples of a group get the same digits, because they share `group_seed`."""

    LIMITS = Limits(step_s=5.0)

    def __init__(self, problem, *, seed, group_seed, prompt="Sort {digits}: "):
        self.digits = random.Random(group_seed).choices("0123456789", k=problem["digits"])
        self.prompt = prompt.format(digits="".join(self.digits))

    async def reset(self):
        return self.prompt

    async def step(self, action: Action) -> StepResult:
        right = sorted(self.digits)
        share = sum(a == b for a, b in zip(action.text, right, strict=False)) / len(right)
        whole = action.ended and action.text == "".join(right)
        return StepResult(reward=share if action.ended else 0.0, metrics={"sorted": float(whole)})
