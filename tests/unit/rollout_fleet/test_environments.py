"""Addition, number guessing and GSM8K: prompts, answers, rewards."""

import asyncio
import math
from decimal import Decimal
from typing import Any

import pytest

from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.builtin.math_problems import PROMPT, Gsm8k, MathProblem, final_number, read_row
from rollout_fleet.environments.builtin.number_guessing import NumberGuessing
from rollout_fleet.environments.protocol import Action, StepResult
from tests.rigs.refusals import refused
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, in_turn, make_driver, say, text_of
from tests.unit.rollout_fleet.fleet_fakes import play as episode

SUM = {"question": "384+519", "answer": "903"}
ROW = {
    "question": "Natalia sold clips to 48 friends in {April}, and half as many in May. How many altogether?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
}


def step(environment: Any, text: str, ended: bool = True) -> StepResult:
    return asyncio.run(environment.step(Action(text, tuple(map(ord, text)), ended)))


def play(number: int, *guesses: str, **options: Any) -> list[StepResult]:
    environment = NumberGuessing({"number": number}, seed=0, **options)
    return [step(environment, guess) for guess in guesses]


RIGHT_SUMS = (" 4+9=13, 8+1+1=10, 3+5+1=9 =903", " =903", "903", " =903 ")
WRONG_SUMS = (" =0903", " =902", " =903=", " =903, 1", "")


@pytest.mark.parametrize(("text", "reward"), [*((x, 1.0) for x in RIGHT_SUMS), *((x, 0.0) for x in WRONG_SUMS)])
def test_addition_judges_what_stands_after_the_last_equals_sign(text: str, reward: float) -> None:
    assert step(Addition(SUM, seed=0), text).reward == reward


@pytest.mark.parametrize(
    ("environment", "problem", "right"),
    [(Addition, SUM, " =903"), (Gsm8k, ROW, "#### 72"), (NumberGuessing, {"number": 12}, "12")],
)
def test_an_answer_that_was_cut_off_earns_nothing(environment: Any, problem: dict[str, Any], right: str) -> None:
    assert step(environment(problem, seed=0), right, ended=False).reward == 0.0


def test_addition_options_change_prompt_and_marker() -> None:
    environment = Addition({"question": "1+1", "answer": "2"}, seed=0, prompt="{question}:", answer_after="#")
    assert asyncio.run(environment.reset()) == "1+1:"
    assert step(environment, "a=b #2").reward == 1.0


WRONG_ROW = '"answer": text that ends with "#### NUMBER"}, found '


@pytest.mark.parametrize(
    ("environment", "problem", "why"),
    [
        (Addition, {"question": "1+1"}, "no 'answer'"),
        *((NumberGuessing, problem, "1..31") for problem in ({}, {"number": 0}, {"number": 32}, {"number": "7"})),
        (Gsm8k, {}, WRONG_ROW + "{}"),
        (Gsm8k, {"question": "?", "answer": "72"}, WRONG_ROW + "{'question': '?', 'answer': '72'}"),
        (Gsm8k, {"question": "?", "answer": "#### many"}, WRONG_ROW),
        (MathProblem, {"question": "?"}, 'expected {"question": text, "answer": text}'),
    ],
)
def test_a_problem_of_another_form_is_told_the_right_one(environment: Any, problem: dict[str, Any], why: str) -> None:
    with refused(ValueError, why):
        environment(problem, seed=0)


def test_guessing_answers_with_the_range_that_is_left() -> None:
    results = play(12, "11", "31", "20", "3")
    shown = [" higher 12-31\n", " lower 12-30\n", " lower 12-19\n", " higher 12-19\n"]
    assert [r.observation for r in results] == shown
    assert not any(r.done or r.reward for r in results)


@pytest.mark.parametrize(("guesses", "reward"), [(("16", "8", "12"), 1.0), (("1", "2", "3"), 0.0)])
def test_guessing_ends_with_the_right_number_or_after_the_last_guess(guesses: tuple[str, ...], reward: float) -> None:
    results = play(12, *guesses, guesses=3)
    assert [r.done for r in results] == [False, False, True]
    metrics = {"guesses": 3.0, "malformed": 0.0, "found": reward}
    assert (results[-1].reward, results[-1].metrics) == (reward, metrics)


