"""A chat template renders only what the environment adds; what was sampled stays as it was sampled."""

import asyncio
from typing import Any

import pytest

from rollout_fleet.environments.protocol import Action, Chat, Observation, StepResult
from rollout_fleet.episode.rendering import MARK, Renderer
from tests.rigs.refusals import refused
from tests.unit.rollout_fleet.chat_tokenizers import LLAMA, QWEN, beginning, qwen, speaker, with_template
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, make_driver

TOOLS = '[{"type": "function", "function": {"name": "add"}}]'


class Talks:
    """Three turns of chat: a user's message, a tool's answer, two messages at once."""

    def __init__(self, problem: dict[str, Any], *, seed: int) -> None:
        self.turn = 0

    async def reset(self) -> Chat:
        return Chat((("system", "be brief"), ("user", "hello")), tools=TOOLS)

    async def step(self, action: Action) -> StepResult:
        self.turn += 1
        replies = {1: Chat((("tool", "42"),), tools=TOOLS), 2: Chat((("user", "and?"), ("user", "well?")), tools=TOOLS)}
        return StepResult(replies.get(self.turn, ""), reward=1.0, done=self.turn == 3)


def turns_of(tokenizer: Any) -> tuple[list[list[int]], list[list[int]], Any]:
    """Prompts and sampled tokens of the three calls, and the sample."""
    # a policy whose tokens no tokenizer would produce from their text: filler tokens, a think block, trailing spaces
    said = [tokenizer.encode(t) for t in ("<think>x</think> 1 ", "two  ", " three")]
    said = [[*ids, 110 + i] for i, ids in enumerate(said)]
    sampler = speaker(tokenizer, *said)
    driver = make_driver(sampler, Talks, tokenizer=tokenizer)
    sample = asyncio.run(driver.run({}, 0))
    return [call.prompt for call in sampler.calls], [[*ids, tokenizer.eos_token_id] for ids in said], sample


@pytest.mark.parametrize("template", [QWEN, LLAMA, None], ids=["qwen", "llama", "none"])
def test_prompt_and_sampled_tokens_of_a_turn_are_an_exact_prefix_of_the_next_prompt(template: str | None) -> None:
    tokenizer = with_template(template or "", "<eos>")
    if template is None:
        tokenizer.chat_template = None
    prompts, said, sample = turns_of(tokenizer)
    assert sample.error is None and len(prompts) == 3
    for turn in range(2):
        so_far = prompts[turn] + said[turn]
        assert prompts[turn + 1][: len(so_far)] == so_far
    assert sample.tokens.numpy().tolist() == prompts[2] + said[2]
    assert sample.tokens.numpy()[sample.loss_mask.numpy() == 1].tolist() == [*said[0], *said[1], *said[2]]
    if template == QWEN:  # between two turns stands what the template puts there
        between = tokenizer.decode(prompts[1][len(prompts[0] + said[0]) :])
        assert between == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><eos>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "observation", "text"),
    [
        (None, "2+2=", "<bos>2+2="),
        (LLAMA, "2+2=", "<bos>2+2="),
        (None, "<bos>2+2=", "<bos>2+2="),
        (None, Chat((("user", "2+2="),)), "<bos>2+2="),
        (LLAMA, Chat((("user", "2+2="),)), "<bos><|user|>\n\n2+2=<eos><|assistant|>\n\n"),
        (LLAMA[5:], Chat((("user", "2+2="),)), "<|user|>\n\n2+2=<eos><|assistant|>\n\n"),
        (None, [40, 41], None),
    ],
)
def test_an_episode_begins_as_the_tokenizer_begins_a_text_unless_a_template_or_token_ids_do(
    template: str | None, observation: Observation, text: str | None
) -> None:
    tokenizer = beginning(template)
    renderer = Renderer(tokenizer)
    found = renderer.ids(observation)
    assert found == ([40, 41] if text is None else tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.bos_token_id not in renderer.ids("And now?", tokenizer.eos_token_id)
    assert tokenizer.bos_token_id not in renderer.ids(Chat((("user", "And now?"),)), tokenizer.eos_token_id)


def test_a_turn_that_ended_with_another_token_gets_the_template_s_end_as_well() -> None:
    tokenizer = with_template(LLAMA, "<eos>")
    renderer = Renderer(tokenizer)
    chat = Chat((("user", "go on"),))
    said = "<|user|>\n\ngo on<eos><|assistant|>\n\n"
    assert tokenizer.decode(renderer.ids(chat, tokenizer.eos_token_id)) == said
    assert tokenizer.decode(renderer.ids(chat, tokenizer.pad_token_id)) == "<eos>" + said


@pytest.mark.parametrize("end_token", [None, 1], ids=["prompt", "later turn"])
def test_options_and_tools_reach_the_template(end_token: int | None) -> None:
    tokenizer = qwen()
    chat = Chat((("user", "hi"),), (("enable_thinking", False),), TOOLS)
    text = tokenizer.decode(Renderer(tokenizer).ids(chat, end_token))
    assert text.endswith("assistant\n<think></think>")
    assert end_token is not None or '"name": "add"' in text


@pytest.mark.parametrize(
    "messages",
    [
        ({"role": "user", "content": "hi"},),
        ({"role": "assistant", "content": "", "tool_calls": []},),
        ("user", "hi"),
        ("hi",),
        (("user", None),),
        (("user", "hi", "more"),),
    ],
    ids=["dict", "dict of three", "one pair alone", "text", "no text", "three"],
)
def test_messages_that_are_no_pairs_of_texts_are_refused(messages: Any) -> None:
    with refused(ValueError, repr(messages[0])):
        Chat(messages)


@pytest.mark.parametrize(
    ("observation", "why"),
    [([1, 2.7], "2.7"), (Chat((("user", MARK),)), "once")],
    ids=["no token id", "the mark that finds the seam"],
)
def test_an_observation_that_cannot_be_rendered_is_refused(observation: Any, why: str) -> None:
    with refused(ValueError, why):
        Renderer(qwen()).ids(observation, 1)


def test_a_template_that_refuses_fails_the_sample_and_nothing_else() -> None:
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}", "<eos>")
    sample = asyncio.run(make_driver(ScriptedSampler(lambda _: None), Talks, tokenizer=tokenizer).run({}, 0))  # type: ignore[arg-type,return-value]
    assert sample.stop_reason == "environment_error" and "alternate" in str(sample.error)
