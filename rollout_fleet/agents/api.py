"""The part of OpenAI's API that agents use: requests checked, answers built. Plain JSON, no client library."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_fleet.agents.parameters import BadRequest, check_parameters
from rollout_fleet.environments.protocol import ToolCall
from rollout_fleet.episode.driver import Sampling
from rollout_fleet.episode.rendering import Message

MODEL = "policy"  # the only one that is served


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


def read_chat(body: Any, job: Sampling) -> Request:
    """The body of a chat completion.

    Args:
        body: as sent.
        job: the sampling distribution that a request may name.

    Raises:
        BadRequest: it asks for something that cannot be recorded exactly, or is none.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a list with at least one message", "messages")
    check_parameters(body, job, chat=True)
    _check_model(body)
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    return Request(
        messages=[_message(message) for message in messages],
        tools=json.dumps(tools) if tools else "",
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        logprobs=bool(body.get("logprobs")),
        **_form(body),
    )


def read_completion(body: Any, job: Sampling) -> Request:
    """The body of a completion; as read_chat."""
    prompt = body.get("prompt") if isinstance(body, dict) else None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_token, prompt))):
        raise BadRequest("'prompt' must be one text or one list of token ids", "prompt")
    check_parameters(body, job, chat=False)
    _check_model(body)
    return Request(
        prompt=prompt,
        max_tokens=body.get("max_tokens"),
        logprobs=body.get("logprobs") is not None,
        **_form(body),
    )


def _form(body: dict[str, Any]) -> dict[str, bool]:
    """The wishes for the answer that chats and completions share, as fields of Request."""
    return {
        "stream": bool(body.get("stream")),
        "usage": bool((body.get("stream_options") or {}).get("include_usage")),
        "token_ids": bool(body.get("return_token_ids")),
    }


def _is_token(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0


def _check_model(body: dict[str, Any]) -> None:
    if body.get("model") not in (None, MODEL):
        message = (
            f"'model' must be '{MODEL}', found {str(body['model'])[:80]!r}: the policy answers, and no other model"
        )
        raise BadRequest(message, "model", "model_not_found", 404)


def _message(message: Any) -> Message:
    """A message as chat templates want it: contents as text, arguments of calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("every message needs a 'role'")
    found: Message = {"role": message["role"], "content": _content(message.get("content"))}
    for key in ("tool_call_id", "name"):
        if message.get(key):
            found[key] = message[key]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise BadRequest(f"'tool_calls' must be a list, found {type(calls).__name__}")
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest("contents are text here; images, audio and files are not served")


def _call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"id": call.get("id", ""), "type": "function", "function": {**function, "arguments": arguments}}
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"a tool call that cannot be read: {error}") from error


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
