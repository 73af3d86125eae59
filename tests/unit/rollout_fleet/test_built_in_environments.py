"""math (math-verify) and the games of Gymnasium, with the real libraries."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from common.rollouts import Sample
from rollout_fleet.environments.builtin.gymnasium_text import FrozenLake, GymnasiumText
from rollout_fleet.environments.builtin.math_problems import MathProblem, judge
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.protocol import Budget
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, in_turn, make_driver, prompts_of, say


def play(environment: type, said: list[str], problem: dict[str, Any], **options: Any) -> tuple[Sample, list[str]]:
    sampler = ScriptedSampler(in_turn(*map(say, said)))
    sample = asyncio.run(make_driver(sampler, environment, options).run(problem, 5, group_seed=4))
    return sample, prompts_of(sampler)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("... #### 42", "so it is \\boxed{42}", True),
        ("... #### 1,234", "The answer is 1234.", True),
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("$\\sqrt{8}$", "\\boxed{2\\sqrt{2}}", True),
        ("x^2 + 2x + 1", "\\boxed{(x+1)^2}", True),
        ("(1, 2)", "\\boxed{(1, 2)}", True),
        ("42", "\\boxed{43}", False),
        ("42", "I do not know", False),
    ],
)
def test_answers_compare_by_value(gold: str, answer: str, equal: bool) -> None:
    assert judge(gold.rpartition("####")[2].strip(), answer)[1] is equal


def test_math_is_judged_in_a_process_of_its_own_where_an_endless_answer_ends() -> None:
    assert MathProblem.LIMITS.process and MathProblem.PRELOAD == ("math_verify",)
    host = ProcessHost(("rollout_fleet.environments.builtin.math_problems", *MathProblem.PRELOAD))
    path = "rollout_fleet.environments.builtin.math_problems:MathProblem"
    limits = replace(MathProblem.LIMITS, reset_s=LIMIT_S, step_s=LIMIT_S, cpu_s=300)
    backend = ProcessBackend(path, {}, limits, LIMIT_S, host, shares_seed=False)
    answers = ("\\boxed{9^{9^{9^{9}}}}", "\\boxed{\\frac{3}{6}}", "who knows")
    sampler = ScriptedSampler(in_turn(*map(say, answers)))
    driver = make_driver(sampler, backend, None, Budget(1, 100, 1000), limits=limits)

    async def all_three() -> list[Sample]:
        return [await driver.run({"question": "1/2?", "answer": "0.5"}, seed) for seed in range(3)]

    with contextlib.closing(host):
        endless, *others = asyncio.run(all_three())
    assert (endless.error, endless.reward) == (None, 0.0)
    assert [(s.reward, s.metrics) for s in others] == [(1.0, {"answered": 1.0}), (0.0, {"answered": 0.0})]
    prompt = prompts_of(sampler)[0]
    assert prompt.startswith("1/2?\n") and "\\boxed{}" in prompt


def test_the_lake_is_walked_in_words_and_pays_at_the_goal() -> None:
    """A turn that names no action is answered with the rules, and counted."""
    sample, prompts = play(FrozenLake, ["I go down", "hm", "Right."], {"arguments": {"desc": ["SF", "FG"]}})
    rules = "Answer with one of: left, down, right, up."
    assert prompts[0] == f"{rules}\n[S]F\nFG"
    assert prompts[1].split("\n\n")[1] == "  (Down)\nSF\n[F]G" and prompts[2].rstrip().endswith(rules)
    assert (sample.turn_rewards, sample.stop_reason) == ([0.0, 0.0, 1.0], "environment_done")
    assert (sample.reward, sample.metrics) == (1.0, {"malformed": 1.0})


def test_samples_of_a_group_play_on_the_same_map_and_other_groups_on_others() -> None:
    def map_of(seed: int, group_seed: int) -> str:
        chat = asyncio.run(FrozenLake({}, seed=seed, group_seed=group_seed, size=6).reset())
        return chat.messages[0][1]

    assert map_of(1, 1) == map_of(2, 1) and len({map_of(1, group) for group in range(5)}) > 1


def test_any_environment_with_discrete_actions_can_be_played() -> None:
    actions = "south north east west pickup dropoff"
    sample, prompts = play(GymnasiumText, ["south"] + ["north"] * 7, {"seed": 3}, id="Taxi-v4", actions=actions)
    assert "|R: | : :G|" in prompts[0].replace("[", "").replace("]", "")
    assert sample.turn_rewards[:1] == [-1.0]
    _, prompts = play(GymnasiumText, ["1", "0"], {"seed": 3}, id="Blackjack-v1")
    assert prompts[0].startswith("Answer with one of: 0, 1.\n(")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"id": "Pendulum-v1"}, "discrete"),
        ({"id": "FrozenLake-v1", "actions": "up down"}, "4 actions"),
    ],
)
def test_a_game_that_does_not_fit_is_refused_with_the_reason(options: dict[str, str], why: str) -> None:
    with refused(ValueError, why):
        GymnasiumText({}, seed=0, group_seed=0, **options)
