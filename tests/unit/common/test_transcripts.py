"""Turns and pieces of transcripts, on real tokenizers of three kinds."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common import transcripts
from common.rollouts import Branch, Sample, VersionRun
from common.transcripts import TokenText, Training, Transcript, transcript_line
from common.wire_types import Array
from launch.quickstart.assets import build_tokenizer

MANY_BYTES = "é 你好 🦊👩‍🚀 naïve — the end"


@cache
def quickstart() -> Tokenizer:
    return build_tokenizer().backend_tokenizer


@cache
def byte_level() -> Tokenizer:
    """As of Qwen and Llama 3: nearly every character above ASCII is several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    core.train_from_iterator(["the end of the text, then more text"] * 3, trainer)
    return core


@cache
def byte_fallback() -> Tokenizer:
    """As of Llama 2: the space belongs to the next word and is dropped at the beginning; unknown bytes are tokens."""
    words = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdehintv", "▁t", "th", "▁th", "▁the", "en"]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("e", "n")]
    vocabulary = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return core


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "quickstart": quickstart,
    "byte level": byte_level,
    "byte fallback": byte_fallback,
}


def decode(core: Tokenizer, ids: list[int]) -> str:
    return core.decode(ids, skip_special_tokens=False)


def text_of(core: Tokenizer) -> TokenText:
    return TokenText(lambda ids: decode(core, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_random_tokens_are_their_text(kind: str) -> None:
    core, draw = KINDS[kind](), random.Random(1)
    text, size = text_of(core), core.get_vocab_size()
    for _ in range(300):
        tokens = [draw.randrange(size) for _ in range(draw.randrange(40))]
        pieces = text.pieces(tokens)
        assert len(pieces) == len(tokens)
        assert "".join(pieces) == decode(core, tokens)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_character_of_several_tokens_is_in_its_last_one(kind: str) -> None:
    core = KINDS[kind]()
    for said in (MANY_BYTES, MANY_BYTES[::-1]):
        tokens = core.encode(said, add_special_tokens=False).ids
        pieces = text_of(core).pieces(tokens)
        assert "".join(pieces) == decode(core, tokens)
        assert "🦊" in pieces and "你" in pieces
        assert "�" not in "".join(pieces)
        fox = pieces.index("🦊")
        assert pieces[fox - 3 : fox] == ["", "", ""]


def test_every_word_is_in_its_own_token_with_the_space_before_it() -> None:
    core = byte_fallback()
    tokens = core.encode("the the hat", add_special_tokens=False).ids
    pieces = text_of(core).pieces(tokens)
    assert pieces[:2] == ["the", " the"]
    assert "".join(pieces) == "the the hat"


def test_long_nonsense_bytes_still_give_the_text() -> None:
    core = byte_level()
    (start,) = core.encode("你", add_special_tokens=False).ids[:1]
    tokens = [start] * 500
    pieces = text_of(core).pieces(tokens)
    assert len(pieces) == 500 and "".join(pieces) == decode(core, tokens)


def test_a_token_that_was_seen_is_not_decoded_again() -> None:
    calls: list[int] = []

    def counted(ids: list[int]) -> str:
        calls.append(len(ids))
        return decode(byte_level(), ids)

    text = TokenText(counted)
    tokens = byte_level().encode("the end", add_special_tokens=False).ids * 50
    text.pieces(tokens)
    calls.clear()
    text.pieces(tokens)
    assert calls == [len(tokens)], "the whole text"


# ---------------------------------------------------------------- turns


def say(*parts: tuple[str, str], core: Tokenizer | None = None, **changes: Any) -> Sample:
    """A sample of (author, text); authors are prompt, policy, environment, and untrained for a turn not in the loss."""
    tokens, mask, spans = [], [], []
    for author, text in parts:
        ids = (core or byte_level()).encode(text, add_special_tokens=False).ids
        if author in ("policy", "untrained"):
            spans.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
        mask += [int(author == "policy")] * len(ids)
    made = Sample(
        tokens=Array.of(tokens, "int32"),
        loss_mask=Array.of(mask, "uint8"),
        behavior_logprobs=Array.of(np.array(mask) * -0.25, "float32"),
        version_runs=[VersionRun(spans[0][0], 4)] if spans else [],
        reward=1.5,
        stop_reason="environment_done",
        turns=len(spans),
        turn_spans=spans,
    )
    return msgspec.structs.replace(made, **changes)


def made(sample: Sample, limit: int = 1 << 20, *training: Training, **facts: Any) -> Transcript:
    """`training` of the paths, the sample's own first."""
    facts = {"serial": 7, "sample": 1, "node_id": "n0", "why": ["share"]} | facts
    line = transcript_line(sample, text_of(byte_level()), limit, dict(enumerate(training)), **facts)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) <= limit
    return msgspec.json.decode(line, type=Transcript)


GAME = [("prompt", "guess"), ("policy", "5 🦊"), ("environment", "higher"), ("untrained", "oops"), ("policy", "7")]


def test_turns_have_their_author_text_tokens_reward_and_mask() -> None:
    sample = say(*GAME, turn_rewards=[0.0, 0.5, 1.0], metrics={"guesses": 2.0, "bad": float("nan")})
    found = made(sample, step=3)
    assert [(turn.author, turn.text, turn.reward) for turn in found.turns] == [
        ("prompt", "guess", None),
        ("policy", "5 🦊", 0.0),
        ("environment", "higher", None),
        ("policy", "oops", 0.5),
        ("policy", "7", 1.0),
    ]
    assert [token for turn in found.turns for token in turn.tokens] == sample.tokens.numpy().tolist()
    assert all("".join(turn.pieces) == turn.text for turn in found.turns)
    first, untrained = found.turns[1], found.turns[3]
    assert first.logprobs == [-0.25] * len(first.tokens) and first.version_runs == [(0, 4)]
    assert untrained.logprobs == untrained.ratios == []
    assert untrained.trained == [0] * len(untrained.tokens)
    assert found.turns[0].logprobs == found.turns[0].trained == []
    assert (found.reward, found.stop_reason, found.step, found.advantage) == (1.5, "environment_done", 3, None)
    assert found.metrics == {"guesses": 2.0}, "JSON has no NaN"
    assert (found.cut_tokens, found.sampled_tokens) == (0, int(sample.loss_mask.numpy().sum()))


def test_what_the_step_made_of_it_is_there_token_by_token() -> None:
    sample = say(*GAME)
    length = sample.tokens.entries()
    ratios = np.arange(length, dtype=np.float32) / 8
    mask = sample.loss_mask.numpy().copy()
    mask[sample.turn_spans[2][0] :] = 0  # the last turn was too old
    found = made(sample, 1 << 20, Training(mask, -0.5, ratios))
    start, end = sample.turn_spans[0]
    assert found.advantage == -0.5
    assert found.turns[1].ratios == ratios[start:end].tolist()
    assert found.turns[1].trained == [1] * (end - start)
    assert found.turns[4].trained == [0] * len(found.turns[4].tokens)
    assert found.turns[4].logprobs and found.turns[4].ratios == found.turns[3].ratios == []
    lost = made(sample, 1 << 20, Training(mask, -0.5, ratios * np.nan))
    assert lost.turns[1].ratios == []


def branch_of(sample: Sample, name: str = "") -> Branch:
    fields = ("tokens", "loss_mask", "behavior_logprobs", "version_runs", "turn_spans")
    return Branch(**{field: getattr(sample, field) for field in fields}, name=name)


def test_a_branch_shows_from_where_it_leaves_an_earlier_path_with_its_name_and_its_own_mask() -> None:
    sample = say(*GAME)
    other = say(*GAME[:3], ("policy", "6"))
    mask = other.loss_mask.numpy().copy()
    mask[: other.turn_spans[-1][0]] = 0  # counted in the sample's own path
    other = msgspec.structs.replace(other, loss_mask=Array.of(mask, "uint8"))
    alone = say(("prompt", "search"), ("policy", "found it"))
    sample = msgspec.structs.replace(sample, branches=[branch_of(other), branch_of(alone, "searcher")])
    masks = [path.loss_mask.numpy() for path in sample.paths]
    found = made(sample, 1 << 20, *(Training(mask, 0.5) for mask in masks))
    assert [(turn.path, turn.name, turn.author, turn.text) for turn in found.turns[5:]] == [
        (1, "", "policy", "6"),
        (2, "searcher", "prompt", "search"),
        (2, "searcher", "policy", "found it"),
    ]
    assert found.turns[5].trained == [1] and found.turns[7].trained == [1] * len(found.turns[7].tokens)
    assert found.sampled_tokens == sum(int(mask.sum()) for mask in masks)
    whole = len(msgspec.json.encode(found))
    short = made(sample, whole * 2 // 3, *(Training(mask, 0.5) for mask in masks))
    shown = sum(len(turn.tokens) for turn in short.turns)
    assert short.cut_tokens > 0 and shown + short.cut_tokens == sum(len(turn.tokens) for turn in found.turns)
    assert short.cut_tokens == sum(turn.cut_before for turn in short.turns)
    assert (short.turns[0].path, short.turns[-1].path) == (0, 2)


def test_many_branches_are_compared_with_their_neighbours_only_and_begin_where_all_others_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    shared = transcripts._shared  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(transcripts, "_shared", lambda *pair: compared.append(shared(*pair)) or compared[-1])
    draw = random.Random(3)
    paths = [say(("prompt", "".join(draw.choices("ab", k=8))), ("policy", "6")) for _ in range(60)]
    found = made(msgspec.structs.replace(paths[0], branches=[branch_of(path) for path in paths[1:]]))
    assert len(compared) <= 2 * len(paths)
    for number, path in enumerate(paths):
        tokens = path.tokens.numpy().tolist()
        prompt = path.turn_spans[0][0]
        others = [other.tokens.numpy().tolist() for other in paths[:number]]
        start = max(k for k in range(prompt + 1) if not k or any(other[:k] == tokens[:k] for other in others))
        assert [token for turn in found.turns if turn.path == number for token in turn.tokens] == tokens[start:]


def test_a_turn_of_a_branch_is_shown_whole_although_another_one_begins_with_the_same_words() -> None:
    sample = say(("prompt", "guess"), ("policy", "first 5"), ("environment", "no"), ("policy", "7"))
    other = say(("prompt", "guess"), ("policy", "first 6"), ("environment", "no"), ("policy", "8"))
    found = made(msgspec.structs.replace(sample, branches=[branch_of(other)]))
    assert [turn.text for turn in found.turns if turn.path == 1] == ["first 6", "no", "8"]


def test_a_turn_of_several_versions_says_where_each_begins() -> None:
    sample = say(*GAME)
    (first, end), (_, _), (last, _) = sample.turn_spans
    runs = [VersionRun(first, 4), VersionRun(end - 1, 5), VersionRun(last, 6)]
    found = made(msgspec.structs.replace(sample, version_runs=runs))
    assert found.turns[1].version_runs == [(0, 4), (end - 1 - first, 5)]
    assert found.turns[3].version_runs == [(0, 5)]
    assert found.turns[4].version_runs == [(0, 6)]


def test_without_spans_the_mask_tells_the_turns() -> None:
    old = say(("prompt", "guess"), ("policy", "5"), ("environment", "no"), ("policy", "7"), turn_spans=[])
    assert [(turn.author, turn.text) for turn in made(old).turns] == [
        ("prompt", "guess"),
        ("policy", "5"),
        ("environment", "no"),
        ("policy", "7"),
    ]


def test_a_long_episode_loses_its_middle_and_says_how_much() -> None:
    sample = say(("prompt", "guess"), ("policy", "the text " * 3000), ("environment", "end"), ("policy", "7 " * 2000))
    tokens, limit = sample.tokens.numpy().tolist(), 1 << 14
    found = made(msgspec.structs.replace(sample, turn_rewards=[0.25, 0.75]), limit)
    kept = [token for turn in found.turns for token in turn.tokens]
    assert len(kept) + found.cut_tokens == len(tokens)
    (after,) = (i for i, turn in enumerate(found.turns) if turn.cut_before)
    assert found.turns[after].cut_before == found.cut_tokens > 0
    head = [token for turn in found.turns[:after] for token in turn.tokens]
    assert kept == tokens[: len(head)] + tokens[len(head) + found.cut_tokens :]
    assert 0.5 * limit < len(msgspec.json.encode(found))
    assert [turn.reward for turn in found.turns] == [None, None, 0.75], "the first turn's end is cut, and its reward"
    assert all(len(turn.trained) == len(turn.tokens) for turn in found.turns if turn.author == "policy")


def test_an_episode_without_tokens_has_a_transcript_with_its_error() -> None:
    found = made(say(error="reset raised OSError: no calculator", reward=float("nan")), why=["failed"])
    assert (found.turns, found.reward, found.error) == ([], 0.0, "reset raised OSError: no calculator")


@pytest.mark.parametrize("spans", [[(3, 2)], [(0, 4), (3, 5)], [(0, 10_000)], [(-1, 2)]])
def test_turns_outside_of_the_sample_are_refused(spans: list[tuple[int, int]]) -> None:
    length = say(*GAME).tokens.entries()
    with pytest.raises(ValueError, match=f"{length} tokens$"):
        made(say(*GAME, turn_spans=spans))


def test_what_is_too_long_without_any_token_is_refused() -> None:
    with pytest.raises(ValueError, match="without"):
        made(say(*GAME, metrics={f"{i:05}": 1.0 for i in range(4000)}), 1 << 14)
