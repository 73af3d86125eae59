"""The part of OpenAI's API that agents use: requests checked, answers built. Plain JSON, no client library.

Every parameter of a request is honoured or refused by name, never silently dropped. The learner recomputes
log-probabilities of the unmodified distribution at each token's temperature. Penalties, biases, masks and grammars
change that distribution, which would bias every importance ratio. So a request that asks for one gets an error. null
stands for the default.
"""

import difflib
import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from common.config.checks import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from common.config.tasks import AGENT_NAME
from rollout_fleet.environments.protocol import ToolCall
from rollout_fleet.episode.driver import Sampling
from rollout_fleet.episode.rendering import Message

MODEL = "policy"  # its sub-agents ask for policy/NAME
_HINTS = {
    "messages": "at least one message; contents are text: images, audio and files are not served",
    "prompt": "one text or one list of token ids",
    "logprobs": "log-probabilities are recorded of the sampled tokens only: true in a chat, 0 in a completion",
}
CODE = "invalid_request_error"
BENT = "it would change the distribution that is sampled from, which the learner computes again as it is"
UNKNOWN = "this endpoint does not know it, and it might change what is sampled"

# bookkeeping: neither tokens nor answer depend on it
WITHOUT_EFFECT = {
    "cache_salt", "metadata", "moderation", "priority", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
    "session_id", "store", "stream_interval", "user",
}  # fmt: skip
# The values that ask for nothing, by the reason why others are refused; names of OpenAI's API and of vLLM's additions.
_NEUTRAL_BY_REASON: dict[str, dict[str, tuple[Any, ...]]] = {
    BENT: {
        "allowed_token_ids": ([],), "bad_words": ([],), "frequency_penalty": (0,), "ignore_eos": (False,),
        "length_penalty": (1,), "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,), "presence_penalty": (0,),
        "repetition_penalty": (1,), "response_format": ({"type": "text"},), "structured_outputs": (),
        "top_k": (-1, 0), "use_beam_search": (False,),
    },
    "the chat template renders every request alike": {
        "add_generation_prompt": (True,), "add_special_tokens": (False,), "chat_template": (),
        "chat_template_kwargs": ({},), "continue_final_message": (False,), "documents": ([],), "reasoning_effort": (),
        "verbosity": (),
    },
    "whether tools are called is the policy's choice, which is what is trained": {
        "function_call": ("auto", "none"), "parallel_tool_calls": (True,), "tool_choice": ("auto", "none"),
    },
    "answers are text": {"audio": (), "modalities": (["text"],)},
    "one conversation is one sample": {"best_of": (1,), "n": (1,)},
    "the answer is all that the policy said": {"include_reasoning": (True,), "skip_special_tokens": (False,)},
    "log-probabilities are recorded of the sampled tokens only": {"prompt_logprobs": (), "top_logprobs": (0,)},
    "the answer is what the policy said": {"echo": (False,)},
    "name functions in 'tools'": {"functions": ([],)},
    "what the policy says is not guessed in advance": {"prediction": ()},
    "ask for 'return_token_ids'": {"return_tokens_as_token_ids": (False,)},
    "the answer is what came before the stop": {"include_stop_str_in_output": (False,)},
    "completions continue their prompt": {"suffix": ("",)},
    "prompts are continued as they were recorded": {"truncate_prompt_tokens": ()},
    "there is no web here; name a tool of your own": {"web_search_options": ()},
}  # fmt: skip
ONLY_CHATS = ("logprobs", "max_completion_tokens", "return_token_ids")  # the other APIs have no place for them
NEUTRAL = {name: (values, why) for why, found in _NEUTRAL_BY_REASON.items() for name, values in found.items()}


@dataclass(frozen=True)
class Terms:
    """The limits of a job for its agents' requests."""

    job: Sampling  # the distribution that a request may name; an evaluation may sample from another one
    greedy: bool = False  # temperature 0 is what the evaluation samples at
    taught: bool = False  # by a teacher, whose log-probabilities know no temperature but the job's
    agents: Mapping[str, bool] = field(default_factory=dict)  # names to whether they train; empty: all names do


class BadRequest(Exception):
    """The request cannot be served: `parameter` is to blame, if any; `code` and `status` are as in OpenAI's API."""

    def __init__(self, message: str, parameter: str = "", code: str = CODE, status: int = 400) -> None:
        self.parameter = parameter
        self.code = code
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class Answer:
    text: str  # without tool calls and end token
    calls: tuple[tuple[str, ToolCall], ...]  # with their ids
    finish_reason: str  # stop, length or tool_calls
    prompt_tokens: list[int]
    tokens: list[int]
    pieces: list[str]  # the text of every sampled token
    logprobs: list[float]
    stop: str | None = None  # the request's stop text that ended it


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
    id: str | None = ""
    type: Literal["function"] = "function"


def text_of(found: str | Iterable[Any] | None) -> str:
    """A content: a text, or parts that have one each."""
    return found if isinstance(found, str) else "".join(part.text for part in found or ())


