"""/v1/responses through the real openai client, and Anthropic's /v1/messages by its documented shapes, over HTTP.

Whatever the words of a request are, the tokens must be those of the chat that it stands for.
"""

import inspect
import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.resources.responses import Responses as ResponsesClient

from common.rollouts import Sample
from rollout_fleet.agents import api
from rollout_fleet.agents.api import UNKNOWN, BadRequest, Terms
from rollout_fleet.agents.messages import Messages
from rollout_fleet.agents.responses import Responses
from rollout_fleet.episode.driver import Sampling
from tests.rigs.refusals import refused
from tests.unit.rollout_fleet.chat_tokenizers import qwen
from tests.unit.rollout_fleet.test_agents import play, policy, with_client

TERMS = Terms(Sampling(temperature=0.7))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
CALL = 'So.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def eos(text: str) -> list[int]:
    return [*qwen().encode(text), qwen().eos_token_id]


def prompt_of(messages: list[dict[str, Any]], **more: Any) -> list[int]:
    """A chat's prompt by the template itself."""
    text = qwen().apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
    return list(qwen().encode(text, add_special_tokens=False))


def continues(sampler: Any, *said: str) -> None:
    """Each prompt begins with the one before and what was said then."""
    for before, after, text in zip(sampler.calls, sampler.calls[1:], said, strict=False):
        whole = before.prompt + eos(text)
        assert after.prompt[: len(whole)] == whole


# ---------------------------------------------------------------- responses


def test_responses_call_tools_and_go_on_by_their_id_or_by_their_items() -> None:
    async def talks(client: AsyncOpenAI, model: str) -> float:
        first = await client.responses.create(
            model=model, input="1+2?", instructions="Be brief.", tools=[TOOL], max_output_tokens=90, temperature=1.0
        )
        text, call = first.output
        assert text.type == "message" and call.type == "function_call"
        assert (first.output_text, call.name, call.arguments, first.status) == ("So.", "add", '{"a": 1}', "completed")
        assert first.usage is not None and first.usage.output_tokens == len(CALL) + 1
        answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = await client.responses.create(
            model=model, input=[answer], previous_response_id=first.id, instructions="Be brief.", tools=[TOOL]
        )
        assert second.output_text == "It is 3" and second.previous_response_id == first.id
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
        items += [item.model_dump() for item in first.output] + [answer]
        items += [item.model_dump() for item in second.output] + [{"role": "user", "content": "Sure?"}]
        third = await client.responses.create(model=model, input=items, instructions="Be brief.", tools=[TOOL])
        assert third.output_text == "Yes"
        return 1.0

    sampler = policy(CALL, "It is 3", "Yes")
    sample = play(with_client(talks), sampler)
    assert (sample.error, sample.reward, sample.turns, sample.branches) == (None, 1.0, 3, [])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    assert sampler.calls[0].prompt == prompt_of(messages, tools=[CHAT_TOOL])
    assert sampler.calls[0].max_tokens == 90
    continues(sampler, CALL, "It is 3")


def test_a_stream_of_responses_is_the_answer_piece_by_piece_in_the_client_s_own_events() -> None:
    async def streams(client: AsyncOpenAI, model: str) -> float:
        kinds, deltas = list[str](), {"text": "", "arguments": ""}
        async with client.responses.stream(model=model, input="hi", tools=[TOOL]) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    deltas["text"] += event.delta
                if event.type == "response.function_call_arguments.delta":
                    deltas["arguments"] += event.delta
            final = await stream.get_final_response()
        assert deltas == {"text": "So.", "arguments": '{"a": 1}'}
        assert (final.output_text, final.output[1].type) == ("So.", "function_call")
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 2
        return 1.0

    sample = play(with_client(streams), policy(CALL))
    assert (sample.error, sample.reward) == (None, 1.0)


def test_a_response_that_its_limit_cut_is_incomplete() -> None:
    dialect = Responses()
    asked = dialect.read({"input": "hi", "max_output_tokens": 3}, TERMS, {})
    body = dialect.body(api.Answer("abc", (), "length", [1, 2], [3, 4, 5], [], []), asked, 7)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [kind for kind, _ in dialect.events(body, asked)][-1] == "response.incomplete"


