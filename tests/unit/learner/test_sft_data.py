"""Supervised rows: segments, end-of-sequence tokens, masks, and clear refusals."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from common.errors import UsageError
from learner.sft_data import SftDataset, load_tokenizer

EOS = 1


class Characters:
    """Every character is its code point."""

    eos_token_id = EOS

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(c) for c in part] for part in text]}


def dataset(folder: Path, *rows: str, shuffle: bool = False) -> SftDataset:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return SftDataset(path, Characters(), seed=0, shuffle=shuffle)


def test_a_completion_is_trained_and_ends_with_the_end_token(tmp_path: Path) -> None:
    (document,) = dataset(tmp_path, '{"prompt": "ab", "completion": "cd"}').documents([0])
    assert document.tokens.tolist() == [97, 98, 99, 100, EOS]
    assert document.loss_mask.tolist() == [0, 0, 1, 1, 1]


def test_every_trained_segment_ends_with_the_end_token_and_others_do_not(tmp_path: Path) -> None:
    row = '{"segments": [["a", 0], ["b", 1], ["c", 0], ["d", 1]]}'
    (document,) = dataset(tmp_path, row).documents([0])
    assert document.tokens.tolist() == [97, 98, EOS, 99, 100, EOS]
    assert document.loss_mask.tolist() == [0, 1, 1, 0, 1, 1]


def test_rows_keep_their_own_segments(tmp_path: Path) -> None:
    rows = dataset(tmp_path, '{"prompt": "a", "completion": "b"}', '{"segments": [["c", 0], ["d", 0], ["e", 1]]}')
    assert [d.tokens.tolist() for d in rows.documents([1, 0])] == [[99, 100, 101, EOS], [97, 98, EOS]]


def test_steps_walk_through_the_epochs(tmp_path: Path) -> None:
    rows = dataset(tmp_path, *(f'{{"prompt": "{c}", "completion": "x"}}' for c in "abc"))
    first = [chr(d.tokens[0]) for step in range(3) for d in rows.step(step, 2)]
    assert first == list("abcabc")


def test_shuffled_epochs_hold_every_row_once(tmp_path: Path) -> None:
    rows = dataset(tmp_path, *(f'{{"prompt": "{chr(c)}", "completion": "x"}}' for c in range(97, 117)), shuffle=True)
    epochs = [[int(d.tokens[0]) for d in rows.step(step, 20)] for step in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(97, 117))
    assert epochs[0] != epochs[1]


def test_a_trained_first_token_has_nothing_that_predicts_it(tmp_path: Path) -> None:
    (document,) = dataset(tmp_path, '{"prompt": "", "completion": "ab"}').documents([0])
    assert document.loss_mask.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"}', r"line 1: .*completion.*expected \{\"prompt\": text"),
        ('{"prompt": "a", "completion": 3}', "line 1: Expected `str`, got `int`"),
        ('{"prompt": "a", "completion": "b", "extra": 1}', "unknown field `extra`"),
        ('{"segments": [["a", 2]]}', "line 1: Invalid enum value 2"),
        ('{"segments": [["a", 0]]}', "no segment is marked 1"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataset(tmp_path, row)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.path: .* has no usable tokenizer"):
        load_tokenizer(tmp_path)