class _ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message as chat templates want it: its content as text, arguments of calls as objects."""

    role: str
    content: str | list[_Part] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None

    def __post_init__(self) -> None:
        self.role = "system" if self.role == "developer" else self.role  # templates know only the older name
        self.content = text_of(self.content)
        # Templates ask whether a message has these, so what is empty is left out.
        self.tool_call_id = self.tool_call_id or None
        self.name = self.name or None
        self.tool_calls = self.tool_calls or None


_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Request(msgspec.Struct, kw_only=True):
    """The parameters that chats and completions share; `max_tokens` None: whatever the budget leaves."""

    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None

    @property
    def agent(self) -> str:
        """The sub-agent's name; '' for the agent itself."""
        return (self.model or MODEL).partition("/")[2]

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts at which the answer ends."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ()))


class ChatRequest(Request, kw_only=True):
    said: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)] = msgspec.field(name="messages")
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    tools: Any = None
    tool_choice: Any = None

    def __post_init__(self) -> None:
        """Afterwards `tools` is a JSON list of function schemas, or '' for none."""
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        self.tools = json.dumps(self.tools) if self.tools and self.tool_choice != "none" else ""

    @property
    def scored(self) -> bool:
        return bool(self.logprobs)

    @property
    def messages(self) -> list[Message]:
        """As sent, their contents as text."""
        return msgspec.to_builtins(self.said)


class CompletionRequest(Request, kw_only=True):
    """The body of a completion; the prompt is text or token ids."""

    prompt: str | list[_TokenId]
    logprobs: Literal[0] | None = None
    tools: ClassVar[str] = ""

    @property
    def scored(self) -> bool:
        return self.logprobs is not None


AnyRequest = ChatRequest | CompletionRequest
R = TypeVar("R", bound=Request)
S = TypeVar("S", bound=msgspec.Struct)


def read(body: Any, kind: type[R], terms: Terms, shown: Mapping[str, str] = MappingProxyType({})) -> R:
    """A request's body; raises BadRequest if it is not served. `shown`: other names of parameters in the sentence."""
    try:
        return _read(body, kind, terms)
    except BadRequest as error:
        if error.parameter not in shown:
            raise
        name = shown[error.parameter]
        message = str(error).replace(f"'{error.parameter}'", f"'{name}'")
        raise BadRequest(message, name, error.code, error.status) from error


def _read(body: Any, kind: type[R], terms: Terms) -> R:
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, found {type(body).__name__}")
    _check_parameters(body, terms.job, kind.__struct_encode_fields__)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        body = {**body, "prompt": prompt[0]}
    found = convert(body, kind)
    _check_model(found.model or MODEL, terms)
    if found.temperature is not None and found.temperature != terms.job.temperature:
        _check_temperature(found.temperature, terms)
    return found


def _check_temperature(found: float, terms: Terms) -> None:
    """Raise BadRequest for a temperature, other than the job's, that cannot be sampled at or trained."""
    if terms.taught:
        message = f"'temperature' must be {terms.job.temperature}, found {found}: a teacher knows no other"
        raise BadRequest(message, "temperature", "unsupported_value")
    if not LOWEST_TEMPERATURE <= found <= HIGHEST_TEMPERATURE and not (terms.greedy and found == 0):
        why = "below, sampling is greedy and there is nothing to train; above, the engine samples at none"
        message = f"'temperature' must be {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:g}, found {found}: {why}"
        raise BadRequest(message, "temperature", "unsupported_value")


def _check_model(model: str, terms: Terms) -> None:
    """Raise BadRequest for anything but the policy and the names of its sub-agents."""
    first, slash, name = model.partition("/")
    known = name in terms.agents if terms.agents else AGENT_NAME.fullmatch(name)
    if first != MODEL or (slash and not known):
        names = ", ".join(f"'{MODEL}/{each}'" for each in terms.agents or ["NAME"])
        message = f"'model' must be '{MODEL}', or for a sub-agent {names}, found {model[:80]!r}"
        raise BadRequest(message, "model", "model_not_found", 404)


def convert(body: Any, kind: type[S]) -> S:
    """The parameters that `kind` declares; raises BadRequest with the name of the first that cannot be read."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        name = _unreadable(body, kind)
        hint = _HINTS.get(name)
        raise BadRequest(f"'{name}' cannot be read: {error}" + (f" ({hint})" if hint else ""), name) from error


def without_neutral(body: Any, neutral: Mapping[str, tuple[tuple[Any, ...], str]]) -> dict[str, Any]:
    """The body without the parameters in `neutral`; raises BadRequest for values that are not listed there."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, found {type(body).__name__}")
    for name in body.keys() & neutral.keys():
        found = body[name]
        if isinstance(found, dict):
            found = {key: value for key, value in found.items() if value is not None}
        if found is not None:
            _check_value(name, found, *neutral[name])
    return {name: value for name, value in body.items() if name not in neutral and value is not None}


