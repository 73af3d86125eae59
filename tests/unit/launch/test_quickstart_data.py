"""The quickstart's problems and demonstrations."""

import asyncio
import json
import random
from itertools import islice

import pytest

from launch.quickstart.problems import (
    AdditionPlan,
    GuessingPlan,
    addition_demonstration,
    addition_demonstrations,
    addition_pairs,
    addition_problem,
    guessing_demonstrations,
    guessing_problems,
)
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.builtin.number_guessing import NumberGuessing
from rollout_fleet.environments.protocol import Action

SMALL = AdditionPlan(train=300, held_out=100, clean=400, sloppy=400)


def reward(pair: tuple[int, int], completion: str) -> float:
    environment = Addition(addition_problem(pair), seed=0)
    return asyncio.run(environment.step(Action(completion, (), True))).reward


def test_the_scratchpad_is_the_documented_one() -> None:
    row = addition_demonstration((384, 519), random.Random(0))
    assert row == {"prompt": "Q: 384+519=? A:", "completion": " 4+9=13, 8+1+1=10, 3+5+1=9 =903"}


@pytest.mark.parametrize("pair", [(0, 0), (7, 5), (999, 999), (95, 378), (378, 95), (1, 999), (100, 0)])
def test_clean_demonstrations_are_right_for_the_environment(pair: tuple[int, int]) -> None:
    row = addition_demonstration(pair, random.Random(0))
    assert row["prompt"] == asyncio.run(Addition(addition_problem(pair), seed=0).reset())
    assert reward(pair, row["completion"]) == 1.0


def test_training_held_out_and_demonstrations_share_no_problem() -> None:
    held_out, train, others = addition_pairs(SMALL, random.Random(1))
    demonstrated = set(islice(others, 2000))
    assert (len(set(held_out)), len(set(train))) == (100, 300)
    assert not set(held_out) & set(train)
    assert not (set(held_out) | set(train)) & demonstrated


def test_the_curriculum_is_clean_first_and_then_sloppy() -> None:
    rng = random.Random(2)
    *_, others = addition_pairs(SMALL, rng)
    pairs = list(islice(others, 800))
    rows = list(addition_demonstrations(SMALL, iter(pairs), rng))
    right = [reward(pair, row["completion"]) for pair, row in zip(pairs, rows, strict=True)]
    assert right[:400] == [1.0] * 400
    assert 0.15 < sum(right[400:]) / 400 < 0.45
    blurted = sum(row["completion"].startswith(" =") for row in rows[400:]) / 400
    assert 0.4 < blurted < 0.6


def test_the_long_plan_has_a_heavy_tail_within_its_bound() -> None:
    plan = AdditionPlan(digits=34, median_digits=7.2, spread=0.8, train=1, held_out=1)
    rng = random.Random(3)
    *_, others = addition_pairs(plan, rng)
    rows = [addition_demonstration(pair, rng) for pair in islice(others, 2000)]
    lengths = sorted(len(row["completion"]) + 1 for row in rows)
    assert lengths[-1] <= 384
    assert 82 < sum(lengths) / len(lengths) < 102
    assert lengths[-20] > 3 * lengths[1000]


def test_games_play_by_the_environments_rules() -> None:
    plan = GuessingPlan(games=80)
    won = 0
    for game in guessing_demonstrations(plan, random.Random(4)):
        json.dumps(game)
        won += replay(game["segments"])
    assert 0.2 < won / plan.games < 0.6


def replay(segments: list[list[str | int]]) -> float:
    """Play a game's actions against the environment; its texts must be the recorded ones. The number is inferred."""
    guesses = [str(text) for text, trained in segments if trained]
    for number in range(1, 32):
        environment = NumberGuessing({"number": number}, seed=0)
        said = [[asyncio.run(environment.reset()), 0]]
        for guess in guesses:
            said.append([guess, 1])
            result = asyncio.run(environment.step(Action(guess, (), True)))
            if result.done:
                break
            said.append([result.observation, 0])
        if said == segments and result.done:
            return result.reward
    raise AssertionError(f"no number explains {segments}")


def test_every_number_is_a_problem() -> None:
    assert [row["number"] for row in guessing_problems(GuessingPlan(highest=7))] == [1, 2, 3, 4, 5, 6, 7]
