"""Supervised rows: segments, end-of-sequence tokens, masks, and clear refusals."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.errors import UsageError
from common.hub import load_tokenizer
from learner.sft.rows import SftDataset
from tests.rigs.refusals import refused

EOS = 1


class Characters:
    """Every character is its code point."""

    eos_token_id = EOS
    all_special_ids = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(c) for c in part] for part in text]}


def dataset(folder: Path, *rows: str, tokenizer: Any = None, shuffle: bool = False, **more: Any) -> SftDataset:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return SftDataset(path, tokenizer or Characters(), **{"seed": 0, "shuffle": shuffle} | more)


@pytest.mark.parametrize(
    ("row", "tokens", "mask"),
    [
        ('{"prompt": "ab", "completion": "cd"}', [97, 98, 99, 100, EOS], [0, 0, 1, 1, 1]),
        ('{"segments": [["a", 0], ["b", 1], ["c", 0], ["d", 1]]}', [97, 98, EOS, 99, 100, EOS], [0, 1, 1, 0, 1, 1]),
        ('{"prompt": "", "completion": "ab"}', [97, 98, EOS], [0, 1, 1]),
    ],
    ids=["a completion", "segments", "nothing predicts a first token"],
)
def test_every_trained_segment_ends_with_the_end_token_and_others_do_not(
    tmp_path: Path, row: str, tokens: list[int], mask: list[int]
) -> None:
    (document,) = dataset(tmp_path, row).documents([0])
    assert (document.tokens.tolist(), document.loss_mask.tolist()) == (tokens, mask)


class Beginning(Characters):
    """It begins a text with <s>, written `<`, and ends it, as a server adds them."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        found = super().encode(text, add_special_tokens=False)
        return [ord("<"), *found, EOS] if add_special_tokens else found


@pytest.mark.parametrize(
    ("row", "text", "mask"),
    [
        ('{"prompt": "ab", "completion": "cd"}', "<abcd", [0, 0, 0, 1, 1, 1]),
        ('{"prompt": "<ab", "completion": "cd"}', "<abcd", [0, 0, 0, 1, 1, 1]),
        ('{"segments": [["ab", 1]]}', "<ab", [0, 1, 1, 1]),
    ],
)
def test_a_row_begins_as_the_tokenizer_begins_a_text(tmp_path: Path, row: str, text: str, mask: list[int]) -> None:
    (document,) = dataset(tmp_path, row, tokenizer=Beginning()).documents([0])
    assert document.tokens.tolist() == [*map(ord, text), EOS]
    assert document.loss_mask.tolist() == mask


def test_steps_walk_through_the_epochs_and_shuffled_ones_have_every_row_once(tmp_path: Path) -> None:
    rows = dataset(tmp_path, *(f'{{"prompt": "{c}", "completion": "x"}}' for c in "abc"))
    first = [chr(d.tokens[0]) for step in range(3) for d in rows.step(step, 2)]
    assert first == list("abcabc")
    rows = dataset(tmp_path, *(f'{{"prompt": "{chr(c)}", "completion": "x"}}' for c in range(97, 117)), shuffle=True)
    epochs = [[int(d.tokens[0]) for d in rows.step(step, 20)] for step in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(97, 117))
    assert epochs[0] != epochs[1]


def texts(rows: SftDataset, numbers: list[int]) -> set[str]:
    return {chr(document.tokens[0]) for document in rows.documents(numbers)} if numbers else set()


def test_held_out_rows_are_the_same_for_every_seed_and_order_and_no_step_trains_them(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{chr(c)}", "completion": "x"}}' for c in range(97, 117)]
    held = texts(dataset(tmp_path, *lines), [])
    for seed, order in ((0, lines), (7, lines), (7, lines[::-1])):
        rows = dataset(tmp_path, *order, shuffle=True, seed=seed, held_out=0.2)
        held = held or texts(rows, rows.held_out_rows)
        assert texts(rows, rows.held_out_rows) == held and len(held) == 4
        epoch = [chr(document.tokens[0]) for document in rows.step(0, 16)]
        assert sorted([*epoch, *held]) == [chr(c) for c in range(97, 117)]
        assert len(rows.trained_rows) == 16
    nothing = dataset(tmp_path, *lines)
    assert (nothing.held_out_rows, nothing.trained_rows) == ([], [*range(20)])


def test_equal_rows_stay_on_one_side_and_a_share_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{c}", "completion": "x"}}' for c in "abcd"] * 5
    for share in (0.01, 0.3, 0.6):
        rows = dataset(tmp_path, *lines, held_out=share)
        held, trained = (
            texts(rows, rows.held_out_rows),
            {chr(d.tokens[0]) for d in rows.step(0, len(rows.trained_rows))},
        )
        assert held and held.isdisjoint(trained) and held | trained == set("abcd")
        assert len(rows.held_out_rows) == 5 * len(held)
    with refused(UsageError, "evaluation.share", "0.9 of 20"):
        dataset(tmp_path, *lines, held_out=0.9)


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ('{"prompt": "a"}', "`completion`"),
        ('{"prompt": "a", "completion": 3}', "got `int`"),
        ('{"prompt": "a", "completion": "b", "extra": 1}', "`extra`"),
        ('{"segments": [["a", 2]]}', "enum value 2"),
        ('{"segments": [["a", 0]]}', "marked 1"),
        ("{", "not JSON"),
        ('{"messages": []}', "assistant"),
        ('{"messages": [{"content": "a"}]}', "message 1 has no role"),
        ('{"messages": [{"role": "assistant"}]}', "message 1 has no text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "assistant"),
        ('{"messages": "hello"}', "`$.messages`"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, fact: str) -> None:
    with refused(UsageError, "tasks.dataset", "rows.jsonl line 1", fact) as caught:
        dataset(tmp_path, row)
    assert ('{"prompt": text' in str(caught.value)) == (fact not in ("marked 1", "not JSON"))


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with refused(UsageError, "model.path", tmp_path):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------- conversations

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + ASK
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + ASK
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + CHATML
REWRITES = (  # as Qwen3's: reasoning stays in the last answer only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + ASK
)
ENDLESS = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "")
UNENTERED = "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + CHATML
TALK = [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "Yes, 4.")]


