"""The part of OpenAI's API that agents use: requests checked, answers built. Plain JSON, no client library."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rollout_fleet.agents.parameters import BadRequest, check_parameters
from rollout_fleet.environments.protocol import ToolCall
from rollout_fleet.episode.driver import Sampling
from rollout_fleet.episode.rendering import Message

MODEL = "policy"  # the only one that is served
_BLAMED = re.compile(r"`(?:\$\.)?(\w+)[^`]*`$")  # the parameter in msgspec's message, whose last word it is
_HINTS = {
    "messages": "at least one message; contents are text: images, audio and files are not served",
    "prompt": "one text or one list of token ids",
    "logprobs": "log-probabilities are recorded of the sampled tokens only: true in a chat, 0 in a completion",
}


@dataclass(frozen=True)
class Request:
    """The request.

    Attributes:
        messages: a chat's messages as sent, their contents as text; empty for a completion.
        prompt: text or token ids of a completion.
        tools: JSON list of function schemas; '' for none.
        max_tokens: None: whatever the budget leaves.
        logprobs, stream, token_ids: whether the answer has them.
        usage: whether a stream ends with the counts of tokens.
    """

    messages: list[Message] = field(default_factory=list)
    prompt: str | list[int] = ""
    tools: str = ""
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    token_ids: bool = False


@dataclass(frozen=True)
class Answer:
    """The policy's answer.

    Attributes:
        text: without tool calls and end token.
        calls: with their ids.
        finish_reason: stop, length or tool_calls.
        prompt_tokens, tokens: ids.
        pieces, logprobs: text and log-probability of every sampled token.
    """

    text: str
    calls: tuple[tuple[str, ToolCall], ...]
    finish_reason: str
    prompt_tokens: list[int]
    tokens: list[int]
    pieces: list[str]
    logprobs: list[float]


class _Part(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any]

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str):
            self.arguments = json.loads(self.arguments)


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Said(msgspec.Struct, omit_defaults=True):
    """A message as chat templates want it: its content as text, arguments of calls as objects."""

    role: str
    content: str | list[_Part] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None

    def __post_init__(self) -> None:
        found = self.content or ""
        self.content = found if isinstance(found, str) else "".join(part.text for part in found)


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """The parameters that chats and completions share."""

    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None

    def form(self) -> dict[str, bool]:
        """The wishes for the answer, as fields of Request."""
        usage = self.stream_options is not None and bool(self.stream_options.include_usage)
        return {"stream": bool(self.stream), "usage": usage, "token_ids": bool(self.return_token_ids)}


class _Chat(_Body, kw_only=True):
    messages: Annotated[list[_Said], msgspec.Meta(min_length=1)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    tools: Any = None
    tool_choice: Any = None


class _Completion(_Body, kw_only=True):
    prompt: str | list[Annotated[int, msgspec.Meta(ge=0)]]
    logprobs: Literal[0] | None = None


_B = TypeVar("_B", bound=_Body)


def read_chat(body: Any, job: Sampling) -> Request:
    """The body of a chat completion; it may name the sampling distribution `job`.

    Raises BadRequest for a body that cannot be read, or that asks for tokens which could not be recorded exactly.
    """
    found = _read(body, _Chat, job)
    return Request(
        messages=[msgspec.to_builtins(message) for message in found.messages],
        tools=json.dumps(found.tools) if found.tools and found.tool_choice != "none" else "",
        max_tokens=found.max_completion_tokens or found.max_tokens,
        logprobs=bool(found.logprobs),
        **found.form(),
    )


def read_completion(body: Any, job: Sampling) -> Request:
    """The body of a completion; as read_chat."""
    if isinstance(body, dict) and isinstance(body.get("prompt"), list) and len(body["prompt"]) == 1:
        (only,) = body["prompt"]  # one text may come as a list
        body = {**body, "prompt": only if isinstance(only, str) else [only]}
    found = _read(body, _Completion, job)
    logprobs = found.logprobs is not None
    return Request(prompt=found.prompt, max_tokens=found.max_tokens, logprobs=logprobs, **found.form())


def _read(body: Any, kind: type[_B], job: Sampling) -> _B:
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, found {type(body).__name__}")
    check_parameters(body, job, kind.__struct_fields__)
    try:
        found = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        (name,) = _BLAMED.findall(str(error))
        hint = _HINTS.get(name)
        raise BadRequest(f"'{name}' cannot be read: {error}" + (f" ({hint})" if hint else ""), name) from error
    if found.model not in (None, MODEL):
        message = f"'model' must be '{MODEL}', found {found.model[:80]!r}: the policy answers, and no other model"
        raise BadRequest(message, "model", "model_not_found", 404)
    return found


def identity(message: Message) -> tuple[str, str, str]:
    """Two messages are the same when these agree: role, text without surrounding space, calls without their ids."""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], str(message["content"]).strip(), json.dumps(calls)


def said(answer: Answer) -> Message:
    """The answer as the message that an agent sends back with its next request."""
    calls = _wire_calls(answer.calls, json.loads)
    message: Message = {"role": "assistant", "content": answer.text}
    return {**message, "tool_calls": calls} if calls else message


def chat_body(answer: Answer, request: Request, name: str, model: str) -> dict[str, Any]:
    """The body that answers a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.calls:
        message["tool_calls"] = _wire_calls(answer.calls)
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"content": _logprobs(answer), "refusal": None}
    return _body("chat.completion", choice, answer, request, name, model)


def completion_body(answer: Answer, request: Request, name: str, model: str) -> dict[str, Any]:
    """The body that answers a completion."""
    choice: dict[str, Any] = {"index": 0, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"tokens": answer.pieces, "token_logprobs": answer.logprobs, "top_logprobs": None}
    return _body("text_completion", choice, answer, request, name, model)


def chat_chunks(body: dict[str, Any], request: Request) -> list[dict[str, Any]]:
    """A chat answer as the chunks of a stream: role, text, finish reason and, if asked for, the token counts."""
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas.append(({"content": message["content"] or "", **({"tool_calls": calls} if calls else {})}, None))
    deltas.append(({}, choice["finish_reason"]))
    common = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}
        for delta, reason in deltas
    ]
    if request.logprobs:
        chunks[1]["choices"][0]["logprobs"] = choice["logprobs"]
    if request.token_ids:
        chunks[0]["prompt_token_ids"] = body["prompt_token_ids"]
        chunks[1]["choices"][0]["token_ids"] = choice["token_ids"]
    return [*chunks, {**common, "choices": [], "usage": body["usage"]}] if request.usage else chunks


def _body(kind: str, choice: dict[str, Any], answer: Answer, request: Request, name: str, model: str) -> dict[str, Any]:
    prompt, sampled = len(answer.prompt_tokens), len(answer.tokens)
    body: dict[str, Any] = {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
    if request.token_ids:
        body["prompt_token_ids"] = answer.prompt_tokens
        choice["token_ids"] = answer.tokens
    return body


def _wire_calls(calls: Sequence[tuple[str, ToolCall]], arguments: Callable[[str], Any] = str) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments(call.arguments)}}
        for name, call in calls
    ]


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True)
    ]
