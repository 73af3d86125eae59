"""OpenEnv and verifiers.

Both libraries ask for packages that do not fit vLLM's, so neither is in the test environment: interpreters that have
them are named by SLIPSTREAM_OPENENV_PYTHON and SLIPSTREAM_VERIFIERS_PYTHON. launch/test.sh builds one for both
(launch/setup.sh adapters). OpenEnv is tested against the words recorded from openenv-core 0.3.0 as well.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from chat_tokenizers import qwen, speaker
from fleet_fakes import ScriptedSampler, in_turn, make_driver, new_host, prompts_of, say

from common.rollouts import Sample
from rollout_fleet.agents.driver import AgentDriver
from rollout_fleet.agents.verifiers_agent import agent
from rollout_fleet.environments import registry
from rollout_fleet.environments.adapters.openenv import OpenEnv
from rollout_fleet.environments.isolation.process_host import ProcessHost, ProcessStage
from rollout_fleet.environments.protocol import Budget, Limits
from rollout_fleet.episode.driver import EpisodeRules
from rollout_fleet.episode.rendering import Renderer

HERE = Path(__file__).parent
INT_PARSING = {
    "type": "int_parsing",
    "loc": ["guess"],
    "msg": "Input should be a valid integer, unable to parse string as an integer",
    "input": "x",
    "url": "https://errors.pydantic.dev/2.14/v/int_parsing",
}


def hint(text: str, reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"hint": text}, "reward": reward, "done": done}}


class RecordedServer:
    """Answers as openenv-core 0.3.0 answered for the game of openenv_game.py."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        session = web.WebSocketResponse()
        await session.prepare(request)
        number = 0
        async for message in session:
            if message.type is not WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            self.heard.append(asked)
            if asked["type"] == "close":
                break
            if asked["type"] == "reset":
                number = asked["data"]["seed"] % 10
                await session.send_str(json.dumps(hint("guess 0-9", None, False)))
                continue
            await session.send_str(json.dumps(self.step(asked["data"], number)))
        return session

    def step(self, action: dict[str, Any], number: int) -> dict[str, Any]:
        said = str(action.get("guess"))
        if said == "crash":
            return {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}
        if not said.isdigit():
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [INT_PARSING]}
            return {"type": "error", "data": data}
        if int(said) == number:
            return hint("right", 1.0, True)
        return hint("higher" if int(said) < number else "lower", 0.0, False)


def play_recorded(said: list[str], options: dict[str, Any] | None = None) -> tuple[Sample, list[str], list[Any]]:
    server = RecordedServer()

    async def once() -> tuple[Sample, list[str]]:
        app = web.Application()
        app.router.add_get("/ws", server.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await play(f"http://127.0.0.1:{runner.addresses[0][1]}", said, options)
        finally:
            await runner.cleanup()

    return (*asyncio.run(once()), server.heard)


async def play(url: str, said: list[str], options: dict[str, Any] | None = None) -> tuple[Sample, list[str]]:
    sampler = ScriptedSampler(in_turn(*map(say, said)))
    found = {"url": url, "action": "guess", "observation": "hint", **(options or {})}
    sample = await make_driver(sampler, OpenEnv, found).run({}, 12, group_seed=7)
    return sample, prompts_of(sampler)


def check_game(sample: Sample, prompts: list[str]) -> None:
    """What 3, x, 7 come to in the game, whoever serves it."""
    assert (sample.error, sample.reward, sample.turn_rewards) == (None, 1.0, [0.0, 0.0, 1.0])
    assert (sample.stop_reason, sample.metrics) == ("environment_done", {"malformed": 1.0})
    assert prompts[0] == "guess 0-9"
    assert prompts[1].endswith("\n\nhigher\n\n")
    assert "error: Input should be a valid integer" in prompts[2]


def test_a_session_of_openenv_is_an_episode() -> None:
    sample, prompts, heard = play_recorded(["3", "x", " 7 "])
    check_game(sample, prompts)
    assert [message["type"] for message in heard] == ["reset", "step", "step", "step", "close"]
    assert heard[0]["data"] == {"seed": 7} and heard[3]["data"] == {"guess": "7"}


def test_whole_actions_and_observations_are_json() -> None:
    sample, prompts, heard = play_recorded(['{"guess": 7}'], {"action": "", "observation": ""})
    assert (sample.reward, prompts[0]) == (1.0, '{"hint": "guess 0-9"}')
    assert heard[1]["data"] == {"guess": 7}


def test_an_error_of_the_server_fails_the_sample_with_its_words() -> None:
    sample, _, heard = play_recorded(["crash"])
    assert sample.stop_reason == "environment_error" and "EXECUTION_ERROR: boom" in str(sample.error)
    assert heard[-1]["type"] == "close"


def test_a_server_that_is_not_there_fails_the_sample() -> None:
    sample, _ = asyncio.run(play("http://127.0.0.1:9", ["x"]))
    assert sample.stop_reason == "environment_error" and "127.0.0.1" in str(sample.error)


def interpreter(variable: str, library: str) -> str:
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} names no interpreter with {library}; `bash launch/setup.sh adapters` builds one")
    return found


