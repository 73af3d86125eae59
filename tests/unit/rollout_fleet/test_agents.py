"""Agents over HTTP, with the real openai client: what they return is the reward, what they do wrong is contained."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from common.config.schema import Config, ModelConfig, RolloutConfig, RunConfig, TasksConfig
from common.errors import SlipstreamError
from common.rollouts import Group, Sample, decode_group, encode_group
from rollout_fleet.agents.driver import AgentDriver
from rollout_fleet.driver_factory import build_driver
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.isolation.thread_backend import ThreadBackend
from rollout_fleet.environments.protocol import Budget, Limits
from rollout_fleet.episode.driver import EpisodeRules
from rollout_fleet.episode.rendering import Renderer
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until_async
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, new_host
from tests.unit.rollout_fleet.fleet_fakes import play as episode

Agent = Callable[..., Awaitable[Any]]
LIMITS = Limits(reset_s=LIMIT_S, step_s=LIMIT_S, cpu_s=300, memory_mib=2048)
HI: Any = [{"role": "user", "content": "hi"}]


def policy(*said: str | Exception) -> ScriptedSampler:
    return speaker(qwen(), *said)


def driver_of(
    agent: Agent | ProcessBackend, sampler: ScriptedSampler, budget: Budget | None = None, timeout_s: float = LIMIT_S
) -> AgentDriver:
    backend = agent if isinstance(agent, ProcessBackend) else ThreadBackend(agent, {}, new_host())
    rules = EpisodeRules(budget or Budget(4, 200, 2000), timeout_s=timeout_s, limits=LIMITS)
    return AgentDriver(sampler, Renderer(qwen()), backend, rules)


def play(agent: Agent | ProcessBackend, sampler: ScriptedSampler, **more: Any) -> Sample:
    return episode(driver_of(agent, sampler, **more), {"question": "1+2?"})


def with_client(talk: Callable[[AsyncOpenAI, str], Awaitable[Any]]) -> Agent:
    """An agent that asks the named model through the openai client."""

    async def agent(problem: dict[str, Any], *, base_url: str, api_key: str, model: str, seed: int) -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await talk(client, model)

    return agent


@with_client
async def asks_once(client: AsyncOpenAI, model: str) -> float:
    await client.completions.create(model=model, prompt="x")
    return 1.0


def test_an_agent_s_conversation_becomes_the_sample_with_its_tokens_and_its_reward() -> None:
    async def two_turns(client: AsyncOpenAI, model: str) -> Any:
        messages: Any = list(HI)
        for _ in range(2):
            said = await client.chat.completions.create(model=model, messages=messages, logprobs=True)
            messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "sure?"}]
        assert said.choices[0].logprobs is not None and said.choices[0].logprobs.content is not None
        tokens = len(said.choices[0].logprobs.content)
        return {"reward": float(messages[3]["content"] == "3"), "metrics": {"tokens": tokens}}

    sampler = policy("I think 3", "3")
    sample = play(with_client(two_turns), sampler)
    assert (sample.error, sample.reward, sample.turn_rewards) == (None, 1.0, [0.0, 1.0])
    assert (sample.stop_reason, sample.turns, sample.metrics["tokens"]) == ("environment_done", 2, 2.0)
    tokenizer = qwen()
    tokens, mask = sample.tokens.numpy().tolist(), sample.loss_mask.numpy().tolist()
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "I think 3<eos>3<eos>"
    assert tokens == sampler.calls[1].prompt + tokenizer.encode("3") + [tokenizer.eos_token_id]
    assert tokens[: len(sampler.calls[0].prompt)] == sampler.calls[0].prompt
    logprobs = sample.behavior_logprobs.numpy()[sample.loss_mask.numpy() == 1].tolist()
    assert logprobs == [-0.5 - i for length in (10, 2) for i in range(length)]
    assert decode_group(encode_group(Group(0, [sample]))).samples[0] == sample


def test_a_stream_says_the_same_and_what_it_took_and_its_log_probabilities_when_asked() -> None:
    async def streams(client: AsyncOpenAI, model: str) -> float:
        plain = await client.chat.completions.create(model=model, messages=HI, stream=True)
        chunks = [chunk async for chunk in plain]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "three"
        assert chunks[-1].choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model=model, messages=HI, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        logprobs, usage = chunks[1].choices[0].logprobs, chunks[-1].usage
        assert logprobs is not None and logprobs.content is not None and usage is not None and not chunks[-1].choices
        pieces = [(entry.token, entry.logprob) for entry in logprobs.content]
        assert pieces == [(piece, -0.5 - i) for i, piece in enumerate([*"three", "<eos>"])]
        return float(usage.completion_tokens)

    sample = play(with_client(streams), policy("three", "three"))
    assert (sample.error, sample.reward) == (None, 6.0)


def test_completions_models_tools_and_token_ids_are_served_to_the_real_client() -> None:
    async def uses_all(client: AsyncOpenAI, model: str) -> float:
        assert [found.id async for found in client.models.list()] == [model]
        done = await client.completions.create(model=model, prompt="1+2=", max_tokens=9, logprobs=0)
        assert done.choices[0].text == "3" and done.usage is not None and done.usage.completion_tokens == 2
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        asked: Any = {"model": model, "messages": HI, "tools": tools, "extra_body": {"return_token_ids": True}}
        called = await client.chat.completions.create(**asked)
        begin, middle, end = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        assert called.choices[0].finish_reason == end.choices[0].finish_reason == "tool_calls"
        for (call,) in (called.choices[0].message.tool_calls, middle.choices[0].delta.tool_calls):
            assert call.function.arguments == '{"a": 1}'
        assert called.prompt_token_ids == begin.prompt_token_ids == sampler.calls[1].prompt
        assert called.choices[0].token_ids == middle.choices[0].token_ids == [*qwen().encode(said), qwen().eos_token_id]
        return 1.0

    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    sampler = policy("3", said, said)
    sample = play(with_client(uses_all), sampler)
    assert (sample.error, sample.reward) == (None, 1.0)
    # the completion and one of the chats are conversations of their own
    assert sorted(branch.sampled for branch in sample.branches) == [2, len(said) + 1]
    assert sample.metrics["branches"] == 2
    assert sample.sampled_all == 2 + 2 * (len(said) + 1)


async def status(url: str, key: str, body: bytes | None = None) -> int:
    """The HTTP status of one request without OpenAI's client."""
    method, headers = "GET" if body is None else "POST", {"Authorization": f"Bearer {key}"}
    async with aiohttp.request(method, url, data=body, headers=headers) as response:
        return response.status


