"""Real clients from PyPI against the node's endpoint: the tool is called, and exactly the sampled tokens train.

They run under the interpreter of SLIPSTREAM_VERIFIERS_PYTHON (`bash launch/setup.sh adapters`).
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.rollouts import Sample
from examples.agent_clients import openai_agents
from rollout_fleet.agents.driver import AgentDriver
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.protocol import Budget
from rollout_fleet.episode.driver import EpisodeRules
from rollout_fleet.episode.rendering import Renderer
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import play as episode

HERE = Path(__file__).parent
MODULE = "tests.unit.rollout_fleet.watched_clients"
ROW = {"question": "1 + 2?", "answer": "1003"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "1003"}}</tool_call>'


def play(
    client: str, said: list[str], row: dict[str, str] = ROW, **options: str
) -> tuple[Sample, list[list[int]], Any]:
    """(sample, prompts, tokenizer)."""
    python = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("SLIPSTREAM_VERIFIERS_PYTHON names no interpreter; `bash launch/setup.sh adapters` builds one")
    tokenizer = qwen()
    sampler = speaker(tokenizer, *said)
    limits = replace(openai_agents.LIMITS, reset_s=LIMIT_S, step_s=LIMIT_S)  # type: ignore[attr-defined]
    with contextlib.closing(ProcessHost((MODULE,), python)) as processes:
        backend = ProcessBackend(f"{MODULE}:agent", {"client": client, **options}, limits, LIMIT_S, processes, False)
        rules = EpisodeRules(Budget(4, 1000, 20_000), timeout_s=LIMIT_S, limits=limits)
        sample = episode(AgentDriver(sampler, Renderer(tokenizer), backend, rules), row)
    return sample, [call.prompt for call in sampler.calls], tokenizer


@pytest.mark.parametrize(
    ("client", "options", "thought"),
    [
        ("openai_agents", {"api": "responses"}, ""),
        ("openai_agents", {"api": "chat"}, ""),
        ("pydantic_ai", {}, "<think>\nHm.\n</think>\n\n"),  # it takes thoughts out, and puts them back in other spaces
        ("langgraph", {}, ""),
        ("anthropic", {}, ""),
    ],
)
def test_a_client_s_episode_is_one_exact_sequence_that_trains_what_was_sampled(
    client: str, options: dict[str, str], thought: str
) -> None:
    said = [thought + CALL, thought + "1003"]
    sample, (first, second), tokenizer = play(client, said, **options)
    assert (sample.error, sample.reward, sample.turns) == (None, 1.0, 2)
    assert (sample.metrics["called"], sample.metrics["elsewhere"]) == (1.0, 0.0)
    assert sample.metrics["here"] > 0  # the watch works
    sampled = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    assert second[: len(first) + len(sampled[0])] == [*first, *sampled[0]]
    told = second[len(first) + len(sampled[0]) :]
    assert "1003" in tokenizer.decode(told) and '"name": "add"' in tokenizer.decode(first)
    assert sample.tokens.numpy().tolist() == [*second, *sampled[1]]
    expected = [0] * len(first) + [1] * len(sampled[0]) + [0] * len(told) + [1] * len(sampled[1])
    assert sample.loss_mask.numpy().tolist() == expected
    spoken = np.flatnonzero(sample.loss_mask.numpy())
    logprobs = [-0.5 - i for turn in sampled for i in range(len(turn))]
    assert sample.behavior_logprobs.numpy()[spoken].tolist() == logprobs
    assert sample.branches == []


def test_a_client_that_rewrites_its_history_trains_every_sampled_token_once_on_paths_of_its_own() -> None:
    said = [CALL, FINAL]
    sample, prompts, tokenizer = play("smolagents", said)
    assert (sample.error, sample.reward) == (None, 1.0)
    assert sample.metrics["elsewhere"] == 0.0
    assert "1003" in tokenizer.decode(prompts[1]) and "1003" not in tokenizer.decode(prompts[0])  # the tool's answer
    paths = {tuple(path.tokens.numpy().tolist()): path.loss_mask.numpy().tolist() for path in sample.paths}
    assert len(paths) == 2
    for prompt, text in zip(prompts, said, strict=True):
        sampled = [*tokenizer.encode(text), tokenizer.eos_token_id]
        assert paths[*prompt, *sampled] == [0] * len(prompt) + [1] * len(sampled)
