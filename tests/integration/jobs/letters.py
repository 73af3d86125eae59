"""An environment that a random model learns from at once: reward for even digits. Named by import path in configs."""

import asyncio
from typing import Any

from rollout_fleet.environments.protocol import Action, StepResult


class EvenDigits:
    """Single turn; reward is the share of the sampled characters that are even digits.

    `pause_s` is thinking time per episode: it bounds how fast a job can be, so that there is a middle to act in.
    """

    def __init__(self, problem: dict[str, Any], *, seed: int, pause_s: float = 0.0) -> None:
        self.prompt = f"{problem['question']}="
        self.pause_s = pause_s

    async def reset(self) -> str:
        """The sum."""
        return self.prompt

    async def step(self, action: Action) -> StepResult:
        """Count, after a pause."""
        await asyncio.sleep(self.pause_s)
        text = action.text
        return StepResult(reward=sum(c in "02468" for c in text) / max(1, len(text)), done=True)