async def test_a_key_is_needed_and_void_when_the_episode_is_over() -> None:
    kept: list[str] = []

    async def looks(client: AsyncOpenAI, model: str) -> float:
        keys, base_url = (client.api_key, "guessed", "", *kept), str(client.base_url)
        found = [await status(f"{base_url}models", key) for key in keys]
        assert found[:3] == [200, 401, 401] and found[3:] == [401] * len(kept)
        assert base_url.startswith("http://127.0.0.1:")
        kept.append(client.api_key)
        await client.completions.create(model=model, prompt="x")
        return 1.0

    driver = driver_of(with_client(looks), policy("a", "b"))
    assert [(await driver.run({}, n)).error for n in range(2)] == [None, None]
    await driver.close()
    assert len(set(kept)) == 2


@pytest.mark.parametrize(
    "given", [{}, {"NO_PROXY": "corp.example"}, {"no_proxy": "corp.example, 127.0.0.1"}, {"no_proxy": "*"}]
)
def test_an_agent_reaches_the_policy_past_the_proxy_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # without an answer
        proxy.settimeout(0.0)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        sample = play(asks_once, policy("x"))
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert (sample.error, sample.reward) == (None, 1.0)
    found = {os.environ["no_proxy"], os.environ["NO_PROXY"]}
    assert found == {"*"} if "*" in given.values() else all(("corp.example" in each) == bool(given) for each in found)