def tokenizer_with(template: str | None, merges: tuple[str, ...] = ()) -> Any:
    """A real tokenizer over characters, <|im_start|> and <|im_end|>, plus `merges`, each of two characters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*characters, *merges])}
    core = Tokenizer(models.BPE(vocabulary, [(merge[0], merge[1]) for merge in merges]))
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


def chat_row(talk: list[tuple[str, str]] = TALK, **more: object) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in talk], **more})


def said(template: str | None, folder: Path, row: str) -> tuple[str, list[str]]:
    """(whole text, runs of trained text) of one row."""
    tokenizer = tokenizer_with(template)
    (document,) = dataset(folder, row, tokenizer=tokenizer).documents([0])
    runs: list[list[int]] = [[]]
    for token, trained in zip(document.tokens.tolist(), document.loss_mask.tolist(), strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return tokenizer.decode(document.tokens.tolist()), [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WITHOUT_END], ids=["chatml", "marked", "marks stop short"])
def test_what_the_assistant_says_and_the_end_of_its_turn_are_trained(tmp_path: Path, template: str) -> None:
    whole, trained = said(template, tmp_path, chat_row())
    assert trained == ["4<|im_end|>", "Yes, 4.<|im_end|>"]
    assert whole == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in TALK)


def test_tools_and_their_answers_pass_through_untrained(tmp_path: Path) -> None:
    talk = [("user", "time?"), ("assistant", "call clock"), ("tool", "12:00"), ("assistant", "Noon.")]
    whole, trained = said(TOOLS, tmp_path, chat_row(talk, tools=[{"name": "clock"}]))
    assert whole.startswith('tools: [{"name": "clock"}]\n<|im_start|>user')
    assert "<|im_start|>tool\n12:00<|im_end|>" in whole
    assert trained == ["call clock<|im_end|>", "Noon.<|im_end|>"]


def test_the_prompt_has_the_tokens_that_the_model_sees_when_it_is_asked(tmp_path: Path) -> None:
    talk = [("user", "a"), ("assistant", "Hi")]
    tokenizer = tokenizer_with(CHATML, merges=("\nH",))  # would join the header with the answer
    (document,) = dataset(tmp_path, chat_row(talk), tokenizer=tokenizer).documents([0])
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)["input_ids"]
    assert document.tokens[: len(asked)].tolist() == asked
    assert not document.loss_mask[: len(asked)].any() and document.loss_mask[len(asked)]


def test_a_template_that_rewrites_earlier_turns_takes_single_answers_only(tmp_path: Path) -> None:
    _, trained = said(REWRITES, tmp_path, chat_row(TALK[:3]))
    assert trained == ["<think></think>4<|im_end|>"]
    with refused(UsageError, "rows.jsonl line 1", "message 3"):
        said(REWRITES, tmp_path, chat_row())


@pytest.mark.parametrize(
    ("template", "row", "fact"),
    [
        (None, chat_row(), "has none"),
        (ENDLESS, chat_row(), "special token"),
        (CHATML, chat_row([("assistant", "hello")]), "speaks first"),
        ("{{ raise_exception('roles must alternate') }}", chat_row(), "alternate"),
        (UNENTERED, chat_row(), "marks no token"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_from_is_refused_by_name(
    tmp_path: Path, template: str | None, row: str, fact: str
) -> None:
    with refused(UsageError, "tasks.dataset", "rows.jsonl line 1", fact):
        said(template, tmp_path, row)


def test_rows_of_all_kinds_may_be_mixed_and_keep_their_own_segments(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    others = ('{"prompt": "a", "completion": "b"}', '{"segments": [["c", 0], ["d", 0], ["e", 1]]}')
    found = dataset(tmp_path, chat_row(TALK[:3]), *others, tokenizer=tokenizer).documents([2, 1, 0])
    *plain, chat = (tokenizer.decode(document.tokens.tolist()) for document in found)
    assert plain == ["cde<|im_end|>", "ab<|im_end|>"]
    assert chat.startswith("<|im_start|>system\nBe brief.")


def test_a_row_nested_too_deeply_and_one_with_nothing_to_predict_are_named_by_their_line(tmp_path: Path) -> None:
    deep = '{"messages": [{"role": "user", "content": "a", "extra": ' + "[" * 100_000 + "]" * 100_000 + "}]}"
    with refused(UsageError, "tasks.dataset", "rows.jsonl line 2", "nested"):
        dataset(tmp_path, '{"prompt": "a", "completion": "b"}', deep)
    rows = dataset(tmp_path, '{"prompt": "a", "completion": "b"}', "", '{"prompt": "", "completion": ""}')
    with refused(UsageError, "tasks.dataset", "rows.jsonl line 3", "1 tokens"):
        rows.documents([1])
