"""GSM8K: rows, prompts with and without a chat template, numbers."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from rollout_fleet.environments.builtin.gsm8k import PROMPT, Gsm8k, final_number, gold_number
from rollout_fleet.environments.protocol import Action, StepResult
from rollout_fleet.environments.registry import resolve
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, in_turn, make_driver, play, say, text_of

ROW = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
}


def judge(text: str, ended: bool = True, answer: str = "#### 72") -> StepResult:
    environment = Gsm8k({"question": "?", "answer": answer}, seed=0)
    return asyncio.run(environment.step(Action(text, (), ended)))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("24 in May, so 48 + 24 = 72\n#### 72", 1.0),
        ("The answer is 72.", 1.0),
        ("$72.00", 1.0),
        (r"thus \boxed{72}, which took 3 steps", 1.0),
        (r"\boxed{71}, no: $\boxed{72}$", 1.0),
        (r"\boxed{72\text{ clips}}", 1.0),
        (r"\boxed{x} and 72", 1.0),
        ("72 or 73", 0.0),
        ("-72", 0.0),
        ("7 2", 0.0),
        ("seventy-two", 0.0),
        ("", 0.0),
    ],
)
def test_the_final_number_decides(text: str, reward: float) -> None:
    assert judge(text).reward == reward


def test_an_answer_that_was_cut_off_earns_nothing() -> None:
    assert judge("#### 72", ended=False).reward == 0.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("#### 1,234", "1234"), ("so #### $5", "5"), ("#### -0.5 ", "-0.5"), ("a #### 3 b #### 4", "4")],
)
def test_gold_numbers_may_have_commas_signs_and_fractions(answer: str, gold: str) -> None:
    assert gold_number(answer) == Decimal(gold)
    assert judge(f"it is {gold}", answer=answer).reward == 1.0
    assert final_number("1,234,567.5") == Decimal("1234567.5")


@pytest.mark.parametrize("row", [{}, {"question": "?", "answer": "72"}, {"question": "?", "answer": "#### many"}])
def test_a_row_of_another_format_is_told_the_right_one(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='"answer": text that ends with "#### NUMBER"') as error:
        Gsm8k(row, seed=0)
    assert str(row) in str(error.value)


def test_it_is_built_in() -> None:
    assert resolve("gsm8k", {"thinking": True}) is Gsm8k


def test_the_prompt_goes_through_the_chat_template() -> None:
    tokenizer = qwen()
    sampler = speaker(tokenizer, "#### 72")
    sample = play(make_driver(sampler, Gsm8k, tokenizer=tokenizer), ROW)
    question = PROMPT.replace("{question}", ROW["question"])
    asked = tokenizer.decode(sampler.calls[0].prompt)
    assert asked == f"<|im_start|>user\n{question}<eos>\n<|im_start|>assistant\n<think></think>"
    assert sample.reward == 1.0


def test_without_a_chat_template_the_prompt_is_plain_text() -> None:
    sample = play(make_driver(ScriptedSampler(in_turn(say("#### 72"))), Gsm8k), ROW)
    assert text_of(sample, 0) == PROMPT.replace("{question}", ROW["question"])


def test_a_question_with_braces_is_left_as_it_is() -> None:
    chat = asyncio.run(Gsm8k({"question": "{x}?", "answer": "#### 1"}, seed=0, prompt="Q: {question} {y}").reset())
    assert chat.messages == (("user", "Q: {x}? {y}"),)
