"""An environment that a random model learns from at once: reward for even digits. Named by import path in configs."""

import asyncio
from typing import Any

import aiohttp

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


async def agent(
    problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int, pause_s: float
) -> float:
    body = {"model": model, "prompt": f"{problem['question']}="}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client,
        client.post(f"{base_url}/completions", json=body) as answer,
    ):
        text = (await answer.json())["choices"][0]["text"]
    await asyncio.sleep(pause_s)
    return sum(letter in "02468" for letter in text) / max(1, len(text))
