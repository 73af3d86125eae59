"""Tool calls are found in the format that the chat template teaches; what is broken is said, not guessed."""

import json

import pytest

from rollout_fleet.environments.protocol import ToolCall
from rollout_fleet.episode.tool_calls import MOST_CALLS, format_of, parse
from tests.unit.rollout_fleet.chat_tokenizers import LLAMA, QWEN

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1}')


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
    assert format_of(template) == kind


@pytest.mark.parametrize(
    ("kind", "text", "before"),
    [
        ("hermes", f"Let me see. {HERMES}", "Let me see. "),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', ""),
        ("xml", "x<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "x"),
        ("mistral", 'x[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "x"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', ""),
        ("llama3", 'x<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "x"),
    ],
)
def test_a_call_is_found(kind: str, text: str, before: str) -> None:
    said = parse(text, kind)
    assert (said.text, said.calls, said.malformed) == (before, (ADD,), "")


@pytest.mark.parametrize("kind", ["hermes", "xml", "mistral", "llama3"])
@pytest.mark.parametrize("text", ["", "The answer is 3.", '{"a": 1}'])
def test_text_without_a_call_has_none(kind: str, text: str) -> None:
    said = parse(text, kind)
    assert (said.text, said.calls, said.malformed) == (text, (), "")


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
    said = parse(text, kind)
    assert said.calls == () and why in said.malformed


def test_several_calls_keep_their_order_and_values_of_xml_parameters_are_json_where_they_can_be() -> None:
    assert [call.name for call in parse(HERMES + HERMES.replace("add", "sub"), "hermes").calls] == ["add", "sub"]
    text = "<tool_call><function=f><parameter=n>3</parameter><parameter=s>a b</parameter></function></tool_call>"
    assert json.loads(parse(text, "xml").calls[0].arguments) == {"n": 3, "s": "a b"}
