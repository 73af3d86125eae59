"""The node's side of transcripts: where turns are, and the episode that goes with a group that failed."""

from types import SimpleNamespace
from typing import Any

import msgspec

from common.rollouts import Group
from common.transcripts import FAILED_BYTES, FailedTranscripts, Transcript
from rollout_fleet.environments.protocol import StepResult
from rollout_fleet.episode.rendering import Renderer
from tests.rigs.waiting import until_async
from tests.unit.rollout_fleet.fleet_fakes import (
    Base,
    CharacterTokenizer,
    ScriptedSampler,
    in_turn,
    make_driver,
    play,
    say,
)
from tests.unit.rollout_fleet.test_conversation import Talk, assistant, user
from tests.unit.rollout_fleet.test_node import Site


class Game(Base):
    """Three turns; the second is not trained on, and the third fails where `fails`."""

    fails = False

    async def step(self, action: Any) -> StepResult:
        self.turn = getattr(self, "turn", 0) + 1
        if self.turn == 3 and self.fails:
            raise OSError("no calculator")
        return StepResult(observation="next", reward=float(self.turn), done=self.turn == 3, trained=self.turn != 2)


class BrokenGame(Game):
    fails = True


def played(game: type, *said: str) -> Any:
    return play(make_driver(ScriptedSampler(in_turn(*(say(text) for text in said))), game), {})


def test_a_sample_knows_where_its_turns_are_also_those_that_are_not_trained_on() -> None:
    sample = played(Game, "one", "three", "5")
    tokens = sample.tokens.numpy().tolist()
    texts = ["".join(map(chr, tokens[start : end - 1])) for start, end in sample.turn_spans]
    assert texts == ["one", "three", "5"]
    assert sample.turn_rewards == [1.0, 2.0, 3.0]
    (first, untrained, last) = (sample.loss_mask.numpy()[start:end] for start, end in sample.turn_spans)
    assert first.all() and last.all() and not untrained.any()


def test_a_branch_of_a_conversation_knows_its_own_turns_only() -> None:
    talk = Talk("one", "two", "three")
    talk.say([user("hi")])
    talk.say([user("hi"), assistant("one"), user("more")])
    talk.say([user("hi"), assistant("one"), user("other")])
    for turn, said in zip(talk.talk.turns, (["one"], ["one", "two"], ["one", "three"]), strict=True):
        record = turn.path()
        texts = [talk.tokenizer.decode(record.tokens[start:end]) for start, end in record.spans]
        assert [text.removesuffix("<eos>") for text in texts] == said


def test_the_longest_sample_of_a_failed_group_becomes_a_transcript() -> None:
    failed = [played(BrokenGame, "one", "two", text) for text in ("3", "33333", "33")]
    transcripts = FailedTranscripts(Renderer(CharacterTokenizer()).text, "n0")
    found = msgspec.json.decode(transcripts.line(Group(7, failed)), type=Transcript)
    assert (found.serial, found.sample, found.node_id, found.why) == (7, 1, "n0", ["failed"])
    assert found.error is not None and "no calculator" in found.error
    said = [turn for turn in found.turns if turn.author == "policy"]
    assert [turn.text[:-1] for turn in said] == ["one", "two", "33333"]
    assert [turn.reward for turn in said] == [1.0, 2.0, None], "the third turn has none"
    assert all(not any(turn.trained) for turn in said)


def test_a_long_one_is_cut_to_the_limit_and_without_any_sample_there_is_none(caplog) -> None:
    long = msgspec.structs.replace(played(Game, "a" * 90, "b", "c"), error="too long")
    tokens = [ord(c) for c in "ab" * 100_000]
    many = {"tokens": tokens, "loss_mask": [1] * len(tokens), "behavior_logprobs": [-0.5] * len(tokens)}
    kinds = {"tokens": "int32", "loss_mask": "uint8", "behavior_logprobs": "float32"}
    arrays = {name: type(long.tokens).of(values, kinds[name]) for name, values in many.items()}
    long = msgspec.structs.replace(long, turn_spans=[(0, len(tokens))], **arrays)
    transcripts = FailedTranscripts(Renderer(CharacterTokenizer()).text, "n0")
    line = transcripts.line(Group(7, [long]))
    assert FAILED_BYTES // 2 < len(line) <= FAILED_BYTES
    assert msgspec.json.decode(line, type=Transcript).cut_tokens > 0
    assert transcripts.line(Group(7, [])) == b""
    odd = msgspec.structs.replace(long, turn_spans=[(5, 1)])
    assert transcripts.line(Group(7, [odd])) == transcripts.line(Group(7, [odd])) == b""
    assert len([r for r in caplog.records if r.name == "common.transcripts"]) == 1


async def test_the_node_sends_it_with_the_report_of_the_failure() -> None:
    came: list[tuple[int, str, bytes]] = []

    transcripts = FailedTranscripts(Renderer(CharacterTokenizer()).text, "n0")
    site = Site(respond=lambda _: ValueError("token outside the vocabulary"))
    object.__setattr__(site.parts, "transcribe", transcripts.line)
    site.broker.state.transcripts = SimpleNamespace(put=came.append, dropped=0)  # type: ignore[assignment]
    async with site:
        site.attach(tasks=1)
        await until_async(lambda: site.states() == ["dead"])
    assert [(serial, node) for serial, node, _ in came] == [(0, "n0")] * 3
    found = msgspec.json.decode(came[0][2], type=Transcript)
    assert found.error is not None and "vocabulary" in found.error
    assert [turn.author for turn in found.turns] == ["prompt"]
