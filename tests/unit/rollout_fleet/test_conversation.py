"""The conversations of an agent: found by their words, continued by their tokens; parameters honoured or refused."""

import asyncio
import inspect
import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions

from common.rollouts import VersionRun
from rollout_fleet.agents import api
from rollout_fleet.agents.api import NEUTRAL, UNKNOWN, BadRequest, ChatRequest, CompletionRequest, Terms, read
from rollout_fleet.agents.conversation import Conversation
from rollout_fleet.agents.stops import StopSampler
from rollout_fleet.environments.protocol import Budget, StopReason
from rollout_fleet.episode.driver import EpisodeFailed, EpisodeRules, Progress, Sampling
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Generation, Session
from tests.rigs.refusals import refused
from tests.unit.rollout_fleet.chat_tokenizers import QWEN, beginning, speaker, with_template
from tests.unit.rollout_fleet.fleet_fakes import CharacterTokenizer

ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Talk:
    """A conversation over a scripted policy; `say` is one request of an agent."""

    def __init__(self, *said: str, template: str = QWEN, ended: bool = True, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or with_template(template, "<eos>")
        self.sampler = speaker(self.tokenizer, *said, ended=ended)
        rules = EpisodeRules(Budget(8, 1000, 5000))
        self.talk = Conversation(self.sampler, Renderer(self.tokenizer), rules, Progress())

    def say(self, messages: list[dict[str, Any]], **more: Any) -> api.Answer:
        return asyncio.run(self.talk.answer(read({"messages": messages, **more}, ChatRequest, self.talk.terms)))

    def complete(self, prompt: Any, **more: Any) -> api.Answer:
        return asyncio.run(self.talk.answer(read({"prompt": prompt, **more}, CompletionRequest, self.talk.terms)))

    def prompts(self) -> list[list[int]]:
        return [call.prompt for call in self.sampler.calls]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_each_prompt_continues_the_exact_tokens_of_the_turn_before() -> None:
    talk = Talk(" <think>a</think> one ", "two", "three")
    first = talk.say([user("hi")])
    second = talk.say([user("hi"), assistant(first.text.strip()), user("more")])  # agents strip what they keep
    third = talk.say([user("hi"), assistant(first.text), user("more"), assistant(second.text), user("end")])
    prompts = talk.prompts()
    assert prompts[1][: len(prompts[0]) + len(first.tokens)] == prompts[0] + first.tokens
    assert prompts[2][: len(prompts[1]) + len(second.tokens)] == prompts[1] + second.tokens
    assert third.prompt_tokens == prompts[2]
    kept = talk.talk.longest()
    assert kept is not None and kept.path().tokens == prompts[2] + third.tokens
    assert kept.path().sampled == sum(len(a.tokens) for a in (first, second, third))
    assert [run.version for run in kept.path().runs] == [0, 1, 2]
    trained = [t for t, m in zip(kept.path().tokens, kept.path().mask, strict=True) if m]
    assert trained == first.tokens + second.tokens + third.tokens


def test_an_answer_whose_spaces_a_client_changed_is_continued_and_an_exact_repetition_comes_first() -> None:
    thought, other = "<think>\nhm\n</think>\n\nso", "<think>hm</think>so"
    talk = Talk(thought, other, "two", "three", "four")
    talk.say([user("hi")])
    talk.say([user("hi")])
    rebuilt = "<think>\n\nhm\n\n</think>\n\n\n\nso"  # as pydantic-ai does
    talk.say([user("hi"), assistant(rebuilt), user("more")])
    talk.say([user("hi"), assistant(other), user("more")])
    assert [turn.turns for turn in talk.talk.turns] == [1, 1, 2, 2]
    assert [turn.before for turn in talk.talk.turns[2:]] == talk.talk.turns[:2]
    talk.say([user("h i"), assistant(other), user("more")])
    assert talk.talk.turns[-1].before is None, "spaces of others do count"


def test_a_developer_s_message_is_the_system_s_since_templates_leave_out_roles_that_they_do_not_know() -> None:
    talk = Talk("one", "two")
    first = talk.say([{"role": "developer", "content": "Be brief."}, user("hi")])
    assert "<|im_start|>system\nBe brief." in talk.tokenizer.decode(first.prompt_tokens)
    talk.say([{"role": "system", "content": "Be brief."}, user("hi"), assistant(first.text), user("more")])
    assert [turn.turns for turn in talk.talk.turns] == [1, 2]


def test_a_request_that_continues_nothing_begins_a_conversation_of_its_own() -> None:
    talk = Talk("one", "a much longer answer", "x")
    talk.say([user("hi")])
    talk.say([user("something else")])
    talk.say([user("hi"), assistant("what was never said"), user("more")])
    assert [turn.turns for turn in talk.talk.turns] == [1, 1, 1]
    kept = talk.talk.longest()
    assert kept is not None and kept.path().tokens[-21:-1] == talk.tokenizer.encode("a much longer answer")


def test_a_continued_conversation_is_kept_once_and_a_branch_shares_its_root_and_leaves_it_as_it_is() -> None:
    talk = Talk("one", "two", "three")
    history: list[dict[str, Any]] = [user("hi")]
    for _ in range(2):
        history += [assistant(talk.say(history).text), user("more")]
    first, second = talk.talk.turns
    assert first.record is second.record and first.path() is not second.path()
    long = list(second.path().tokens)
    talk.say([*history[:2], user("another way")])
    branch, root = talk.talk.turns[2], long[: first.length]
    assert second.path().tokens == long and branch.path().tokens[: first.length] == root
    assert [prompt[: len(root)] for prompt in talk.prompts()[1:]] == [root, root]
    assert [turn.turns for turn in talk.talk.turns] == [1, 2, 2] and talk.talk.sampled == 4 + 4 + 6
    assert [run.version for run in branch.path().runs] == [0, 2]
    assert len({call.session for call in talk.sampler.calls}) == 1, "it may read what the engine kept of its root"


@settings(deadline=None, max_examples=30)
@given(choices=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_in_a_random_tree_every_sampled_token_trains_once_and_every_path_is_what_the_engine_saw(
    choices: list[int],
) -> None:
    """Each choice continues an earlier turn, or begins a conversation; answers are unlike each other."""
    talk = Talk(*(f"answer {n} " + "x" * (n % 4) for n in range(len(choices))))
    known: list[list[dict[str, Any]]] = [[]]
    answers: list[api.Answer] = []
    for number, choice in enumerate(choices):
        asked = [*known[choice % len(known)], user(f"question {number}")]
        answers.append(talk.say(asked))
        known.append([*asked, assistant(answers[-1].text)])
    whole = talk.talk.whole()
    records = [whole, *whole.branches]
    seen = [call.prompt + answer.tokens for call, answer in zip(talk.sampler.calls, answers, strict=True)]
    ends = [tokens for tokens in seen if not any(other[: len(tokens)] == tokens for other in seen if other != tokens)]
    assert sorted(record.tokens for record in records) == sorted(ends), "all leaves, each token as the engine saw it"
    trained: dict[tuple[int, ...], int] = {}
    for record in records:
        assert all(record.mask[i] == 0 for i in range(len(record.tokens)) if not _within(record.spans, i))
        for start, end in record.spans:
            assert len(set(record.mask[start:end])) == 1
            key = tuple(record.tokens[:end])
            trained[key] = trained.get(key, 0) + record.mask[start]
        kept = [value for value, mask in zip(record.logprobs, record.mask, strict=True) if mask]
        assert 0.0 not in kept and len(kept) == record.sampled
    assert trained == {tuple(tokens): 1 for tokens in seen}
    assert sum(record.sampled for record in records) == sum(len(answer.tokens) for answer in answers)


def _within(spans: list[tuple[int, int]], index: int) -> bool:
    return any(start <= index < end for start, end in spans)


def test_a_request_that_the_engine_refuses_leaves_the_conversation_as_it_was() -> None:
    talk = Talk("one", "two")
    first = talk.say([user("hi")])
    history = [user("hi"), assistant(first.text), user("more")]
    respond, talk.sampler.respond = talk.sampler.respond, lambda _: ValueError("too long")
    with refused(EpisodeFailed, "too long"):
        talk.say(history)
    talk.sampler.respond = respond
    prompts = talk.prompts()
    assert talk.say(history).prompt_tokens == prompts[1]


def test_tool_calls_come_out_as_calls_and_their_answers_go_back_in() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    talk = Talk(f"Let me see.{call}", "3")
    first = talk.say([user("1+2?")], tools=ADD)
    assert (first.text, first.finish_reason) == ("Let me see.", "tool_calls")
    ((name, made),) = first.calls
    assert (made.name, made.arguments) == ("add", '{"a": 1}')
    wire = {"id": name, "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1}, indent=1)}}
    back = [user("1+2?"), assistant(first.text, tool_calls=[wire])]
    second = talk.say([*back, {"role": "tool", "tool_call_id": name, "content": "3"}], tools=ADD)
    prompts = talk.prompts()
    assert prompts[1][: len(prompts[0]) + len(first.tokens)] == prompts[0] + first.tokens
    assert talk.tokenizer.decode(prompts[1]).endswith(
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><eos>\n<|im_start|>assistant\n"
    )
    assert second.finish_reason == "stop"


def test_a_template_sees_no_empty_list_of_calls_and_a_repeated_call_needs_no_id() -> None:
    made = {"id": None, "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [user("hi"), assistant(None, tool_calls=[], name="", tool_call_id=""), assistant("", tool_calls=[made])]
    *plain, said = read({"messages": messages}, ChatRequest, Terms(Sampling())).messages
    assert plain == [user("hi"), assistant("")]
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


def test_what_looks_like_a_call_is_text_where_there_are_no_tools() -> None:
    said = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    answer = Talk(said).say([user("hi")])
    assert (answer.text, answer.calls) == (said, ())


def test_a_turn_that_was_cut_off_is_continued_behind_the_template_s_own_end() -> None:
    talk = Talk("one", "two", ended=False)
    first = talk.say([user("hi")], max_tokens=3)
    assert first.finish_reason == "length" and talk.sampler.calls[0].max_tokens == 3
    talk.say([user("hi"), assistant("one"), user("more")])
    prompts = talk.prompts()
    assert prompts[1][: len(prompts[0]) + 3] == prompts[0] + first.tokens
    assert talk.tokenizer.decode(prompts[1][len(prompts[0]) + 3 :]).startswith("<eos>\n<|im_start|>user")


def test_completions_continue_texts_and_token_ids_exactly() -> None:
    talk = Talk(" one", " two", " three")
    first = talk.complete("Count:")
    second = talk.complete("Count: one and")
    third = talk.complete(second.prompt_tokens + second.tokens + [40, 41])
    encode = talk.tokenizer.encode
    assert second.prompt_tokens == encode("Count:") + first.tokens + encode(" and")
    assert third.prompt_tokens == second.prompt_tokens + second.tokens + [40, 41]
    kept = talk.talk.longest()
    assert kept is not None and kept.path().turns == 3


@pytest.mark.parametrize("chat", [True, False])
def test_a_conversation_and_a_completion_begin_as_the_tokenizer_begins_a_text(chat: bool) -> None:
    talk = Talk(" one", " two", tokenizer=beginning())
    encode = partial(talk.tokenizer.encode, add_special_tokens=False)
    first = talk.say([user("Count:")]) if chat else talk.complete("Count:")
    said = [user("Count:"), assistant(" one"), user("and")]
    second = talk.say(said) if chat else talk.complete("Count: one and")
    assert first.prompt_tokens == encode("<bos>Count:")
    new = "\n\nand\n\n" if chat else " and"
    assert second.prompt_tokens == first.prompt_tokens + first.tokens + encode(new)


NO_IDS = ([-1], [1, -5], [True], [1.5], [[1]], {"a": 1}, ["a", "b"])


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ({}, "`messages`"),
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"content": "x"}]}, "`role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ({"messages": [assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]}, "tool_calls"),
        *(({"prompt": prompt}, "token ids") for prompt in NO_IDS),
    ],
)
def test_what_could_not_be_recorded_exactly_is_refused_with_the_reason(body: Any, fact: str) -> None:
    name = "prompt" if "prompt" in body else "messages"
    with refused(BadRequest, fact) as caught:
        read(body, CompletionRequest if name == "prompt" else ChatRequest, Terms(Sampling()))
    assert caught.value.parameter == name


