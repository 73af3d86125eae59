"""Supervised rows: text with marks of what to train, made into token documents.

A row is {"prompt": text, "completion": text}, or {"segments": [[text, 0 | 1], ...]} where 1 marks text to be learnt.
An end-of-sequence token follows every trained segment, as it ends every turn that the model will generate. Texts are
tokenised one by one without special tokens, as in an episode. Or a row is {"messages": [{"role": ..., "content":
...}, ...]}, and the assistant's tokens are learnt (learner/sft/chat.py).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from common.errors import UsageError
from common.json_lines import dataset_rows
from learner.batch.packing import Document
from learner.loop.tasks import RowOrder
from learner.sft.chat import Chat, ChatTemplate, ChatTokenizer, check_messages

KEY = "tasks.dataset"


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    completion: str


class _Segments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    segments: list[tuple[str, Literal[0, 1]]]


Segment = tuple[str, Literal[0, 1]]
Row = list[Segment] | Chat
LOOKS = (
    'expected {"prompt": text, "completion": text}, {"segments": [[text, 0 or 1], ...]} or '
    '{"messages": [{"role": ..., "content": text}, ...]}'
)


class SftDataset:
    """Rows by step, tokenised when they are needed; `digest` lets a resumed run notice another dataset."""

    def __init__(self, path: Path, tokenizer: ChatTokenizer, seed: int, shuffle: bool, held_out: float = 0.0) -> None:
        """Read and check every row; raises UsageError naming a line that is no row or that the template refuses.

        `held_out`: the share of the rows that no step trains: those of `held_out_rows`, not of `trained_rows`.
        """
        if tokenizer.eos_token_id is None:
            folder = getattr(tokenizer, "name_or_path", "its folder")
            raise UsageError(f"model.path: the tokenizer in {folder} has no end-of-sequence token; set eos_token")
        self._tokenizer = tokenizer
        self._chats = ChatTemplate(tokenizer)
        self._rows: list[Row] = []
        self._names: list[str] = []
        keys: list[bytes] = []
        digest = hashlib.sha256()
        for where, line in dataset_rows(path, KEY):
            digest.update(line + b"\n")
            keys.append(hashlib.sha256(line).digest() if held_out else b"")
            row = parse_row(line, where)
            self._names.append(f"{KEY}: {where}")
            if isinstance(row, Chat):
                self._chats.check(row, self._names[-1])
            self._rows.append(row)
        self.digest = digest.hexdigest()[:16]
        self.held_out_rows = _held_out(keys, held_out)
        self.trained_rows = sorted({*range(len(self._rows))}.difference(self.held_out_rows))
        self._order = RowOrder(len(self.trained_rows), seed, shuffle)

    def step(self, step: int, sequences: int) -> list[Document]:
        """The `sequences` documents of one step; epochs follow one another without a gap."""
        positions = range(step * sequences, (step + 1) * sequences)
        return self.documents([self.trained_rows[self._order.row(position)[1]] for position in positions])

    def documents(self, rows: Sequence[int]) -> list[Document]:
        """Token documents of these rows, all segments tokenised in one call; raises UsageError naming a bad row."""
        segments = [segment for row in rows if not isinstance(found := self._rows[row], Chat) for segment in found]
        texts = [text for text, _ in segments]
        eos = self._tokenizer.eos_token_id
        assert eos is not None
        pieces = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        documents: list[Document] = []
        for row in rows:
            found = self._rows[row]
            tokens: list[int] = []
            mask: list[int] = []
            if isinstance(found, Chat):
                tokens, mask = self._chats.tokens(found, self._names[row])
            else:
                for _, trained in found:
                    tokens += [*next(pieces), eos] if trained else next(pieces)
                    mask += [trained] * (len(tokens) - len(mask))
            if len(tokens) < 2:
                raise UsageError(f"{self._names[row]} has {len(tokens)} tokens, nothing to predict")
            mask[0] = 0
            trained = np.array(mask, dtype=np.uint8)
            documents.append(Document(np.array(tokens, dtype=np.int32), trained, name=self._names[row]))
        return documents


def _held_out(keys: Sequence[bytes], share: float) -> list[int]:
    """The rows with the smallest keys, which are digests of their contents: equal rows stay on one side.

    So a row's side depends on no seed, and on its place in the file only through the share. Raises UsageError.
    """
    if not share:
        return []
    last = sorted(keys)[max(round(share * len(keys)), 1) - 1]
    held = [row for row, key in enumerate(keys) if key <= last]
    if len(held) == len(keys):
        raise UsageError(f"evaluation.share: expected a share that leaves rows to train, found {share} of {len(keys)}")
    return held


def parse_row(row: bytes, where: str) -> Row:
    """One row; raises UsageError naming the line, `where`, and the form of a row."""
    try:
        keys = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
        wanted = Chat if "messages" in keys else _Segments if "segments" in keys else _Pair
        value = msgspec.json.decode(row, type=wanted)
        if isinstance(value, Chat):
            check_messages(value)
            return value
    except ValueError as error:  # msgspec's are ValueErrors
        raise UsageError(f"{KEY}: {where}: {error}; {LOOKS}") from None
    if isinstance(value, _Pair):
        return [(value.prompt, 0), (value.completion, 1)]
    if not any(trained for _, trained in value.segments):
        raise UsageError(f"{KEY}: {where}: no segment is marked 1, so there is nothing to learn")
    return value.segments