def as_chat(rest: Mapping[str, Any], kind: type[msgspec.Struct], chat: dict[str, Any]) -> dict[str, Any]:
    """`chat`, translated from what `kind` declares, with the parameters that another API shares with chats.

    Raises BadRequest for those that only chats have, because the answer of the other API has no place for them.
    """
    shared = {name: value for name, value in rest.items() if name not in kind.__struct_encode_fields__}
    for name in shared.keys() & {*chat, *ONLY_CHATS}:
        if shared[name] is not False:
            raise BadRequest(f"'{name}' is not served: only chats have it", name, "unsupported_parameter")
    return shared | chat


def functions(tools: Iterable[tuple[str, str | None, dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """(name, description, parameters' schema) of each tool, as chats have them."""
    named = ({"name": name, "description": text, "parameters": schema} for name, text, schema in tools)
    return [{"type": "function", "function": {k: v for k, v in each.items() if v is not None}} for each in named]


def assistant(answer: Answer) -> Message:
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for _, call in answer.calls]
    return {"role": "assistant", "content": answer.text, "tool_calls": [{"function": call} for call in calls]}


def error_body(message: str, code: str, status: int, parameter: str = "") -> dict[str, Any]:
    """An error as OpenAI's API has it."""
    kind = code if status in (401, 500) else CODE
    return {"error": {"message": message, "type": kind, "param": parameter or None, "code": code}}


def _unreadable(body: dict[str, Any], kind: type[msgspec.Struct]) -> str:
    """The first parameter that cannot be read as what `kind` declares; '' for none."""
    for each in msgspec.structs.fields(kind):
        if each.encode_name not in body:
            if each.required:
                return each.encode_name
            continue
        try:
            msgspec.convert(body[each.encode_name], each.type)
        except msgspec.ValidationError:
            return each.encode_name
    return ""


def _check_parameters(body: dict[str, Any], job: Sampling, served: Collection[str]) -> None:
    """Raise BadRequest when `body` asks for what it would not get; the caller honours the parameters in `served`."""
    expected: tuple[Any, ...]
    for name, found in body.items():
        if found is None or name in WITHOUT_EFFECT:
            continue
        if name == "top_p":
            expected = (job.top_p,)
            why = f"the job's, or absent: {BENT}"
        elif name in NEUTRAL:
            expected, why = NEUTRAL[name]
        elif name in served:
            continue
        else:
            near = difflib.get_close_matches(name, [*served, *NEUTRAL], 1)
            expected = ()
            why = UNKNOWN + (f"; did you mean '{near[0]}'?" if near else "")
        _check_value(name, found, expected, why)


def _check_value(name: str, found: Any, expected: tuple[Any, ...], why: str) -> None:
    if not expected:
        raise BadRequest(f"'{name}' is not served: {why}", name, "unsupported_parameter")
    if not any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in expected):
        wanted = " or ".join(map(repr, expected))
        raise BadRequest(f"'{name}' must be {wanted}, found {str(found)[:80]!r}: {why}", name, "unsupported_value")


def identity(message: Message) -> tuple[str, str, str]:
    """Two messages are the same when these agree: role, text without surrounding space, calls without their ids.

    Spaces within the policy's own text do not count: some clients take its thoughts apart and put them together again.
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    text = str(message["content"])
    text = "".join(text.split()) if message["role"] == "assistant" else text.strip()
    return message["role"], text, json.dumps(calls, sort_keys=True)


def answer_body(answer: Answer, request: AnyRequest, name: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
    if isinstance(request, ChatRequest):
        choice["message"] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        if answer.calls:
            choice["message"]["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in answer.calls
            ]
        scores = [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True)
        ]
        logprobs = {"content": scores, "refusal": None}
    else:
        choice["text"] = answer.text
        logprobs = {"tokens": answer.pieces, "token_logprobs": answer.logprobs, "top_logprobs": None}
    choice["logprobs"] = logprobs if request.scored else None
    prompt = len(answer.prompt_tokens)
    sampled = len(answer.tokens)
    body: dict[str, Any] = {
        "id": name,
        "object": "chat.completion" if isinstance(request, ChatRequest) else "text_completion",
        "created": int(time.time()),
        "model": request.model or MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = answer.prompt_tokens
        choice["token_ids"] = answer.tokens
    return body


def chunks(body: dict[str, Any], request: AnyRequest) -> list[dict[str, Any]]:
    """The answer's body as the chunks of a stream; a chat's are role, text, finish reason and, if asked for, counts."""
    if not isinstance(request, ChatRequest):
        return [body]
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    content = {"content": message["content"] or "", **({"tool_calls": calls} if calls else {})}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, content, {}]
    parts = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
    parts[1]["logprobs"] = choice["logprobs"]
    parts[2]["finish_reason"] = choice["finish_reason"]
    common = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    found = [{**common, "choices": [part]} for part in parts]
    if request.return_token_ids:
        found[0]["prompt_token_ids"] = body["prompt_token_ids"]
        parts[1]["token_ids"] = choice["token_ids"]
    if request.stream_options is not None and request.stream_options.include_usage:
        found.append({**common, "choices": [], "usage": body["usage"]})
    return found