@contextmanager
def real_openenv() -> Iterator[str]:
    python = interpreter("SLIPSTREAM_OPENENV_PYTHON", "openenv-core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, str(HERE / "openenv_game.py"), str(port)])
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < deadline, "the OpenEnv server did not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_the_real_openenv_server_is_spoken_to_in_the_same_words() -> None:
    with real_openenv() as url:
        check_game(*asyncio.run(play(url, ["3", "x", "7"])))


# ---------------------------------------------------------------- verifiers


def test_verifiers_is_named_like_an_environment_and_brings_its_own_limits() -> None:
    found: Any = registry.resolve("verifiers", {"env_id": "verifiers-game"})
    assert registry.is_agent(found) and found.LIMITS.process and found.PRELOAD == ("verifiers",)


def test_an_environment_of_verifiers_is_played_through_the_endpoint_and_judged_by_its_rubric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter("SLIPSTREAM_VERIFIERS_PYTHON", "verifiers")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    rows = tmp_path / "rows.jsonl"
    imports = "from pathlib import Path; from rollout_fleet.agents.verifiers_agent import export_rows"
    export = f"{imports}; export_rows('verifiers-game', Path({str(rows)!r}))"
    root = HERE.parents[2]
    subprocess.run([python, "-c", export], check=True, env={**os.environ, "PYTHONPATH": f"{root}:{HERE}"})
    problem = json.loads(rows.read_text().splitlines()[0])
    tokenizer = qwen()
    sampler, limits = speaker(tokenizer, "3", "7"), replace(agent.LIMITS, python=python)  # type: ignore[attr-defined]
    sample = asyncio.run(_once(sampler, limits, problem, python))
    assert (sample.error, sample.reward, sample.turns) == (None, 1.5, 2)
    assert sample.metrics["right"] == 1.5
    first, second = (call.prompt for call in sampler.calls)
    assert second[: len(first) + 2] == [*first, *tokenizer.encode("3"), tokenizer.eos_token_id]
    assert "wrong, again" in tokenizer.decode(second)


def test_a_verifiers_without_load_environment_is_refused_with_the_versions_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = ModuleType("verifiers")  # the root of 0.4.0 has nothing but its version
    newer.__version__ = "0.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    played = agent({}, base_url="", api_key="", model="policy", seed=0, env_id="my-env")
    with pytest.raises(RuntimeError, match=r"verifiers 0\.4\.0 has no load_environment: expected 0\.1 to 0\.3"):
        asyncio.run(played)


async def _once(sampler: ScriptedSampler, limits: Limits, problem: dict[str, Any], python: str) -> Sample:
    new_host()
    processes = ProcessHost(("rollout_fleet.agents.verifiers_agent", "verifiers"), python)
    options = {"env_id": "verifiers-game", "arguments": '{"bonus": 0.5}'}
    stage = ProcessStage("rollout_fleet.agents.verifiers_agent:agent", options, limits, 120.0, processes)
    renderer, budget = Renderer(qwen()), Budget(4, 200, 2000)
    driver = AgentDriver(sampler, renderer, stage, EpisodeRules(budget, timeout_s=120.0, limits=limits))
    try:
        return await driver.run(problem, 0)
    finally:
        await driver.close()
        processes.close()
