"""Environments whose policy may call tools: declare them, and each call is run and answered with a tool message."""

import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, StepResult, ToolCall

OUTPUT_CHARS = 8000  # a longer answer of a call is cut
MOST_DEPTH = 100  # readers of JSON have limits from about 200


class ToolServerFailed(Exception):
    """The place where tools run is broken, which the policy cannot repair; raised by a tool, it fails the sample."""


def check_depth(found: Any, left: int = MOST_DEPTH) -> None:
    """Raise ValueError for JSON of the policy with more levels than MOST_DEPTH: a server may hang or end by it."""
    if left < 0:
        raise ValueError(f"more than {MOST_DEPTH} levels of lists and objects")
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        check_depth(inner, left - 1)


@dataclass(frozen=True)
class Tool:
    """Something that the policy can call.

    `run` gets the arguments as keywords; what it returns is shown as text, what it raises as an error (but
    ToolServerFailed).
    """

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments' object
    run: Callable[..., Awaitable[Any]]


class ToolEnvironment:
    """Base class: say `messages`, `tools` and `judge`; a turn without calls is the answer and ends the episode.

    Metrics: tool_calls, tool_errors (calls that raised, named no tool or were malformed).
    """

    messages: tuple[tuple[str, str], ...] = ()
    tools: tuple[Tool, ...] = ()

    def __init__(self) -> None:
        self._calls = self._errors = 0

    async def judge(self, answer: str) -> float:
        """The reward of the final answer."""
        raise NotImplementedError

    async def reset(self) -> Chat:
        return self._chat(self.messages)

    async def step(self, action: Action) -> StepResult:
        if not action.ended:
            return self._end(0.0)
        if action.malformed:
            self._errors += 1
            return StepResult(self._chat((("tool", f"error: {action.malformed}"),)), done=False)
        if not action.calls:
            return self._end(await self.judge(action.text))
        answers = [("tool", await self._run(call)) for call in action.calls]
        return StepResult(self._chat(tuple(answers)), done=False)

    async def _run(self, call: ToolCall) -> str:
        self._calls += 1
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        try:
            if tool is None:
                raise LookupError(f"there is no tool {call.name!r}; there are {', '.join(t.name for t in self.tools)}")
            arguments = json.loads(call.arguments)
            inspect.signature(tool.run).bind(**arguments)
            text = str(await tool.run(**arguments))
        except ToolServerFailed:
            raise
        except Exception as error:
            self._errors += 1
            text = f"error: {type(error).__name__}: {error}"
        missing = len(text) - OUTPUT_CHARS
        return text if missing <= 0 else f"{text[:OUTPUT_CHARS]}\n... ({missing} more characters)"

    def _chat(self, messages: tuple[tuple[str, str], ...]) -> Chat:
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in self.tools]
        return Chat(messages, tools=json.dumps([{"type": "function", "function": each} for each in functions]))

    def _end(self, reward: float) -> StepResult:
        metrics = {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        return StepResult(reward=reward, metrics=metrics)
