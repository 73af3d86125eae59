"""OpenAI's /v1/responses: translated to a chat request and back, so that refusals and conversations stay one."""

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from rollout_fleet.agents import api
from rollout_fleet.agents.api import Answer, BadRequest, ChatRequest, Terms
from rollout_fleet.episode.rendering import Message

# The values that ask for nothing, and why others are refused; parameters of chats are checked as in chats.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "the answer comes with the reply"),
    "conversation": ((), "name 'previous_response_id'"),
    "include": (([],), "the output has texts and calls, nothing else"),
    "prompt": ((), "no prompts are stored here"),
    "reasoning": (({},), "the chat template renders every request alike"),
    "text": (({}, {"format": {"type": "text"}}), api.BENT),
    "truncation": (("disabled",), "prompts are continued as they were recorded"),
}


class _Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Text = str | list[_Part]


class _Item(msgspec.Struct):
    """One of the input's items; `type` says which fields it has."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: _Text = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: _Text = ""


class _Tool(msgspec.Struct, omit_defaults=True):
    name: str
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Request(msgspec.Struct, kw_only=True):
    """The parameters that chats do not have, or have in another shape."""

    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None


class Responses:
    def read(self, body: Any, terms: Terms, said: dict[str, list[Message]]) -> ChatRequest:
        """The chat that the request asks for; raises BadRequest as api.read.

        `said`: the episode's conversations by the id of the response that ended them, without instructions.
        """
        rest = api.without_neutral(body, NEUTRAL)
        asked = api.convert(rest, Request)
        before = said.get(asked.previous_response_id or "", [])
        if asked.previous_response_id and not before:
            message = "'previous_response_id' must be a response of this episode"
            raise BadRequest(message, "previous_response_id", "previous_response_not_found")
        self._said = said
        self._messages: list[Message] = [*before, *_messages(asked.input)]
        self._body: dict[str, Any] = body
        system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        chat = {"messages": system + self._messages, "max_tokens": asked.max_output_tokens}
        chat |= {"tools": api.functions((t.name, t.description, t.parameters) for t in asked.tools or ())}
        chat = api.as_chat(rest, Request, chat)
        return api.read(chat, ChatRequest, terms, shown={"messages": "input", "max_tokens": "max_output_tokens"})

    def body(self, answer: Answer, request: ChatRequest, number: int) -> dict[str, Any]:
        name = f"resp_{number}_{secrets.token_hex(8)}"  # unlike those of other episodes, which are refused
        self._said[name] = [*self._messages, api.assistant(answer)]
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [part]}
        output: list[dict[str, Any]] = [message] if answer.text or not answer.calls else []
        for call_id, call in answer.calls:
            found = {"call_id": call_id, "name": call.name, "arguments": call.arguments, "status": "completed"}
            output.append({"type": "function_call", "id": f"fc_{call_id}", **found})
        prompt, sampled = len(answer.prompt_tokens), len(answer.tokens)
        asked = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "metadata")
        return {
            **{key: self._body.get(key) for key in asked},
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": request.model or api.MODEL,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": request.tool_choice or "auto",
            "tools": self._body.get("tools") or [],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def events(self, body: dict[str, Any], request: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, data) of the stream's events, numbered."""
        for number, (kind, data) in enumerate(_events(body)):
            yield kind, {"type": kind, "sequence_number": number, **data}

    error = staticmethod(api.error_body)


def _messages(found: str | list[_Item]) -> list[Message]:
    """As chats have them; the calls of a turn belong to its message."""
    messages: list[Message] = []
    for item in [_Item(content=found)] if isinstance(found, str) else found:
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": api.text_of(item.output)})
        elif item.type == "message":
            messages.append({"role": item.role, "content": api.text_of(item.content)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    return messages


def _events(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(body["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = {**item, **empty, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": added}
        if item["type"] == "message":
            (part,) = item["content"]
            place = {**where, "content_index": 0}
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        else:
            yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**where, **named}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{body['status']}", {"response": body}