def test_a_template_that_refuses_is_a_bad_request() -> None:
    with refused(BadRequest, "alternate"):
        Talk("x", template="{{ raise_exception('roles must alternate') }}").say([user("hi")])


# ---------------------------------------------------------------- names, temperatures, stops


def test_a_sub_agent_has_conversations_of_its_own_and_a_frozen_one_is_served_and_not_trained() -> None:
    talk = Talk("plan", "a long judgement", "search", "done")
    talk.talk.terms = Terms(Sampling(), agents={"searcher": True, "judge": False})
    talk.say([user("hi")])
    judged = talk.say([user("good?")], model="policy/judge")
    talk.say([user("hi")], model="policy/searcher")
    talk.say([user("hi"), assistant("plan"), user("more")], model="policy/searcher")  # the agent said it, not this one
    whole = talk.talk.whole()
    assert len({call.session for call in talk.sampler.calls}) == 4
    assert [(record.name, record.turns) for record in (whole, *whole.branches)] == [
        ("", 1), ("judge", 1), ("searcher", 1), ("searcher", 1),
    ]  # fmt: skip
    judge = whole.branches[0]
    assert judge.tokens[-len(judged.tokens) :] == judged.tokens and judge.spans
    assert (sum(judge.mask), judge.runs, judge.sampled) == (0, [], 0) and set(judge.logprobs) == {0.0}
    assert talk.talk.frozen == len(judged.tokens)
    assert talk.talk.sampled == talk.talk.frozen + sum(r.sampled for r in (whole, *whole.branches))
    with refused(BadRequest, "'policy/judge'", "'policy/searcher'") as caught:
        talk.say([user("hi")], model="policy/sercher")
    assert (caught.value.parameter, caught.value.code, caught.value.status) == ("model", "model_not_found", 404)


