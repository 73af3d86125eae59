"""The messages between a node and an environment process: JSON after its length; nothing is pickled.

Standard library only: these modules also run under another interpreter (`python` of ProcessHost).
"""

import json
from asyncio import IncompleteReadError, StreamReader
from dataclasses import is_dataclass
from typing import Any

from rollout_fleet.environments.isolation.placement import EnvironmentDied, Flood
from rollout_fleet.environments.protocol import Action, Chat, Observation, StepResult, ToolCall

HEAD_BYTES = 4
SMALL_BYTES = 1 << 16
CHAR_BYTES = 8  # upper bound for the JSON of one character


def pack(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")
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


def observation_of(found: Any) -> Observation:
    """An observation from its JSON; raises LookupError, ValueError or TypeError for anything else."""
    if isinstance(found, dict):
        messages = tuple((str(role), str(content)) for role, content in found["messages"])
        options = tuple((str(name), value) for name, value in found["options"])
        return Chat(messages, options, str(found["tools"]))
    return found if isinstance(found, str) else [int(token) for token in found]


def result_of(found: Any) -> StepResult:
    """A StepResult from its JSON; the driver checks reward and metrics. Raises as observation_of."""
    observation = observation_of(found["observation"])
    return StepResult(observation, found["reward"], bool(found["done"]), found["metrics"], bool(found["trained"]))


def action_of(found: dict[str, Any]) -> Action:
    """An Action from its JSON."""
    calls = tuple(ToolCall(**call) for call in found["calls"])
    return Action(**{**found, "tokens": tuple(found["tokens"]), "calls": calls})


def _plain(found: Any) -> Any:
    """Dataclasses as objects, and numbers of other libraries as numbers."""
    return vars(found) if is_dataclass(found) else float(found)
