"""Tool calls are found in the format that the chat template teaches; what is broken is said, not guessed."""

import json

import pytest

from rollout_fleet.environments.protocol import ToolCall
from rollout_fleet.episode.rendering import MOST_CALLS, ParsedTurn, parse_turn, tool_format
from tests.unit.rollout_fleet.chat_tokenizers import LLAMA, QWEN

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML = "<tool_call><function=f><parameter=n>3</parameter><parameter=s>a b</parameter></function></tool_call>"
ADD = ToolCall("add", '{"a": 1}')
KINDS = ("hermes", "xml", "mistral", "llama3")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("", "hermes"),
        (QWEN, "hermes"),
        ("... <tool_call>\n{...}\n</tool_call> ...", "hermes"),
        ("... <tool_call><function=NAME> ...", "xml"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... <|python_tag|> ...", "llama3"),
        ('respond with {"name": function name, "parameters": dictionary}', "llama3"),
        (LLAMA, "hermes"),
    ],
)
def test_the_format_follows_from_the_template(template: str, kind: str) -> None:
    assert tool_format(template) == kind


@pytest.mark.parametrize(
    ("kind", "text", "before", "calls"),
    [
        ("hermes", f"Let me see. {HERMES}", "Let me see. ", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [ADD]),
        ("hermes", HERMES + HERMES.replace("add", "sub"), "", [ADD, ToolCall("sub", ADD.arguments)]),
        ("xml", "x<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "x", [ADD]),
        ("xml", XML, "", [ToolCall("f", '{"n": 3, "s": "a b"}')]),
        ("mistral", 'x[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "x", [ADD]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ("llama3", 'x<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "x", [ADD]),
        *((kind, text, text, []) for kind in KINDS for text in ("", "The answer is 3.", '{"a": 1}')),
    ],
)
def test_calls_are_found_in_order_with_the_text_before_them(
    kind: str, text: str, before: str, calls: list[ToolCall]
) -> None:
    assert parse_turn(text, kind) == ParsedTurn(before, tuple(calls))


def test_a_policy_that_repeats_itself_keeps_no_processor() -> None:
    many, deep = "<parameter=x>" * 200_000, "[" * 100_000  # with a pattern the first took hours
    for inside, arguments in ((many, {}), (f"<parameter=x>{deep}</parameter>", {"x": deep})):
        (call,) = parse_turn(f"<tool_call><function=f>{inside}", "xml").calls
        assert (call.name, json.loads(call.arguments)) == ("f", arguments)
    assert parse_turn("<tool_call>" + "<function=" * 200_000, "xml").malformed


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("hermes", "<tool_call>add 1</tool_call>", "not JSON"),
        ("hermes", HERMES + "<tool_call>{</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "without a name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "no object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "arguments that are not JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("hermes", HERMES * (MOST_CALLS + 1), "at most"),
        ("xml", "<tool_call>add</tool_call>", "function"),
        ("mistral", "[TOOL_CALLS]add", "not JSON"),
        ("llama3", "<|python_tag|>print(1)", "not JSON"),
        ("llama3", '{"name": "add", "parameters": ', "not JSON"),
    ],
)
def test_something_that_only_looks_like_a_call_is_malformed_with_a_reason(kind: str, text: str, why: str) -> None:
    said = parse_turn(text, kind)
    assert said.calls == () and why in said.malformed