@pytest.mark.parametrize("name", ["other", "policy/", "policy/a b", "policy/" + "x" * 65, "policy/a/b"])
def test_a_model_that_is_no_name_is_not_found(name: str) -> None:
    with refused(BadRequest, "'policy'") as caught:
        read({"messages": HI, "model": name}, ChatRequest, JOB)
    assert (caught.value.parameter, caught.value.status) == ("model", 404)
    assert read({"messages": HI, "model": "policy/a.B-1"}, ChatRequest, JOB).agent == "a.B-1"


def test_each_turn_is_sampled_at_the_temperature_that_its_request_names_and_it_is_recorded() -> None:
    talk = Talk("one", "two", "three", "four")
    history: list[dict[str, Any]] = [user("hi")]
    for temperature in (None, 0.5, 0.5, 1.0):
        history += [assistant(talk.say(history, temperature=temperature).text), user("more")]
    assert [call.temperature for call in talk.sampler.calls] == [1.0, 0.5, 0.5, 1.0]
    record = talk.talk.whole()
    starts = [start for start, _ in record.spans]
    assert [(run.start, run.temperature) for run in record.temperatures] == [(starts[1], 0.5), (starts[3], 1.0)]
    sample = record.sample(StopReason.STOP)
    assert sample.temperature_runs == record.temperatures
    assert talk.talk.turns[0].path().temperatures == []


