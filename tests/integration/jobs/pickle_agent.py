"""An agent that asks the policy once, through the node's endpoint, and is rewarded for even digits."""

import asyncio
from typing import Any

import aiohttp


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
