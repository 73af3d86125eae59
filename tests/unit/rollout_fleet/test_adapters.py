"""OpenEnv and verifiers, under the interpreters of SLIPSTREAM_OPENENV_PYTHON and SLIPSTREAM_VERIFIERS_PYTHON.

Both libraries need packages that do not fit vLLM's; launch/test.sh builds an interpreter with both (setup.sh adapters).
"""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.schema import TasksConfig
from common.rollouts import Sample
from rollout_fleet.agents.driver import AgentDriver
from rollout_fleet.agents.verifiers_agent import agent
from rollout_fleet.environments.builtin.openenv import OpenEnv
from rollout_fleet.environments.description import check_environment
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.protocol import Action, Budget
from rollout_fleet.episode.driver import EpisodeRules
from rollout_fleet.episode.rendering import Renderer
from tests.rigs.redis_servers import free_port
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, in_turn, make_driver, prompts_of, say
from tests.unit.rollout_fleet.fleet_fakes import play as episode

HERE = Path(__file__).parent


def interpreter(variable: str, library: str) -> str:
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} names no interpreter with {library}; `bash launch/setup.sh adapters` builds one")
    return found


@contextlib.contextmanager
def served(command: list[str], port: int, folder: Path = HERE) -> Iterator[str]:
    """The address of an OpenEnv server while it runs."""
    server = subprocess.Popen(command, cwd=folder)

    def listens() -> bool:
        assert server.poll() is None, "the OpenEnv server ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens, every_s=0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def openenv() -> Iterator[str]:
    """The address of a real OpenEnv server with the game of openenv_game.py."""
    python = interpreter("SLIPSTREAM_OPENENV_PYTHON", "openenv")
    port = free_port()
    with served([python, str(HERE / "openenv_game.py"), str(port)], port) as url:
        yield url


def play(url: str, said: list[str], turns: int = 8, tokens: int = 100, **options: str) -> tuple[Sample, list[str]]:
    sampler = ScriptedSampler(in_turn(*map(say, said)))
    driver = make_driver(
        sampler,
        OpenEnv,
        {"url": url, "action": "guess", "observation": "hint", **options},
        Budget(turns, tokens, 10 * tokens),
    )
    return episode(driver, {}, 12, 7), prompts_of(sampler)


def test_a_session_of_openenv_is_an_episode_whose_samples_share_a_seed(openenv: str) -> None:
    sample, prompts = play(openenv, ["3", "x", " 7 "])
    assert (sample.error, sample.reward, sample.turn_rewards) == (None, 1.0, [0.0, 0.0, 1.0])
    assert (sample.stop_reason, sample.metrics) == ("environment_done", {"malformed": 1.0})
    assert prompts[0] == "guess 0-9"
    assert prompts[1].endswith("\n\nhigher\n\n")
    assert "valid integer" in prompts[2]


def test_whole_actions_and_observations_are_json(openenv: str) -> None:
    sample, prompts = play(openenv, ['{"guess": 7}'], action="", observation="")
    assert (sample.reward, json.loads(prompts[0])["hint"]) == (1.0, "guess 0-9")


@pytest.mark.parametrize("depth", [700, 5000])
def test_an_action_that_is_nested_too_deeply_is_answered(openenv: str, depth: int) -> None:
    said = ["[" * depth + "]" * depth, '{"guess": 7}']
    sample, _ = play(openenv, said, action="", tokens=4 * depth)
    assert (sample.error, sample.reward, sample.metrics) == (None, 1.0, {"malformed": 1.0})


def test_an_error_of_the_server_fails_the_sample_with_its_words_and_sessions_end(openenv: str) -> None:
    for _ in range(10):  # more than the server serves at once
        sample, _ = play(openenv, ["13"])
        assert sample.stop_reason == "environment_error" and "EXECUTION_ERROR: unlucky" in str(sample.error)


def test_a_server_that_is_not_there_fails_the_sample() -> None:
    sample, _ = play("http://127.0.0.1:9", ["x"])
    assert sample.stop_reason == "environment_error" and "127.0.0.1" in str(sample.error)


