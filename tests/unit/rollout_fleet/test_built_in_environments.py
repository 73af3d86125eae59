"""math (math-verify) and the games of Gymnasium, with the real libraries."""

import asyncio
from typing import Any

import pytest

from common.rollouts import Sample
from rollout_fleet.environments.adapters.gymnasium_text import FrozenLake, GymnasiumText
from rollout_fleet.environments.builtin.math_problem import MathProblem, judge
from rollout_fleet.environments.isolation.process_host import ProcessHost, ProcessStage
from rollout_fleet.environments.protocol import Budget
from rollout_fleet.environments.registry import takes_group_seed
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


def test_a_math_problem_pays_for_the_right_answer() -> None:
    sample, prompts = play(MathProblem, ["\\boxed{\\frac{2}{4}}"], {"question": "1/2?", "answer": "0.5"})
    assert (sample.reward, sample.metrics) == (1.0, {"answered": 1.0})
    assert prompts[0].startswith("1/2?\n") and "\\boxed{}" in prompts[0]
    sample, _ = play(MathProblem, ["who knows"], {"question": "1/2?", "answer": "0.5"})
    assert (sample.reward, sample.metrics) == (0.0, {"answered": 0.0})


def test_a_row_without_an_answer_names_what_is_expected() -> None:
    with pytest.raises(ValueError, match="expected"):
        MathProblem({"question": "?"}, seed=0)


def test_math_is_judged_in_a_process_of_its_own_where_an_endless_answer_ends() -> None:
    assert MathProblem.LIMITS.process and MathProblem.PRELOAD == ("math_verify",)
    host = ProcessHost(("rollout_fleet.environments.builtin.math_problem", *MathProblem.PRELOAD))
    path = "rollout_fleet.environments.builtin.math_problem:MathProblem"
    stage = ProcessStage(path, {}, MathProblem.LIMITS, 60.0, host, shares_seed=False)
    sampler = ScriptedSampler(in_turn(say("\\boxed{9^{9^{9^{9}}}}"), say("\\boxed{\\frac{3}{6}}")))
    driver = make_driver(sampler, stage, None, Budget(1, 100, 1000), 60.0, limits=MathProblem.LIMITS)

    async def both() -> list[Sample]:
        return [await driver.run({"question": "?", "answer": "1/2"}, seed) for seed in range(2)]

    try:
        endless, right = asyncio.run(both())
    finally:
        host.close()
    assert (endless.error, endless.reward, right.reward) == (None, 0.0, 1.0)


def test_the_lake_is_walked_in_words_and_pays_at_the_goal() -> None:
    problem = {"arguments": {"desc": ["SF", "FG"]}}
    sample, prompts = play(FrozenLake, ["I go down", "Right."], problem)
    assert prompts[0] == "Answer with one of: left, down, right, up.\n[S]F\nFG"
    assert prompts[1].split("\n\n")[1] == "  (Down)\nSF\n[F]G"
    assert (sample.reward, sample.turn_rewards, sample.stop_reason) == (1.0, [0.0, 1.0], "environment_done")


def test_a_turn_that_names_no_action_is_answered_with_the_rules_and_counted() -> None:
    sample, prompts = play(FrozenLake, ["hm", "down", "right"], {"arguments": {"desc": ["SF", "FG"]}})
    assert prompts[1].rstrip().endswith("Answer with one of: left, down, right, up.")
    assert (sample.reward, sample.metrics) == (1.0, {"malformed": 1.0})


def test_samples_of_a_group_play_on_the_same_map_and_other_groups_on_others() -> None:
    def map_of(seed: int, group_seed: int) -> str:
        chat = asyncio.run(FrozenLake({}, seed=seed, group_seed=group_seed, size=6).reset())
        return chat.messages[0][1]

    assert map_of(1, 1) == map_of(2, 1)
    assert len({map_of(1, group) for group in range(5)}) > 1
    assert takes_group_seed(FrozenLake)


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
        ({"id": "Pendulum-v1"}, "expected a discrete space"),
        ({"id": "FrozenLake-v1", "actions": "up down"}, "has 4 actions"),
    ],
)
def test_a_game_that_does_not_fit_is_refused_with_the_reason(options: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GymnasiumText({}, seed=0, group_seed=0, **options)
