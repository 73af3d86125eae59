"""Supervised rows: text with marks of what to train, made into token documents.

A row is {"prompt": text, "completion": text}, or {"segments": [[text, 0 | 1], ...]} where 1 marks text to be
learnt. An end-of-sequence token follows every trained segment, as it ends every turn that the model will
generate. Texts are tokenised one by one without special tokens, so a document is the concatenation of its
segments' tokens, as in an episode.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np

from common.errors import UsageError
from learner.packing import Document
from learner.tasks import read_rows, shuffled

KEY = "tasks.dataset"


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    completion: str


class _Segments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    segments: list[tuple[str, Literal[0, 1]]]


Segment = tuple[str, Literal[0, 1]]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    eos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, list[list[int]]]: ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    Raises:
        UsageError: there is none, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"model.path: {folder} has no usable tokenizer: {reason}") from None
    if tokenizer.eos_token_id is None:
        raise UsageError(f"model.path: the tokenizer in {folder} has no end-of-sequence token; set eos_token")
    return tokenizer


class SftDataset:
    """Rows by step, tokenised when they are needed."""

    def __init__(self, path: Path, tokenizer: Tokenizer, seed: int, shuffle: bool) -> None:
        """Read and check every row.

        Raises:
            UsageError: missing or empty file, a line that is not JSON or not a row, naming the line.
        """
        self._rows = [parse_row(row, path, number) for number, row in read_rows(path, KEY)]
        self._tokenizer = tokenizer
        self._shuffle = shuffle
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: shuffled(seed, epoch, len(self._rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def step(self, step: int, sequences: int) -> list[Document]:
        """The `sequences` documents of one step; epochs follow one another without a gap."""
        places = range(step * sequences, (step + 1) * sequences)
        return self.documents([self._row(place) for place in places])

    def _row(self, place: int) -> int:
        epoch, at = divmod(place, len(self._rows))
        return int(self._order(epoch)[at]) if self._shuffle else at

    def documents(self, rows: Sequence[int]) -> list[Document]:
        """Token documents of these rows, all segments tokenised in one call."""
        segments = [segment for row in rows for segment in self._rows[row]]
        ids = self._tokenizer([text for text, _ in segments], add_special_tokens=False)["input_ids"]
        eos = self._tokenizer.eos_token_id
        documents: list[Document] = []
        at = 0
        for row in rows:
            tokens: list[int] = []
            mask: list[int] = []
            for (_, trained), piece in zip(self._rows[row], ids[at : at + len(self._rows[row])], strict=True):
                tokens += [*piece, eos] if trained else piece
                mask += [trained] * (len(tokens) - len(mask))
            at += len(self._rows[row])
            if len(tokens) < 2:
                raise UsageError(f"{KEY}: row {row + 1} has {len(tokens)} tokens, nothing to predict")
            documents.append(_document(tokens, mask, row))
        return documents


def _document(tokens: list[int], mask: list[int], row: int) -> Document:
    loss_mask = np.array(mask, dtype=np.uint8)
    loss_mask[0] = 0
    return Document(np.array(tokens, dtype=np.int32), loss_mask, name=f"{KEY} row {row + 1}")


def parse_row(row: bytes, path: Path, number: int) -> list[Segment]:
    """Segments of one row; raises UsageError naming the line and what a row looks like."""
    wanted = _Segments if b'"segments"' in row and b'"completion"' not in row else _Pair
    try:
        value = msgspec.json.decode(row, type=wanted)
    except msgspec.ValidationError as error:
        raise UsageError(
            f'{KEY}: {path} line {number}: {error}; expected {{"prompt": text, "completion": text}} or '
            '{"segments": [[text, 0 or 1], ...]}'
        ) from None
    if isinstance(value, _Pair):
        return [(value.prompt, 0), (value.completion, 1)]
    if not any(trained for _, trained in value.segments):
        raise UsageError(f"{KEY}: {path} line {number}: no segment is marked 1, so there is nothing to learn")
    return value.segments