def test_an_evaluation_s_temperature_stands_for_the_job_s_and_another_that_is_named_is_honoured() -> None:
    talk = Talk("one", "two", "three")
    rules = EpisodeRules(Budget(8, 1000, 5000), Sampling(0.0), named=Sampling(0.7))
    talk.talk = Conversation(talk.sampler, Renderer(talk.tokenizer), rules, Progress())
    for temperature in (0.7, 0, 0.9):
        asked = read({"messages": HI, "temperature": temperature}, ChatRequest, talk.talk.terms)
        asyncio.run(talk.talk.answer(asked))
    assert [call.temperature for call in talk.sampler.calls] == [0.0, 0.0, 0.9]


def test_a_stop_ends_the_answer_keeps_its_tokens_as_sampled_and_shows_only_what_came_before() -> None:
    talk = Talk("one STOP two", "plain", " xSTOPy", "abc")
    first = talk.say([user("hi")], stop=["STOP", "two"], seed=3)
    encode = talk.tokenizer.encode
    assert (first.text, first.finish_reason, first.stop) == ("one ", "stop", "STOP")
    assert first.tokens == encode("one STOP") and talk.sampler.calls[0].seed == 3
    second = talk.say([user("hi"), assistant("one"), user("more")], stop="STOP")
    assert second.text == "plain" and second.tokens[-1] == talk.tokenizer.eos_token_id and second.stop is None
    prompts = talk.prompts()
    assert prompts[1][: len(prompts[0]) + len(first.tokens)] == prompts[0] + first.tokens
    assert talk.tokenizer.decode(prompts[1][len(prompts[0]) + len(first.tokens) :]).startswith(
        "<eos>\n<|im_start|>user"
    )
    third = talk.complete("Say", stop="STOP")
    assert (third.text, third.tokens) == (" x", encode(" xSTOP"))
    fourth = talk.complete("Say xSTOP again", stop_token_ids=encode("b"))
    assert fourth.prompt_tokens == encode("Say") + third.tokens + encode(" again")
    assert (fourth.text, fourth.tokens, fourth.finish_reason) == ("a", encode("ab"), "stop")
    assert [turn.cut for turn in talk.talk.turns] == [False] * 4


