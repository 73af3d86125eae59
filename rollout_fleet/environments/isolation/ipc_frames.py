"""The messages between a node and an environment process: JSON after its length; nothing is pickled.

Standard library only: these modules also run under another interpreter (`python` of ProcessHost).
"""

import json
from asyncio import IncompleteReadError, StreamReader
from dataclasses import dataclass, is_dataclass
from typing import Any

from rollout_fleet.environments.isolation.backend import EnvironmentLost, ObservationTooLarge
from rollout_fleet.environments.protocol import Action, Chat, Observation, StepResult, ToolCall

HEAD_BYTES = 4
SMALL_BYTES = 1 << 16
CHAR_BYTES = 8  # upper bound for the JSON of one character


@dataclass(frozen=True)
class ProcessOrder:
    """The node's order to the fork server: a process for one episode, with these limits."""

    cpu_s: int
    memory_mib: int  # address space
    file_bytes: int  # of the largest file
    wall_s: float
    network: bool
    isolate: bool  # in namespaces, if the kernel allows it


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(HEAD_BYTES, "little") + body


async def read(reader: StreamReader, limit_bytes: int) -> dict[str, Any]:
    """The next frame.

    Raises ObservationTooLarge for one larger than `limit_bytes`, which is not read, and EnvironmentLost at the end of
    the stream.
    """
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "little")
        if size > limit_bytes:
            raise ObservationTooLarge(f"an answer of {size} bytes, the limit is {limit_bytes}")
        body = await reader.readexactly(size)
    except (IncompleteReadError, ConnectionError) as error:
        raise EnvironmentLost("its process ended without an answer") from error
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"an answer that is no object: {type(message).__name__}")
    return message


def observation_of(found: Any) -> Observation:
    """An observation from its JSON; the renderer checks token ids. Raises LookupError, ValueError or TypeError."""
    if not isinstance(found, dict):
        return found
    messages = tuple(tuple(each) if isinstance(each, list) else each for each in found["messages"])
    return Chat(messages, tuple((str(name), value) for name, value in found["options"]), str(found["tools"]))


def result_of(found: Any) -> StepResult:
    """A StepResult from its JSON; the driver checks reward and metrics. Raises as observation_of."""
    rest = {name: found[name] for name in ("reward", "done", "metrics", "trained", "notes")}
    return StepResult(observation_of(found["observation"]), **rest)


def action_of(found: dict[str, Any]) -> Action:
    calls = tuple(ToolCall(**call) for call in found["calls"])
    return Action(**{**found, "tokens": tuple(found["tokens"]), "calls": calls})


def _plain(found: Any) -> Any:
    """Dataclasses as objects, numbers and arrays of other libraries as Python's."""
    if is_dataclass(found):
        return vars(found)
    return found.tolist() if hasattr(found, "tolist") else float(found)