def test_a_number_that_python_does_not_read_ends_the_game() -> None:
    (result,) = play(12, "9" * 5000)
    assert (result.done, result.reward, result.metrics["malformed"]) == (True, 0.0, 1.0)


def test_every_guess_earns_its_part_of_the_way_to_the_number() -> None:
    results = play(12, "16", "20", "8", "12", narrowing=0.5)
    parts = [31 / 15, 1.0, 15 / 7, 7.0]  # 1-31, 1-15, the same, 9-15, 12
    assert [r.reward for r in results] == pytest.approx(
        [0.5 * math.log(part) / math.log(31) + (part == 7.0) for part in parts]
    )
    assert sum(r.reward for r in results) == pytest.approx(1.5)
    environment = NumberGuessing({"number": 12}, seed=0, narrowing=0.5)
    assert [step(environment, "16", ended=False).reward, play(1, "1", highest=1, narrowing=0.5)[0].reward] == [0.0, 1.0]


@pytest.mark.parametrize("text", ["", "twelve", "1 2", "-3", "²", "1.0"])
def test_guessing_ends_without_reward_on_anything_but_a_number(text: str) -> None:
    (result,) = play(12, text)
    assert (result.reward, result.done, result.metrics["malformed"]) == (0.0, True, 1.0)


@pytest.mark.parametrize("number", range(1, 32))
def test_bisection_finds_every_number_in_five_guesses(number: int) -> None:
    environment, low, high = NumberGuessing({"number": number}, seed=0), 1, 31
    for _ in range(5):
        guess = (low + high) // 2
        result = step(environment, str(guess))
        if result.done:
            break
        low, high = (int(x) for x in str(result.observation).split()[1].split("-"))
    assert result.reward == 1.0


# ---------------------------------------------------------------- GSM8K


SEVENTY_TWO = (
    "24 in May, so 48 + 24 = 72\n#### 72", "The answer is 72.", "$72.00", r"thus \boxed{72}, which took 3 steps",
    r"\boxed{71}, no: $\boxed{72}$", r"\boxed{72\text{ clips}}", r"\boxed{x} and 72",
)  # fmt: skip
OTHERS = ("72 or 73", "-72", "7 2", "seventy-two", "")


@pytest.mark.parametrize(("text", "reward"), [*((x, 1.0) for x in SEVENTY_TWO), *((x, 0.0) for x in OTHERS)])
def test_the_final_number_decides(text: str, reward: float) -> None:
    assert step(Gsm8k(ROW, seed=0), text).reward == reward


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("#### 1,234", "1234"), ("so #### $5", "5"), ("#### -0.5 ", "-0.5"), ("a #### 3 b #### 4", "4")],
)
def test_gold_numbers_may_have_commas_signs_and_fractions(answer: str, gold: str) -> None:
    assert read_row({"question": "?", "answer": answer}) == ("?", Decimal(gold))
    assert step(Gsm8k({"question": "?", "answer": answer}, seed=0), f"it is {gold}").reward == 1.0
    assert final_number("1,234,567.5") == Decimal("1234567.5")


def test_the_prompt_goes_through_the_chat_template_and_other_braces_stay() -> None:
    tokenizer = qwen()
    sampler = speaker(tokenizer, "#### 72")
    sample = episode(make_driver(sampler, Gsm8k, {"prompt": "Q: {question} {y}"}, tokenizer=tokenizer), ROW)
    asked = tokenizer.decode(sampler.calls[0].prompt)
    question = f"Q: {ROW['question']} {{y}}"
    assert asked == f"<|im_start|>user\n{question}<eos>\n<|im_start|>assistant\n<think></think>"
    assert sample.reward == 1.0


def test_without_a_chat_template_the_prompt_is_plain_text() -> None:
    sample = episode(make_driver(ScriptedSampler(in_turn(say("#### 72"))), Gsm8k), ROW)
    assert text_of(sample, 0) == PROMPT.replace("{question}", ROW["question"])
