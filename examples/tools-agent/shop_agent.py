"""An agent as one writes it for OpenAI's API: it offers a tool, runs the policy's calls, and judges the answer."""

import json

from openai import AsyncOpenAI

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"type": "function", "function": {"name": "price", "description": "Price of an item.", "parameters": ITEM}}


async def agent(problem, *, base_url, api_key, model, seed, turns=3):
    messages = [{"role": "user", "content": problem["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for turn in range(turns):
            answer = await client.chat.completions.create(model=model, messages=messages, tools=[PRICE])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                right = said.content is not None and said.content.strip() == problem["answer"]
                return {"reward": float(right), "metrics": {"turns_with_calls": float(turn)}}
            for call in said.tool_calls:
                item = json.loads(call.function.arguments).get("item")
                told = problem["prices"].get(item, "unknown")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return {"reward": 0.0, "metrics": {"turns_with_calls": float(turns)}}