def test_a_response_of_another_episode_is_not_taken_for_one_of_this() -> None:
    episodes: list[dict[str, Any]] = [{}, {}]
    for said in episodes:
        dialect = Responses()
        dialect.body(api.Answer("a", (), "stop", [1], [2], [], []), dialect.read({"input": "hi"}, TERMS, said), 1)
    (own,), (other,) = episodes
    Responses().read({"input": "more", "previous_response_id": own}, TERMS, episodes[0])
    with refused(BadRequest, "'previous_response_id'"):
        Responses().read({"input": "more", "previous_response_id": other}, TERMS, episodes[0])


def test_what_responses_cannot_have_reaches_the_client_by_its_name() -> None:
    async def asks(client: AsyncOpenAI, model: str) -> float:
        for parameters in ({"previous_response_id": "resp_9"}, {"text": {"format": {"type": "json_object"}}}):
            with pytest.raises(BadRequestError) as bad:
                await client.responses.create(model=model, input="x", **parameters)  # type: ignore[arg-type]
            assert [bad.value.param] == [*parameters]
        with pytest.raises(NotFoundError):
            await client.responses.create(model="judge", input="x")
        await client.responses.create(model=f"{model}/helper", input="x")
        return 1.0

    sampler = policy("a")
    sample = play(with_client(asks), sampler)
    assert (sample.error, len(sampler.calls), sample.name) == (None, 1, "helper")


REFUSED: dict[str, list[Any]] = {
    "background": [True], "conversation": ["c"], "include": [["reasoning"]], "prompt": [{"id": "p"}],
    "reasoning": [{"effort": "low"}], "text": [{"format": {"type": "json_schema"}}, {"verbosity": "low"}],
    "truncation": ["auto"], "tool_choice": ["required", {"type": "function", "name": "add"}], "top_p": [0.5],
    "temperature": [0], "top_logprobs": [2], "parallel_tool_calls": [False], "max_output_tokens": [0],
    "tools": [[{"type": "web_search"}]], "input": [5, [{"type": "reasoning"}], []], "instructions": [3],
    "max_tokens": [5], "max_completion_tokens": [5], "messages": [[]], "logprobs": [True], "return_token_ids": [True],
}  # fmt: skip


@pytest.mark.parametrize(("name", "found"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_a_response_would_not_get_is_refused_by_name(name: str, found: Any) -> None:
    with refused(BadRequest, f"'{name}'") as caught:
        Responses().read({"input": "hi", name: found}, TERMS, {})
    assert (caught.value.parameter, caught.value.status) == (name, 400)


def test_every_parameter_of_the_client_s_responses_is_decided_on() -> None:
    unknown = set[str]()
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for name in set(inspect.signature(ResponsesClient.create).parameters) - of_the_client:
        try:
            Responses().read({"input": "hi", name: "some value"}, TERMS, {})
        except BadRequest as error:
            unknown |= {name} if UNKNOWN in str(error) else set()
    assert unknown <= {"access_programs", "context_management", "image", "max_tool_calls"}, "refused as unknown"


# ---------------------------------------------------------------- Anthropic's messages


async def post(url: str, key: str, **body: Any) -> tuple[int, Any]:
    """(status, JSON or the stream's text) of a request as Anthropic's client sends it."""
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    async with aiohttp.request("POST", url, json={"max_tokens": 99, **body}, headers=headers) as answer:
        return answer.status, await (answer.text() if body.get("stream") else answer.json())


def played(talk: Any, *said: str) -> tuple[Sample, Any]:
    async def agent(problem: Any, *, base_url: str, api_key: str, model: str, seed: int) -> Any:
        return await talk(base_url, api_key, model)

    sampler = policy(*said)
    return play(agent, sampler), sampler


ADD = {"name": "add", "description": "adds", "input_schema": SCHEMA}


def test_messages_use_tools_and_get_their_results() -> None:
    async def talks(base_url: str, key: str, model: str) -> float:
        asked: Any = {"model": model, "system": [{"type": "text", "text": "Be brief."}], "tools": [ADD]}
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}]
        status, first = await post(f"{base_url}/messages", key, messages=history, **asked)
        text, use = first["content"]
        assert (status, first["type"], first["role"], first["stop_reason"]) == (200, "message", "assistant", "tool_use")
        assert (text, use["name"], use["input"]) == ({"type": "text", "text": "So."}, "add", {"a": 1})
        assert (first["stop_sequence"], first["usage"]["output_tokens"]) == (None, len(CALL) + 1)
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}
        history += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        # the client itself adds /v1 to the address
        status, second = await post(f"{base_url}/v1/messages", key, messages=history, stop_sequences=["!"], **asked)
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "3"}], "stop_sequence")
        assert second["stop_sequence"] == "!"
        return 1.0

    sample, sampler = played(talks, CALL, "3! Yes.")
    assert (sample.error, sample.reward, sample.turns, sample.branches) == (None, 1.0, 2, [])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    assert sampler.calls[0].prompt == prompt_of(messages, tools=[CHAT_TOOL])
    continues(sampler, CALL)
    assert (
        qwen()
        .decode(sampler.calls[1].prompt)
        .endswith("<tool_response>\n3\n</tool_response><eos>\n<|im_start|>assistant\n")
    )