class Stepwise:
    """Continues a prompt of token 7 by 100, 101, ... and obeys its limit; each call is a new version's."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.sessions: list[Any] = []
        self.calls: list[tuple[int, int, int | None]] = []

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, temperature: float, top_p: float, seed: int | None, session: Any
    ) -> Generation:
        self.sessions.append(session)
        done = len(prompt_ids) - 1
        self.calls.append((done, max_tokens, seed))
        tokens = list(range(100 + done, 100 + min(done + max_tokens, self.length)))
        ended = done + len(tokens) == self.length and len(tokens) < max_tokens
        experts = np.arange(len(prompt_ids) + len(tokens) - 1, dtype=np.int16).reshape(-1, 1, 1) + 1000 * len(
            self.calls
        )
        runs = [VersionRun(0, len(self.calls) // 2)]
        logprobs = [-float(token) for token in tokens]
        return Generation(tokens, logprobs, runs, "stop" if ended else "length", experts)


SESSION = Session()


def stopped_at(token: int, length: int, room: int) -> tuple[Generation, Stepwise, StopSampler]:
    steps = Stepwise(length)
    sampler = StopSampler(steps, Renderer(CharacterTokenizer()), (chr(token),), frozenset())
    return asyncio.run(sampler.generate([7], room, 1.0, 1.0, 5, SESSION)), steps, sampler


def test_an_answer_with_a_stop_is_sampled_in_pieces_that_join_to_one() -> None:
    found, steps, sampler = stopped_at(100 + 70, length=500, room=400)
    assert found.tokens == list(range(100, 171)) and found.logprobs == [-float(t) for t in found.tokens]
    assert found.finish_reason == "stop" and sampler.text == "".join(map(chr, range(100, 170)))
    assert [(done, room) for done, room, _ in steps.calls] == [(0, 32), (32, 32), (64, 32)]
    assert steps.calls[0][2] == 5 and len({seed for *_, seed in steps.calls}) == 3, "no draws repeat"
    assert steps.sessions == [SESSION] * 3
    assert found.version_runs == [VersionRun(0, 0), VersionRun(32, 1)]
    assert found.routed_experts is not None
    assert found.routed_experts[:, 0, 0].tolist() == [
        *(1000 + i for i in range(32)), *(2000 + i for i in range(32, 64)), *(3000 + i for i in range(64, 71)),
    ]  # fmt: skip


def test_without_its_stop_an_answer_ends_by_its_end_token_or_at_its_limit() -> None:
    ended, _, sampler = stopped_at(7, length=40, room=400)
    assert (len(ended.tokens), ended.finish_reason, sampler.text) == (40, "stop", None)
    cut, steps, sampler = stopped_at(7, length=500, room=40)
    assert (len(cut.tokens), cut.finish_reason, sampler.text) == (40, "length", None)
    assert [room for _, room, _ in steps.calls] == [32, 8]


# ---------------------------------------------------------------- parameters


JOB = Terms(Sampling(temperature=0.7))
HI = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "add"}}


REFUSED: dict[str, list[Any]] = {
    "logit_bias": [{"50256": -100}], "best_of": [4], "n": [2], "tool_choice": ["required", NAMED],
    "parallel_tool_calls": [False], "function_call": [{"name": "add"}], "functions": [[{"name": "add"}]],
    "frequency_penalty": [0.1], "presence_penalty": [-0.1], "repetition_penalty": [1.1],
    "temperature": [0, -1, 2.5, math.nan, math.inf, True, "1"], "top_p": [0.95], "top_k": [20],
    "min_p": [0.05], "min_tokens": [8], "ignore_eos": [True], "seed": [-1, 1.5],
    "stop": [[1]], "stop_token_ids": [[-2]], "include_stop_str_in_output": [True],
    "bad_words": [["no"]], "allowed_token_ids": [[1, 2]],
    "response_format": [{"type": "json_object"}], "structured_outputs": [{"regex": "a+"}],
    "chat_template_kwargs": [{"enable_thinking": False}], "reasoning_effort": ["low"], "top_logprobs": [5],
    "logprobs": [3, "true"], "max_tokens": [0, -1], "max_completion_tokens": [True],
    "stream_options": [{"include_obfuscation": False}, {"include_usage": "no"}], "stream": ["false"],
    "return_token_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "found"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_would_change_tokens_or_answer_is_refused_by_name(name: str, found: Any) -> None:
    with refused(BadRequest, f"'{name}'") as caught:
        read({"messages": HI, name: found}, ChatRequest, JOB)
    assert (caught.value.parameter, caught.value.status) == (name, 400)


def test_log_probabilities_of_a_completion_are_those_of_the_sampled_tokens() -> None:
    assert read({"prompt": "x", "logprobs": 0}, CompletionRequest, JOB).scored
    for found in (1, True):
        with refused(BadRequest, "'logprobs'") as caught:
            read({"prompt": "x", "logprobs": found}, CompletionRequest, JOB)
        assert caught.value.parameter == "logprobs"


def test_values_that_ask_for_nothing_are_taken() -> None:
    asked = {name: values[0] for name, (values, _) in NEUTRAL.items() if values}
    asked |= {"messages": HI, "temperature": 0.7, "top_p": 1, "logprobs": True, "max_tokens": 5, "stop": []}
    found = read(asked, ChatRequest, JOB)
    assert (found.max_tokens, found.logprobs) == (5, True)
    read({**dict.fromkeys([*NEUTRAL, "tools", "stream", "max_tokens", "anything"]), "messages": HI}, ChatRequest, JOB)


def test_an_unknown_parameter_is_refused_with_the_nearest_known_one() -> None:
    with refused(BadRequest, "'max_token'", "'max_tokens'") as caught:
        read({"prompt": "x", "max_token": 5}, CompletionRequest, JOB)
    assert (caught.value.parameter, caught.value.code) == ("max_token", "unsupported_parameter")


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
        except BadRequest as error:
            assert UNKNOWN not in str(error), name