def job(folder: Path, environment: str, **rollout: Any) -> Config:
    """A job whose rollout section has only the keys that are given."""
    qwen().save_pretrained(folder / "model")
    return Config(
        run=RunConfig(name="test", dir=str(folder / "run"), steps=1),
        model=ModelConfig(path=str(folder / "model")),
        tasks=TasksConfig(environment=environment, dataset="-"),
        rollout=RolloutConfig(**rollout),
    )


TALKS = """
from openai import AsyncOpenAI

async def agent(problem, *, base_url, api_key, model, seed):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            said = await client.chat.completions.create(model=model, messages=messages)
            messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    return 1.0
"""


@pytest.mark.parametrize(("rollout", "turns"), [({}, 3), ({"max_turns": 2}, 2)])
def test_an_agent_plays_as_many_turns_as_it_likes_unless_the_config_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, int], turns: int
) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    monkeypatch.syspath_prepend(tmp_path)
    driver = build_driver(job(tmp_path, "talks:agent", **rollout), policy("a", "b", "c"), new_host())
    sample = episode(driver, {})
    assert (sample.error, sample.turns, sample.reward) == (None, turns, float(turns == 3))


def test_the_answer_of_an_agent_that_its_budget_cut_is_penalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    monkeypatch.syspath_prepend(tmp_path)
    config = job(tmp_path, "talks:agent", max_tokens=4)
    tasks = msgspec.structs.replace(config.tasks, truncated="penalized")
    driver = build_driver(msgspec.structs.replace(config, tasks=tasks), policy("a", "b", "c"), new_host())
    sample = episode(driver, {})
    assert (sample.error, sample.stop_reason, sample.reward) == (None, "length", -1.0)
    assert sample.metrics["overlong_penalty"] == -1.0


def test_an_environment_plays_as_many_turns_as_it_likes_unless_the_config_has_a_limit(tmp_path: Path) -> None:
    def play(**rollout: int) -> Sample:
        driver = build_driver(job(tmp_path, "number_guessing", **rollout), policy("1", "2", "3"), new_host())
        return asyncio.run(driver.run({"number": 3}, 0))

    assert [(s.stop_reason, s.reward) for s in (play(), play(max_turns=2))] == [
        ("environment_done", 1.0), ("turn_limit", 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "reason", "bound"),
    [
        (Budget(2, 200, 2000), "turn_limit", "rollout.max_turns"),
        (Budget(None, 4, 2000), "length", "rollout.max_tokens"),
        (Budget(None, 200, 110), "length", "rollout.engine.max_model_len (110)"),
    ],
)
def test_an_agent_that_runs_into_its_budget_keeps_its_sample_and_hears_the_key_of_the_bound(
    budget: Budget, reason: str, bound: str
) -> None:
    errors: list[BadRequestError] = []

    async def endless(client: AsyncOpenAI, model: str) -> float:
        messages = list(HI)
        while True:
            try:
                said = await client.chat.completions.create(model=model, messages=messages)
            except BadRequestError as error:
                errors.append(error)
                raise
            messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]

    sample = play(with_client(endless), policy("a", "b", "c"), budget=budget)
    assert (sample.error, sample.stop_reason, sample.reward, sample.turns) == (None, reason, 0.0, 2)
    (error,) = errors
    assert bound in str(error)
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("how", "reason", "why"),
    [
        ("raises", "environment_error", "the agent raised RuntimeError: no idea"),
        ("returns text", "environment_error", "expected a number"),
        ("says nothing", "environment_error", "without a call of the model"),
        ("hangs", "timeout", "not done within 1 s"),
    ],
)
def test_what_an_agent_does_wrong_fails_its_sample_with_the_reason(how: str, reason: str, why: str) -> None:
    async def agent(problem: Any, **_: Any) -> Any:
        if how == "raises":
            raise RuntimeError("no idea")
        if how == "hangs":
            await asyncio.Event().wait()
        return "good" if how == "returns text" else 1.0

    sample = play(agent, policy("a"), timeout_s=1.0 if how == "hangs" else LIMIT_S)
    assert sample.stop_reason == reason and why in str(sample.error)


