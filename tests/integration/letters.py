"""An environment that a random model learns from at once: reward for even digits. Named by import path in configs."""

from typing import Any

from rollout_fleet.environments.protocol import Action, StepResult


class EvenDigits:
    """Single turn; reward is the share of the sampled characters that are even digits."""

    def __init__(self, problem: dict[str, Any], *, seed: int) -> None:
        self.prompt = f"{problem['question']}="

    async def reset(self) -> str:
        """The sum."""
        return self.prompt

    async def step(self, action: Action) -> StepResult:
        """Count."""
        text = action.text
        return StepResult(reward=sum(c in "02468" for c in text) / max(1, len(text)), done=True)
