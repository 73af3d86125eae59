"""An agent written against OpenAI's API, a real vLLM engine, and weights that change while it talks."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_rig import Rig, logprobs

from launch.quickstart.assets import build_tokenizer
from rollout_fleet.agents.driver import AgentDriver
from rollout_fleet.environments.isolation.placement import ThreadStage
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.environments.protocol import Budget
from rollout_fleet.episode.driver import EpisodeRules, Sampling
from rollout_fleet.episode.rendering import Renderer

TEMPERATURE, TURN_TOKENS, TOLERANCE = 0.8, 12, 2e-4


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("agents"))
    yield made
    made.close()


def test_tokens_and_log_probabilities_are_those_of_the_engine_version_by_version(rig: Rig) -> None:
    from openai import AsyncOpenAI

    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}[assistant]"  # `<eos>` is one token
    )
    heard: list[list[float]] = []

    async def agent(problem: Any, *, base_url: str, api_key: str, model: str, seed: int) -> float:
        messages: Any = [{"role": "user", "content": problem["say"]}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for version in (1, 2, 3):
                rig.publish(version)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(rig.active(version), rig.loop))
                said = await client.chat.completions.create(
                    model=model, messages=messages, logprobs=True, max_tokens=TURN_TOKENS, temperature=TEMPERATURE
                )
                logged = said.choices[0].logprobs
                assert logged is not None and logged.content is not None
                heard.append([entry.logprob for entry in logged.content])
                messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        return 1.0

    host = EnvironmentHost()

    async def once() -> Any:
        stage, budget = ThreadStage(agent, {}, host), Budget(8, 100, 400)
        rules = EpisodeRules(budget, Sampling(TEMPERATURE), 60.0)
        driver = AgentDriver(rig.engine, Renderer(tokenizer), stage, rules)
        try:
            return await driver.run({"say": "hello there"}, 0)
        finally:
            await driver.close()

    try:
        sample = rig.run(once(), 90)
    finally:
        host.close()
    assert (sample.error, sample.reward, sample.turns) == (None, 1.0, 3)
    tokens, mask = sample.tokens.numpy().tolist(), sample.loss_mask.numpy()
    versions, recorded = sample.token_versions(), sample.behavior_logprobs.numpy()
    assert sorted(set(versions[mask == 1].tolist())) == [1, 2, 3]
    assert recorded[mask == 1].tolist() == pytest.approx([value for turn in heard for value in turn], abs=1e-6)
    for version in (1, 2, 3):
        expected = [0.0, *logprobs(rig.models[version], tokens, TEMPERATURE)]
        own = [i for i in range(len(tokens)) if mask[i] and versions[i] == version]
        assert own and max(abs(expected[i] - recorded[i]) for i in own) < TOLERANCE