def test_a_stream_of_messages_has_the_documented_events() -> None:
    async def streams(base_url: str, key: str, model: str) -> float:
        history = [{"role": "user", "content": "hi"}]
        status, found = await post(f"{base_url}/messages", key, model=model, messages=history, tools=[ADD], stream=True)
        parts = [part.split("\n") for part in found.strip().split("\n\n")]
        events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
        assert status == 200 and all(name == data["type"] for name, data in events)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [name for name, _ in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert events[0][1]["message"]["content"] == []
        assert events[2][1] == {
            "type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "So."},
        }  # fmt: skip
        assert events[4][1]["content_block"]["input"] == {}
        assert json.loads(events[5][1]["delta"]["partial_json"]) == {"a": 1}
        assert events[7][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert events[7][1]["usage"] == {"output_tokens": len(CALL) + 1}
        return 1.0

    sample, _ = played(streams, CALL)
    assert (sample.error, sample.reward) == (None, 1.0)


def test_errors_of_messages_have_anthropic_s_shape() -> None:
    async def errs(base_url: str, key: str, model: str) -> float:
        history = [{"role": "user", "content": "hi"}]
        found = [
            await post(f"{base_url}/messages", "guessed", model=model, messages=history),
            await post(f"{base_url}/messages", key, model="claude", messages=history),
            await post(f"{base_url}/messages", key, model=model, messages=history, top_k=5),
        ]
        kinds = [(status, body["type"], body["error"]["type"]) for status, body in found]
        assert kinds == [
            (401, "error", "authentication_error"),
            (404, "error", "not_found_error"),
            (400, "error", "invalid_request_error"),
        ]
        assert "'top_k'" in found[2][1]["error"]["message"]
        return (await post(f"{base_url}/messages", key, model=model, messages=history))[0]

    sample, sampler = played(errs, "a")
    assert (sample.error, sample.reward, len(sampler.calls)) == (None, 200.0, 1)


HI = [{"role": "user", "content": "hi"}]
BAD: dict[str, list[Any]] = {
    "thinking": [{"type": "enabled", "budget_tokens": 1024}], "top_p": [0.9], "top_k": [40], "temperature": [0],
    "tool_choice": [{"type": "any"}, {"type": "tool", "name": "add"}, {"type": "auto", "disable_parallel_tool_use": 1}],
    "max_tokens": [0, None], "stop_sequences": ["x", [1]], "tools": [[{"type": "bash_20250124", "name": "bash"}]],
    "messages": [[], [{"role": "user", "content": [{"type": "image"}]}], [*HI, {"role": "assistant", "content": "So"}]],
    "system": [5], "container": ["c"], "stop": ["x"], "max_completion_tokens": [5], "logprobs": [True],
    "return_token_ids": [True],
}  # fmt: skip


@pytest.mark.parametrize(("name", "found"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_a_message_would_not_get_is_refused_by_name(name: str, found: Any) -> None:
    with refused(BadRequest, f"'{name}'") as caught:
        Messages().read({"messages": HI, "max_tokens": 9, name: found}, TERMS, {})
    assert (caught.value.parameter, caught.value.status) == (name, 400)


def test_a_message_s_neutral_values_are_taken_and_no_tools_are_offered_with_tool_choice_none() -> None:
    body = {
        "messages": HI,
        "max_tokens": 9,
        "tools": [ADD],
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
    }
    assert json.loads(Messages().read({**body, "tool_choice": {"type": "auto"}}, TERMS, {}).tools) == [CHAT_TOOL]
    assert Messages().read({**body, "tool_choice": {"type": "none"}}, TERMS, {}).tools == ""
