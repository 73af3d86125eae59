"""Finds the tool calls in a policy's text, in the format that its chat template teaches.

These are the formats:

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen 2.5, Qwen 3; the default
    xml      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>                Qwen3-Coder
    mistral  [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
    llama3   {"name": "add", "parameters": {"a": 1}}, alone or after <|python_tag|>
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from rollout_fleet.environments.protocol import ToolCall

MOST_CALLS = 32  # more calls in one turn are refused
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class Said:
    """A turn taken apart."""

    text: str  # before the first call
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""  # why something that looks like a call is none; then there are no calls


def format_of(template: str) -> str:
    """The format that a chat template teaches; 'hermes' when it teaches none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "xml" if "<function=" in template else "hermes"
    return "llama3" if "python_tag" in template or '"parameters": ' in template else "hermes"


def parse(text: str, kind: str) -> Said:
    """Take a turn apart; `kind` is one of the formats above."""
    try:
        before, calls = _PARSERS[kind](text)
    except ValueError as error:
        return Said(text, malformed=str(error))
    if len(calls) > MOST_CALLS:
        return Said(text, malformed=f"{len(calls)} calls in one turn, at most {MOST_CALLS} are run")
    return Said(before, tuple(calls))


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    bodies = _TAGGED.findall(text)
    return text.partition("<tool_call>")[0], [_call(_json(body, "a call that is"), "arguments") for body in bodies]


def _xml(text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    for body in _TAGGED.findall(text):
        function = _FUNCTION.search(body)
        if function is None:
            raise ValueError("a call without <function=NAME>")
        arguments = {name: _value(value) for name, value in _PARAMETER.findall(function[2])}
        calls.append(ToolCall(function[1].strip(), json.dumps(arguments)))
    return text.partition("<tool_call>")[0], calls


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    before, mark, body = text.partition("[TOOL_CALLS]")
    found = _json(body, "text after [TOOL_CALLS] that is") if mark else []
    return before, [_call(call, "arguments") for call in (found if isinstance(found, list) else [found])]


def _llama3(text: str) -> tuple[str, list[ToolCall]]:
    before, mark, body = text.partition("<|python_tag|>")
    if not mark:
        before, body = "", text
        if not body.strip().startswith("{") or '"name"' not in body:
            return text, []
    return before, [_call(_json(body, "a call that is"), "parameters")]


_PARSERS = {"hermes": _hermes, "xml": _xml, "mistral": _mistral, "llama3": _llama3}


def _call(found: Any, key: str) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("a call without a name")
    arguments = found.get(key, found.get("arguments", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments, "arguments that are")
    if not isinstance(arguments, dict):
        raise ValueError(f"{key} that are no object")
    return ToolCall(found["name"], json.dumps(arguments))


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} not JSON: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
