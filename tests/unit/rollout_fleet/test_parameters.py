"""Every parameter of a request is honoured or refused by name; none is dropped in silence."""

import inspect
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions

from rollout_fleet.agents.api import ChatRequest, CompletionRequest, read
from rollout_fleet.agents.parameters import NEUTRAL, UNKNOWN, BadRequest
from rollout_fleet.episode.driver import Sampling

JOB = Sampling(temperature=0.7)
HI = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("logit_bias", {"50256": -100}),
        ("best_of", 4),
        ("n", 2),
        ("tool_choice", "required"),
        ("tool_choice", NAMED),
        ("parallel_tool_calls", False),
        ("function_call", {"name": "add"}),
        ("functions", [{"name": "add"}]),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("temperature", 1.0),
        ("temperature", 0),
        ("top_p", 0.95),
        ("top_k", 20),
        ("min_p", 0.05),
        ("min_tokens", 8),
        ("ignore_eos", True),
        ("seed", 1),
        ("stop", "\n"),
        ("stop_token_ids", [2]),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1, 2]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a+"}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("reasoning_effort", "low"),
        ("top_logprobs", 5),
        ("logprobs", 3),
        ("max_tokens", 0),
        ("max_completion_tokens", True),
        ("stream_options", {"include_obfuscation": False}),
        ("stream_options", {"include_usage": "no"}),
        ("stream", "false"),
        ("return_token_ids", 1),
        ("logprobs", "true"),
    ],
)
def test_what_would_change_tokens_or_answer_is_refused_by_name(name: str, found: Any) -> None:
    with pytest.raises(BadRequest, match=f"'{name}'") as refused:
        read({"messages": HI, name: found}, ChatRequest, JOB)
    assert (refused.value.parameter, refused.value.status) == (name, 400)


def test_log_probabilities_of_a_completion_are_those_of_the_sampled_tokens() -> None:
    assert read({"prompt": "x", "logprobs": 0}, CompletionRequest, JOB).scored
    for found in (1, True):
        with pytest.raises(BadRequest, match=r"'logprobs' .* 0 in a completion"):
            read({"prompt": "x", "logprobs": found}, CompletionRequest, JOB)


def test_values_that_ask_for_nothing_are_taken() -> None:
    asked = {name: values[0] for name, (values, _) in NEUTRAL.items() if values}
    asked |= {"messages": HI, "temperature": 0.7, "top_p": 1, "logprobs": True, "max_tokens": 5}
    found = read(asked, ChatRequest, JOB)
    assert (found.max_tokens, found.logprobs) == (5, True)
    read({**dict.fromkeys([*NEUTRAL, "tools", "stream", "max_tokens", "anything"]), "messages": HI}, ChatRequest, JOB)


def test_an_unknown_parameter_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(BadRequest, match=r"'max_token' is not served: .* did you mean 'max_tokens'") as refused:
        read({"prompt": "x", "max_token": 5}, CompletionRequest, JOB)
    assert (refused.value.parameter, refused.value.code) == ("max_token", "unsupported_parameter")


@pytest.mark.parametrize(
    ("create", "kind", "body"),
    [(Chats.create, ChatRequest, {"messages": HI}), (Completions.create, CompletionRequest, {"prompt": "x"})],
    ids=["chat", "completion"],
)
def test_every_parameter_of_openai_s_client_is_decided_on(create: Any, kind: Any, body: Any) -> None:
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for name in set(inspect.signature(create).parameters) - of_the_client:
        try:
            read({**body, name: "some value"}, kind, JOB)
        except BadRequest as refused:
            assert UNKNOWN not in str(refused), name
