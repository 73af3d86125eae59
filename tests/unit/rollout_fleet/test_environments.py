"""Addition and number guessing: prompts, answers, rewards."""

import asyncio
from typing import Any

import pytest

from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.builtin.number_guessing import NumberGuessing
from rollout_fleet.environments.protocol import Action, StepResult


def act(text: str, ended: bool = True) -> Action:
    return Action(text, tuple(map(ord, text)), ended)


def judge(text: str, ended: bool = True, **options: Any) -> float:
    environment = Addition({"question": "384+519", "answer": "903"}, seed=0, **options)
    return asyncio.run(environment.step(act(text, ended))).reward


def play(number: int, *guesses: str, **options: Any) -> list[StepResult]:
    environment = NumberGuessing({"number": number}, seed=0, **options)
    return [asyncio.run(environment.step(act(guess))) for guess in guesses]


def test_addition_asks_in_the_documented_form() -> None:
    environment = Addition({"question": "384+519", "answer": "903"}, seed=0)
    assert asyncio.run(environment.reset()) == "Q: 384+519=? A:"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" 4+9=13, 8+1+1=10, 3+5+1=9 =903", 1.0),
        (" =903", 1.0),
        ("903", 1.0),
        (" =903 ", 1.0),
        (" =0903", 0.0),
        (" =902", 0.0),
        (" =903=", 0.0),
        (" =903, 1", 0.0),
        ("", 0.0),
    ],
)
def test_addition_judges_what_stands_after_the_last_equals_sign(text: str, reward: float) -> None:
    assert judge(text) == reward


def test_addition_gives_nothing_for_an_answer_that_was_cut_off() -> None:
    assert judge(" =903", ended=False) == 0.0


def test_addition_options_change_prompt_and_marker() -> None:
    environment = Addition({"question": "1+1", "answer": "2"}, seed=0, prompt="{question}:", answer_after="#")
    assert asyncio.run(environment.reset()) == "1+1:"
    assert asyncio.run(environment.step(act("a=b #2"))).reward == 1.0


def test_addition_names_what_a_problem_lacks() -> None:
    with pytest.raises(ValueError, match="no 'answer'"):
        Addition({"question": "1+1"}, seed=0)


def test_guessing_opens_with_the_range() -> None:
    assert asyncio.run(NumberGuessing({"number": 7}, seed=0).reset()) == "Guess 1-31\n"


def test_guessing_answers_with_the_range_that_is_left() -> None:
    results = play(12, "11", "31", "20", "3")
    assert [r.observation for r in results] == [
        " higher 12-31\n",
        " lower 12-30\n",
        " lower 12-19\n",
        " higher 12-19\n",
    ]
    assert not any(r.done or r.reward for r in results)


def test_guessing_rewards_the_right_number_and_ends() -> None:
    *_, last = play(12, "16", "8", "12")
    assert (last.reward, last.done, last.metrics) == (1.0, True, {"guesses": 3.0, "malformed": 0.0})


def test_guessing_is_lost_after_the_last_guess() -> None:
    results = play(12, "1", "2", "3", guesses=3)
    assert [r.done for r in results] == [False, False, True]
    assert results[-1].reward == 0.0


@pytest.mark.parametrize("text", ["", "twelve", "1 2", "-3", "²", "1.0"])
def test_guessing_ends_without_reward_on_anything_but_a_number(text: str) -> None:
    (result,) = play(12, text)
    assert (result.reward, result.done, result.metrics["malformed"]) == (0.0, True, 1.0)


def test_guessing_gives_nothing_for_a_number_that_was_cut_off() -> None:
    environment = NumberGuessing({"number": 12}, seed=0)
    assert asyncio.run(environment.step(act("12", ended=False))).reward == 0.0


@pytest.mark.parametrize("problem", [{}, {"number": 0}, {"number": 32}, {"number": "7"}])
def test_guessing_refuses_numbers_outside_its_range(problem: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"1\.\.31"):
        NumberGuessing(problem, seed=0)


@pytest.mark.parametrize("number", range(1, 32))
def test_bisection_finds_every_number_in_five_guesses(number: int) -> None:
    environment, low, high = NumberGuessing({"number": number}, seed=0), 1, 31
    for _ in range(5):
        guess = (low + high) // 2
        result = asyncio.run(environment.step(act(str(guess))))
        if result.done:
            break
        low, high = (int(x) for x in str(result.observation).split()[1].split("-"))
    assert result.reward == 1.0
