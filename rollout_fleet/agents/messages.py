"""Anthropic's /v1/messages: translated to a chat request and back, so that refusals and conversations stay one."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from rollout_fleet.agents import api
from rollout_fleet.agents.api import Answer, BadRequest, ChatRequest, Terms
from rollout_fleet.episode.rendering import Message

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_control": ((), "prefixes are cached by themselves"),
    "thinking": (({"type": "disabled"},), "the answer is all that the policy said"),
    "tool_choice": (
        ({"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": False}),
        "whether tools are called is the policy's choice, which is what is trained",
    ),
}
SHOWN = {"stop": "stop_sequences"}
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Use(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _Result(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] = ""


class _Message(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[_Text | _Use | _Result]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class Request(msgspec.Struct, kw_only=True):
    """The parameters that chats do not have, or have in another shape."""

    said: Annotated[list[_Message], msgspec.Meta(min_length=1)] = msgspec.field(name="messages")
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    system: str | list[_Text] | None = None
    stop_sequences: list[str] | None = None
    tools: list[_Tool] | None = None


class Messages:
    def read(self, body: Any, terms: Terms, said: dict[str, list[Message]]) -> ChatRequest:
        """The chat that the request asks for, which repeats its conversation; raises BadRequest as api.read."""
        rest = api.without_neutral(body, NEUTRAL)
        asked = api.convert(rest, Request)
        if asked.said[-1].role != "user":
            raise BadRequest("'messages' must end with the user's: answers are not begun for the policy", "messages")
        system = [{"role": "system", "content": api.text_of(asked.system)}] if asked.system else []
        chat: dict[str, Any] = {"messages": system + [part for said in asked.said for part in _messages(said)]}
        chat |= {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences}
        chat |= {"tools": api.functions((t.name, t.description, t.input_schema) for t in asked.tools or ())}
        chat = api.as_chat(rest, Request, chat)
        if (body.get("tool_choice") or {}).get("type") == "none":
            chat["tool_choice"] = "none"
        return api.read(chat, ChatRequest, terms, shown=SHOWN)

    def body(self, answer: Answer, request: ChatRequest, number: int) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        for call_id, call in answer.calls:
            content.append({"type": "tool_use", "id": call_id, "name": call.name, "input": json.loads(call.arguments)})
        stopped = "stop_sequence" if answer.stop is not None else "end_turn"
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": request.model or api.MODEL,
            "content": content,
            "stop_reason": REASONS.get(answer.finish_reason, stopped),
            "stop_sequence": answer.stop,
            "usage": {"input_tokens": len(answer.prompt_tokens), "output_tokens": len(answer.tokens)},
        }

    def events(self, body: dict[str, Any], request: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
        for kind, data in _events(body):
            yield kind, {"type": kind, **data}

    @staticmethod
    def error(message: str, code: str, status: int, parameter: str = "") -> dict[str, Any]:
        return {"type": "error", "error": {"type": ERRORS.get(status, api.CODE), "message": message}}


def _messages(message: _Message) -> Iterator[Message]:
    """As chats have them: tools answer in messages of their own, and a turn of the policy is one message."""
    blocks = [_Text(message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, _Result):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": api.text_of(block.content)}
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    uses = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, _Use)
    ]
    if texts or uses:
        yield {"role": message.role, "content": "".join(texts), **({"tool_calls": uses} if uses else {})}


def _events(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = body["usage"]
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield "message_start", {"message": {**body, **begun}}
    for index, block in enumerate(body["content"]):
        text = block["type"] == "text"
        empty = {"text": ""} if text else {"input": {}}
        yield "content_block_start", {"index": index, "content_block": {**block, **empty}}
        delta = {"type": "text_delta", "text": block["text"]} if text else None
        delta = delta or {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ended = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield "message_stop", {}