def test_a_dead_engine_is_not_the_agent_s_fault() -> None:
    with refused(SlipstreamError, "engine died"):
        play(asks_once, policy(SlipstreamError("engine died")))


def test_a_parameter_that_is_not_honoured_reaches_the_agent_by_name_and_samples_nothing() -> None:
    async def bends(client: AsyncOpenAI, model: str) -> float:
        asked: list[dict[str, Any]] = [{"n": 2}, {"logit_bias": {"5": 100}}]
        for parameters in asked:
            with pytest.raises(BadRequestError) as bent:
                await client.chat.completions.create(model=model, messages=HI, **parameters)
            assert ([bent.value.param], bent.value.code) == ([*parameters], "unsupported_value")
            assert bent.value.type == "invalid_request_error"
        with pytest.raises(NotFoundError) as other:
            await client.completions.create(model="judge", prompt="x")
        assert (other.value.param, other.value.code) == ("model", "model_not_found")
        await client.completions.create(model=model, prompt="x", temperature=1.0, top_p=1.0, user="me", best_of=1)
        return 1.0

    sampler = policy("a")
    sample = play(with_client(bends), sampler)
    assert (sample.error, len(sampler.calls)) == (None, 1)


def test_an_agent_runs_in_a_process_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import json, os, urllib.request

async def agent(problem, *, base_url, api_key, model, seed, bonus=0.0):
    body = json.dumps({"messages": [{"role": "user", "content": problem["question"]}]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
    answer = json.loads(urllib.request.urlopen(request, timeout=300).read())
    reward = float(answer["choices"][0]["message"]["content"] == "3") + bonus
    return {"reward": reward, "metrics": {"seed": seed, "pid": os.getpid()}}
"""
    (tmp_path / "outside_agent.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(ProcessHost(("outside_agent",))) as host:
        sample = play(ProcessBackend("outside_agent:agent", {"bonus": 0.5}, LIMITS, LIMIT_S, host, False), policy("3"))
    assert (sample.error, sample.reward, sample.stop_reason, sample.metrics["seed"]) == (None, 1.5, "stop", 7.0)
    assert sample.metrics["pid"] != os.getpid()


async def test_a_request_that_an_agent_leaves_behind_ends_with_the_episode() -> None:
    sampler = policy("3", "4")
    left: list[asyncio.Task[int]] = []
    done = threading.Event()

    async def leaves(problem: Any, **access: Any) -> float:
        async def ask() -> int:
            try:
                return int(await asks_once(problem, **access)) * 200
            except APIStatusError as error:
                return error.status_code

        assert await ask() == 200
        sampler.gate.clear()
        left.append(asyncio.create_task(ask()))
        left[0].add_done_callback(lambda _: done.set())
        await until_async(lambda: sampler.now, "the engine, which has the second request")
        return 1.0

    driver = driver_of(leaves, sampler)
    sample = await driver.run({}, 1)
    assert await asyncio.to_thread(done.wait, LIMIT_S)
    await driver.close()
    assert (sample.error, sample.turns, sampler.cancelled, sampler.now) == (None, 1, 1, 0)
    assert left[0].result() == 401


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"messages": [{"role": "assistant", "tool_calls": 5}]}'])
def test_a_body_that_no_client_sends_is_a_bad_request(body: bytes) -> None:
    async def odd(client: AsyncOpenAI, model: str) -> int:
        await client.completions.create(model=model, prompt="x")
        return await status(f"{client.base_url}chat/completions", client.api_key, body)

    assert play(with_client(odd), policy("a")).reward == 400.0
