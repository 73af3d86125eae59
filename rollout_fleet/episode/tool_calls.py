"""Finds the tool calls in a policy's text, in the format that its chat template teaches.

These are the formats:

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen 2.5, Qwen 3; the default
    xml      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>                Qwen3-Coder
    mistral  [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
    llama3   {"name": "add", "parameters": {"a": 1}}, alone or after <|python_tag|>
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_fleet.environments.protocol import ToolCall

MOST_CALLS = 32  # more calls in one turn are refused
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class Said:
    """A turn taken apart.

    Attributes:
        text: the text before the first call; all of it when there is none.
        calls: in order.
        malformed: why something that looks like a call is none; '' when all is well. There are no calls then.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


def format_of(template: str) -> str:
    """The format that a chat template teaches; 'hermes' when it teaches none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "xml" if "<function=" in template else "hermes"
    return "llama3" if "python_tag" in template or '"parameters": ' in template else "hermes"


def parse(text: str, kind: str) -> Said:
    """Take a turn apart; `kind` is one of the formats above."""
    before, found = _PARSERS[kind](text)
    calls: list[ToolCall] = []
    for call in found:
        if isinstance(call, str):
            return Said(text, malformed=call)
        calls.append(call)
    if len(calls) > MOST_CALLS:
        return Said(text, malformed=f"{len(calls)} calls in one turn, at most {MOST_CALLS} are run")
    return Said(before, tuple(calls))


Found = tuple[str, list[ToolCall | str]]  # a str says what is wrong


def _hermes(text: str) -> Found:
    return text.partition("<tool_call>")[0], [_call(body, "arguments") for body in _TAGGED.findall(text)]


def _xml(text: str) -> Found:
    calls: list[ToolCall | str] = []
    for body in _TAGGED.findall(text):
        function = _FUNCTION.search(body)
        if function is None:
            calls.append("a call without <function=NAME>")
            continue
        arguments = {name: _value(value) for name, value in _PARAMETER.findall(function[2])}
        calls.append(ToolCall(function[1].strip(), json.dumps(arguments)))
    return text.partition("<tool_call>")[0], calls


def _mistral(text: str) -> Found:
    before, mark, body = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, []
    try:
        found = json.loads(body)
    except ValueError as error:
        return text, [f"what follows [TOOL_CALLS] is not JSON: {error}"]
    return before, [_checked(call, "arguments") for call in (found if isinstance(found, list) else [found])]


def _llama3(text: str) -> Found:
    before, mark, body = text.partition("<|python_tag|>")
    if not mark:
        before, body = "", text
    if not body.strip().startswith("{") or '"name"' not in body:
        return text, ["a call that is not JSON"] if mark else []
    return before, [_call(body, "parameters")]


_PARSERS: dict[str, Callable[[str], Found]] = {"hermes": _hermes, "xml": _xml, "mistral": _mistral, "llama3": _llama3}


def _call(body: str, key: str) -> ToolCall | str:
    try:
        return _checked(json.loads(body), key)
    except (ValueError, RecursionError) as error:
        return f"a call that is not JSON: {error}"


def _checked(found: Any, key: str) -> ToolCall | str:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return "a call without a name"
    arguments = found.get(key, found.get("arguments", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return f"arguments that are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"{key} that are no object"
    return ToolCall(found["name"], json.dumps(arguments))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
