"""The episode driver: masks, versions, budgets, and environments that misbehave."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import SlipstreamError
from common.rollouts import VersionRun
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.builtin.number_guessing import NumberGuessing
from rollout_fleet.environments.protocol import Action, Budget, StepResult
from rollout_fleet.episode.driver import Progress
from rollout_fleet.episode.sampler_protocol import Generation
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until_async
from tests.unit.rollout_fleet.fleet_fakes import (
    EOS,
    Base,
    CharacterTokenizer,
    ScriptedSampler,
    in_turn,
    make_driver,
    play,
    say,
    text_of,
)

SUM = {"question": "1+2", "answer": "3"}


def test_a_single_turn_is_prompt_masked_and_answer_trained_with_its_end_token() -> None:
    sampler = ScriptedSampler(in_turn(say(" =3", version=5)))
    sample = play(make_driver(sampler, Addition), SUM)
    assert text_of(sample, 0) == "Q: 1+2=? A:"
    assert text_of(sample, 1) == " =3" + chr(EOS)
    assert sample.behavior_logprobs.numpy().tolist() == [0.0] * 11 + [-1.0, -2.0, -3.0, -4.0]
    assert (sample.reward, sample.turn_rewards, sample.turns, sample.error) == (1.0, [1.0], 1, None)
    assert sample.stop_reason == "stop"
    assert sample.version_runs == [VersionRun(11, 5)]
    assert sample.routed_experts is None


def test_turns_share_one_growing_context_and_environment_text_is_masked() -> None:
    sampler = ScriptedSampler(in_turn(say("16"), say("24"), say("20")))
    sample = play(make_driver(sampler, NumberGuessing), {"number": 20})
    assert text_of(sample, 0) == "Guess 1-31\n higher 17-31\n lower 17-23\n"
    assert text_of(sample, 1) == f"16{chr(EOS)}24{chr(EOS)}20{chr(EOS)}"
    tokens = sample.tokens.numpy().tolist()
    assert [tokens[: len(c.prompt)] for c in sampler.calls] == [c.prompt for c in sampler.calls]
    assert sampler.calls[1].prompt == [ord(c) for c in "Guess 1-31\n16"] + [EOS] + [ord(c) for c in " higher 17-31\n"]
    assert (sample.turn_rewards, sample.stop_reason, sample.metrics["guesses"]) == ([0, 0, 1], "environment_done", 3)
    assert len({c.session for c in sampler.calls}) == 1 and None not in {c.session for c in sampler.calls}


def test_version_runs_are_offsets_into_the_whole_sample_and_equal_neighbours_merge() -> None:
    first = say("16", runs=[VersionRun(0, 3), VersionRun(2, 4)])
    second = say("24", version=4)
    third = say("20", runs=[VersionRun(0, 4), VersionRun(1, 6)])
    sample = play(make_driver(ScriptedSampler(in_turn(first, second, third)), NumberGuessing), {"number": 20})
    # "Guess 1-31\n" is 11 tokens, "16<eos>" 3, " higher 17-31\n" 14, "24<eos>" 3, " lower 17-23\n" 13, "20<eos>" 3
    assert sample.version_runs == [VersionRun(11, 3), VersionRun(13, 4), VersionRun(45, 6)]
    sampled = sample.token_versions()[sample.loss_mask.numpy() == 1]
    assert sampled.tolist() == [3, 3, 4, 4, 4, 4, 4, 6, 6]


BUDGETS = {
    "tokens of all turns": ([say("16"), say("24"), say("2", ended=False)], Budget(8, 7, 1000), [7, 4, 1], "length"),
    "no observation behind the last turn": ([say("16"), say("24")], Budget(8, 6, 1000), [6, 3], "length"),
    "turns and text": ([say("16"), say("24", ended=False)], Budget(8, 100, 30), [19, 2], "length"),
    "turns": ([say("1"), say("2")], Budget(2, 100, 1000), [100, 98], "turn_limit"),
}


@pytest.mark.parametrize(("said", "budget", "asked", "reason"), BUDGETS.values(), ids=BUDGETS)
def test_an_episode_ends_at_its_budget(said: list[Generation], budget: Budget, asked: list[int], reason: str) -> None:
    sampler = ScriptedSampler(in_turn(*said))
    sample = play(make_driver(sampler, NumberGuessing, budget=budget), {"number": 20})
    assert [call.max_tokens for call in sampler.calls] == asked
    assert (sample.stop_reason, sample.reward, sample.error, sample.turns) == (reason, 0.0, None, len(said))
    assert sample.loss_mask.numpy()[-1] == 1 and len(sample.tokens.numpy()) <= budget.max_context


def test_a_prompt_that_does_not_fit_fails_the_sample_with_both_numbers() -> None:
    driver = make_driver(ScriptedSampler(in_turn()), Addition, budget=Budget(1, 10, 11))
    sample = play(driver, SUM)
    assert sample.stop_reason == "environment_error"
    assert str(sample.error).count("11") == 2


def test_equal_text_is_tokenised_once() -> None:
    tokenizer = CharacterTokenizer()
    driver = make_driver(ScriptedSampler(lambda _: say(" =3")), Addition, tokenizer=tokenizer)
    assert play(driver, SUM) == play(driver, SUM)
    assert tokenizer.encoded.count("Q: 1+2=? A:") == 1


def test_options_and_seed_reach_the_constructor_and_an_observation_of_token_ids_is_used_as_it_is() -> None:
    class Ids(Base):
        def __init__(self, problem: dict[str, Any], *, seed: int, level: int) -> None:
            self.ids = [problem["a"], seed, level]

        async def reset(self) -> list[int]:
            return self.ids

    sampler = ScriptedSampler(in_turn(say("x")))
    play(make_driver(sampler, Ids, {"level": 3}), {"a": 1})
    assert sampler.calls[0].prompt == [1, 7, 3]


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
@pytest.mark.parametrize(
    "error", [RuntimeError("x" * 10**6), TimeoutError(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_an_environment_that_raises_fails_its_sample_with_a_short_reason(where: str, error: BaseException) -> None:
    async def bad(self: Any, *_: Any) -> Any:
        raise error

    def bad_init(self: Any, problem: Any, *, seed: int) -> None:
        raise error

    environment = type("Bad", (Base,), {where: bad_init if where == "__init__" else bad})
    driver = make_driver(ScriptedSampler(lambda _: say("x")), environment)
    sample = play(driver, {})
    assert sample.stop_reason == "environment_error"
    assert (sample.error is not None and "raise" in sample.error) or "cancelled itself" in str(sample.error)
    assert len(str(sample.error)) < 600
    assert play(make_driver(ScriptedSampler(lambda _: say(" =3")), Addition), SUM).reward == 1.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "AttributeError"),
        (StepResult(reward=float("nan")), "not finite"),
        (StepResult(reward="1.0"), "reward '1.0' is no number"),  # type: ignore[arg-type]
        (StepResult(reward="lots"), "reward 'lots' is no number"),  # type: ignore[arg-type]
        (StepResult(observation=3.5, done=False), "TypeError"),  # type: ignore[arg-type]
        (StepResult(reward=1.0, metrics={"a": float("nan")}), "metric 'a' is not finite"),
        (StepResult(reward=1.0, metrics={str(i): 1.0 for i in range(65)}), "65 metrics"),
        (StepResult(reward=1.0, metrics={"a": "much"}), "could not convert"),  # type: ignore[dict-item]
    ],
)
def test_an_answer_that_makes_no_sense_fails_the_sample(result: Any, reason: str) -> None:
    class Nonsense(Base):
        async def step(self, action: Action) -> Any:
            return result

    sample = play(make_driver(ScriptedSampler(lambda _: say("x")), Nonsense), {})
    assert sample.stop_reason == "environment_error" and reason in str(sample.error)


async def test_a_blocking_environment_does_not_stop_the_event_loop() -> None:
    began, release = threading.Event(), threading.Event()

    class Blocks(Base):
        async def step(self, action: Action) -> StepResult:
            began.set()
            return StepResult(reward=float(release.wait(LIMIT_S)))

    driver = make_driver(ScriptedSampler(in_turn(say("x"))), Blocks, timeout_s=LIMIT_S)
    episode = asyncio.create_task(driver.run({}, 0))
    await until_async(began.is_set)
    release.set()
    assert (await episode).reward == 1.0


def test_a_request_that_the_engine_refuses_or_aborts_fails_its_sample_and_a_dead_engine_does_not() -> None:
    aborted = Generation([65], [-1.0], [VersionRun(0, 0)], "abort")
    sample = play(make_driver(ScriptedSampler(in_turn(aborted)), Addition), SUM)
    assert sample.stop_reason == "cancelled" and sample.error
    strict = ScriptedSampler(lambda _: ValueError("token 999 is outside the vocabulary"))
    sample = play(make_driver(strict, Addition), SUM)
    assert sample.stop_reason == "environment_error" and "token 999" in str(sample.error)
    with refused(SlipstreamError, "engine died"):
        play(make_driver(ScriptedSampler(lambda _: SlipstreamError("engine died")), Addition), SUM)


async def test_cancelling_an_episode_cancels_its_request_and_the_progress_stays_known() -> None:
    def first(prompt: str) -> Generation:
        sampler.gate.clear()
        return say("16")

    sampler, progress = ScriptedSampler(first), Progress()
    episode = asyncio.create_task(make_driver(sampler, NumberGuessing).run({"number": 20}, 0, progress))
    await until_async(lambda: len(sampler.calls) == 2)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert (sampler.cancelled, progress.sampled_tokens) == (1, 3)


def test_routing_grows_with_the_turns_and_what_a_token_was_sampled_with_stays() -> None:
    def routed(generation: Generation, tokens: int, turn: int) -> Generation:
        experts = np.full((tokens, 2, 1), 10 * turn, dtype=np.int16) + np.arange(2, dtype=np.int16)[:, None]
        return replace(generation, routed_experts=experts)

    # "Guess 1-31\n" is 11 tokens, "16<eos>" 3, " higher 17-31\n" 14, "24<eos>" 3; the last of a turn is not fed in it
    answers = in_turn(routed(say("16"), 13, 1), routed(say("20"), 30, 2))
    sample = play(make_driver(ScriptedSampler(answers), NumberGuessing), {"number": 20})
    assert sample.stop_reason == "environment_done" and sample.routed_experts is not None
    experts = sample.routed_experts.numpy().reshape(len(sample.tokens.numpy()), 2, 1)
    assert experts[:, 0, 0].tolist() == [10] * 13 + [20] * 17 + [-1]
    assert experts[:, 1, 0].tolist() == [11] * 13 + [21] * 17 + [-1]
