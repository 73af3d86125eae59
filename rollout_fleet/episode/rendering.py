"""Between text and tokens: an environment's messages become token ids, and the policy's text shows its tool calls.

The policy's text is never tokenised. A chat template renders whole conversations; this module takes only the new text
from it. For the text between two turns it renders a made-up conversation, in which the assistant says a mark and the
new messages follow. So a turn's tokens are an exact prefix of the next prompt, even if the template would change
earlier turns.

The template also teaches the format of tool calls:

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen 2.5, Qwen 3; the default
    xml      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>                Qwen3-Coder
    mistral  [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
    llama3   {"name": "add", "parameters": {"a": 1}}, alone or after <|python_tag|>
"""

import json
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from common.hub import begin_tokens, begun
from rollout_fleet.environments.protocol import Chat, Observation, ToolCall

MARK = "SLIPSTREAM-ASSISTANT-SAID-THIS"
Message = dict[str, Any]
CACHED_CHARS = 4096  # longer texts are tokenised each time, so that the cache stays small
MOST_CALLS = 32  # more calls in one turn are refused
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_PARAMETER_END = "</parameter>"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the driver uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    # those of chat models have `chat_template` and `apply_chat_template` too


class Renderer:
    """Observations to token ids, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._begin = begin_tokens(tokenizer)
        self._cached = lru_cache(maxsize=4096)(self._encode)

    @property
    def template(self) -> str:
        """The chat template's source; '' of a tokenizer without one."""
        found = getattr(self.tokenizer, "chat_template", None)
        return found if isinstance(found, str) else "" if found is None else json.dumps(found)

    def ids(self, observation: Observation, end_token: int | None = None) -> list[int]:
        """Token ids of an observation: of the prompt, or of what follows a turn that ended with `end_token`."""
        if isinstance(observation, Chat):
            messages: list[Message] = [{"role": role, "content": content} for role, content in observation.messages]
            options = dict(observation.options)
            if end_token is None:
                return self.prompt(messages, observation.tools, options)
            return self.encode(self.continuation(messages, end_token, observation.tools, options))
        if isinstance(observation, str):
            return self.first(observation) if end_token is None else self.encode(observation)
        return [token_of(found) for found in observation]

    def prompt(self, messages: list[Message], tools: str = "", options: Message | None = None) -> list[int]:
        """Token ids of a whole conversation, as `conversation`."""
        text = self.conversation(messages, tools, options)
        return self.encode(text) if self.template else self.first(text)

    def conversation(self, messages: list[Message], tools: str = "", options: Message | None = None) -> str:
        """A whole conversation, up to where the assistant begins; messages as chat templates want them."""
        if not self.template:
            return "\n\n".join(str(message.get("content") or "") for message in messages)
        return self._render(messages, tools, options or {})

    def continuation(
        self, messages: list[Message], end_token: int | None, tools: str = "", options: Message | None = None
    ) -> str:
        """The text between a turn of the assistant and its next one; `end_token` None: that turn was cut off."""
        if not self.template:
            return "".join(f"\n\n{message.get('content') or ''}" for message in messages) + "\n\n"
        said: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        whole = self._render([*said, *messages], tools, options or {})
        before, mark, after = whole.rpartition(MARK)
        if not mark or MARK in before:
            raise ValueError("the chat template does not show what the assistant said exactly once")
        return after if end_token is None else after.removeprefix(self.text([end_token]))

    def text(self, tokens: list[int]) -> str:
        """Tokens as text, special ones included."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def first(self, text: str) -> list[int]:
        """Tokens of a text with which an episode begins, after those that the tokenizer puts before one."""
        return begun(self.encode(text), self._begin)

    def encode(self, text: str) -> list[int]:
        """Text as tokens, none added."""
        return list(self._cached(text)) if len(text) <= CACHED_CHARS else list(self._encode(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: list[Message], tools: str, options: Message) -> str:
        template: Any = self.tokenizer
        if tools:
            options = {**options, "tools": json.loads(tools)}
        return template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def token_of(found: object) -> int:
    """A token id of an environment; raises ValueError for what is no integer, or none of 0 to 2^31 - 1."""
    try:
        token = operator.index(found)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"a token id must be an integer, found {found!r}") from None
    if not 0 <= token < 1 << 31:
        raise ValueError(f"a token id is at least 0 and below 2^31, found {token}")
    return token


# -------------------------------------------------------------------- tool calls


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, split into its text and its tool calls."""

    text: str  # before the first call
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""  # why something that looks like a call is none; then there are no calls


def tool_format(template: str) -> str:
    """The format that a chat template teaches; 'hermes' when it teaches none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "xml" if "<function=" in template else "hermes"
    return "llama3" if "python_tag" in template or '"parameters": ' in template else "hermes"


def parse_turn(text: str, kind: str) -> ParsedTurn:
    """Split a turn; `kind` is one of the formats above."""
    try:
        before, calls = _PARSERS[kind](text)
    except (ValueError, RecursionError) as error:  # arguments that were read may be too deep to be written again
        return ParsedTurn(text, malformed=str(error))
    if len(calls) > MOST_CALLS:
        return ParsedTurn(text, malformed=f"{len(calls)} calls in one turn, at most {MOST_CALLS} are run")
    return ParsedTurn(before, tuple(calls))


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    bodies = _TAGGED.findall(text)
    return text.partition("<tool_call>")[0], [_call(_json(body, "a call that is"), "arguments") for body in bodies]


def _xml(text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    for body in _TAGGED.findall(text):
        function = _opened(body, "<function=", 0)
        if function is None:
            raise ValueError("a call without <function=NAME>")
        name, begin = function
        parameters = _parameters(body[begin:].partition("</function>")[0])
        calls.append(ToolCall(name.strip(), json.dumps({key: _value(value) for key, value in parameters})))
    return text.partition("<tool_call>")[0], calls


def _opened(text: str, tag: str, at: int) -> tuple[str, int] | None:
    """(NAME, place behind it) of the next `tag`NAME>. A pattern takes quadratic time for many that nothing ends."""
    while (start := text.find(tag, at)) >= 0:
        at = start + len(tag)
        end = text.find(">", at)
        if end < 0:
            return None
        if end > at:
            return text[at:end], end + 1
    return None


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each parameter that is closed."""
    at = 0
    while found := _opened(text, "<parameter=", at):
        name, begin = found
        end = text.find(_PARAMETER_END, begin)
        if end < 0:
            return
        yield name, text[begin:end].removeprefix("\n").removesuffix("\n")
        at = end + len(_PARAMETER_END)


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    before, mark, body = text.partition("[TOOL_CALLS]")
    found = _json(body, "text after [TOOL_CALLS] that is") if mark else []
    return before, [_call(call, "arguments") for call in (found if isinstance(found, list) else [found])]


def _llama3(text: str) -> tuple[str, list[ToolCall]]:
    before, mark, body = text.partition("<|python_tag|>")
    if not mark:
        before = ""
        body = text
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
    except (ValueError, RecursionError):
        return text