async def test_a_server_that_answers_no_json_fails_the_sample_and_its_policy_hears_nothing() -> None:
    class Socket:
        async def send_str(self, _: str) -> None: ...

        async def receive(self) -> Any:
            return SimpleNamespace(data="<html>busy</html>", type=None)

    environment = OpenEnv({}, seed=0, group_seed=0, url="http://127.0.0.1:9")
    environment._socket = Socket()
    with refused(RuntimeError, "ws://127.0.0.1:9/ws answered no JSON"):
        await environment.step(Action('{"guess": 1}', (1,), ended=True))


def test_the_environment_that_the_package_itself_makes_is_played(tmp_path: Path) -> None:
    python = interpreter("SLIPSTREAM_OPENENV_PYTHON", "openenv")
    made = [python, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(tmp_path)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    port = free_port()
    command = [python, "-m", "echo_env.server.app", "--host", "127.0.0.1", "--port", str(port)]
    with served(command, port, tmp_path) as url:
        sample, prompts = play(url, ["hello", "you"], 2, action="message", observation="echoed_message")
    assert "ready" in prompts[0]
    assert prompts[1].endswith("\n\nhello\n\n")
    assert (sample.error, sample.turns, sample.turn_rewards) == (None, 2, [pytest.approx(0.5), pytest.approx(0.3)])


# ---------------------------------------------------------------- verifiers


def test_verifiers_is_named_like_an_environment_and_brings_its_own_limits() -> None:
    found = check_environment(TasksConfig(environment="verifiers", dataset="-", options={"env_id": "verifiers-game"}))
    assert found.agent and found.limits.process
    assert found.modules == ("rollout_fleet.agents.verifiers_agent", "verifiers.v1")


def played(tmp_path: Path, env_id: str, said: list[str], **options: str) -> tuple[Sample, list[list[int]], Any]:
    """(sample, prompts, tokenizer) of the first row that `env_id` exports, played under the adapters' interpreter."""
    python = interpreter("SLIPSTREAM_VERIFIERS_PYTHON", "verifiers")
    rows = tmp_path / "rows.jsonl"
    imports = "from pathlib import Path; from rollout_fleet.agents.verifiers_agent import export_rows"
    export = f"{imports}; export_rows({env_id!r}, Path({str(rows)!r}))"
    root = HERE.parents[2]
    subprocess.run([python, "-c", export], check=True, env={**os.environ, "PYTHONPATH": f"{root}:{HERE}"})
    tokenizer = qwen()
    sampler = speaker(tokenizer, *said)
    path = "rollout_fleet.agents.verifiers_agent"
    limits = replace(agent.LIMITS, reset_s=LIMIT_S, step_s=LIMIT_S)  # type: ignore[attr-defined]
    with contextlib.closing(ProcessHost((path, "verifiers.v1"), python)) as processes:
        backend = ProcessBackend(f"{path}:agent", {"env_id": env_id, **options}, limits, LIMIT_S, processes, False)
        rules = EpisodeRules(Budget(4, 400, 8000), timeout_s=LIMIT_S, limits=limits)
        problem = json.loads(rows.read_text().splitlines()[0])
        sample = episode(AgentDriver(sampler, Renderer(tokenizer), backend, rules), problem)
    return sample, [call.prompt for call in sampler.calls], tokenizer


def test_an_environment_of_verifiers_with_several_turns_is_played_through_the_endpoint_and_judged_by_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    arguments = '{"taskset": {"bonus": 0.5}}'
    sample, (first, second), tokenizer = played(tmp_path, "verifiers-game", ["3", "7"], arguments=arguments)
    assert (sample.error, sample.reward, sample.turns) == (None, 1.5, 2)
    assert (sample.metrics["right"], sample.metrics["bonus"]) == (1.0, 0.5)
    assert second[: len(first) + 2] == [*first, *tokenizer.encode("3"), tokenizer.eos_token_id]
    assert "wrong, again" in tokenizer.decode(second)


def test_a_taskset_of_verifiers_with_a_tool_server_answers_the_policy_s_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    call = '<tool_call>{"name": "adder_add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    sample, (first, second), tokenizer = played(tmp_path, "verifiers-tools", [call, "1003"])
    assert (sample.error, sample.reward, sample.turns) == (None, 1.0, 2)
    assert sample.metrics["called"] == 1.0
    assert second[: len(first)] == first and "1003" in tokenizer.decode(second[len(first) :])
    assert "adder_add" in tokenizer.decode(first)
