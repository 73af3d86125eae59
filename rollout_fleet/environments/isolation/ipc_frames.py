"""The messages between a node and an environment process: JSON after its length; nothing is pickled.

Standard library only: these modules also run under another interpreter (`python` of ProcessHost).
"""

import json
from asyncio import IncompleteReadError, StreamReader
from typing import Any

from rollout_fleet.environments.isolation.placement import EnvironmentDied, Flood
from rollout_fleet.environments.protocol import Action, Chat, Observation, StepResult, ToolCall

HEAD_BYTES = 4
SMALL_BYTES = 1 << 16
CHAR_BYTES = 8  # upper bound for the JSON of one character


def pack(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(HEAD_BYTES, "little") + body


async def read(reader: StreamReader, limit_bytes: int) -> dict[str, Any]:
    """The next frame.

    Raises:
        Flood: it is larger than `limit_bytes`; nothing of it was read.
        EnvironmentDied: the stream ended.
    """
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "little")
        if size > limit_bytes:
            raise Flood(f"an answer of {size} bytes, the limit is {limit_bytes}")
        body = await reader.readexactly(size)
    except (IncompleteReadError, ConnectionError) as error:
        raise EnvironmentDied("its process ended without an answer") from error
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"an answer that is no object: {type(message).__name__}")
    return message


def observation_json(observation: Observation) -> Any:
    """Text as text, token ids as a list, a Chat as an object; raises TypeError for anything else."""
    if isinstance(observation, Chat):
        return {"messages": observation.messages, "options": observation.options, "tools": observation.tools}
    if isinstance(observation, str):
        return observation
    if isinstance(observation, list):
        return [int(token) for token in observation]
    raise TypeError(f"an observation is text, token ids or a Chat, not {type(observation).__name__}")


def observation_of(found: Any) -> Observation:
    """The inverse; raises ValueError or TypeError for an invalid object."""
    if isinstance(found, dict):
        messages = tuple((str(role), str(content)) for role, content in found["messages"])
        options = tuple((str(name), value) for name, value in found["options"])
        return Chat(messages, options, str(found["tools"]))
    return found if isinstance(found, str) else [int(token) for token in found]


def result_json(result: StepResult) -> dict[str, Any]:
    """A StepResult as an object; the observation of a done episode is left out, because it is never read."""
    return {
        "observation": "" if result.done else observation_json(result.observation),
        "reward": float(result.reward),
        "done": bool(result.done),
        "metrics": {str(name): float(value) for name, value in result.metrics.items()},
        "trained": bool(result.trained),
    }


def result_of(found: dict[str, Any]) -> StepResult:
    """The inverse; raises KeyError, ValueError or TypeError for an invalid object."""
    return StepResult(
        observation=observation_of(found["observation"]),
        reward=float(found["reward"]),
        done=bool(found["done"]),
        metrics={str(name): float(value) for name, value in found["metrics"].items()},
        trained=bool(found["trained"]),
    )


def action_json(action: Action) -> dict[str, Any]:
    """An Action as an object."""
    calls = [(call.name, call.arguments) for call in action.calls]
    return {**vars(action), "calls": calls}


def action_of(found: dict[str, Any]) -> Action:
    """The inverse."""
    calls = tuple(ToolCall(name, arguments) for name, arguments in found["calls"])
    return Action(found["text"], tuple(found["tokens"]), found["ended"], calls, found["malformed"])
