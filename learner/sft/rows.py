"""Supervised rows: text with marks of what to train, made into token documents.

A row is {"prompt": text, "completion": text}, or {"segments": [[text, 0 | 1], ...]} where 1 marks text to be learnt.
An end-of-sequence token follows every trained segment, as it ends every turn that the model will generate. Texts are
tokenised one by one, as in an episode: the tokenizer's begin tokens, such as <s>, go before the first. Or a row is
{"messages": [{"role": ..., "content": ...}, ...]}, and the assistant's tokens are learnt (ChatTemplate).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from common.errors import UsageError
from common.hub import begin_tokens, begun
from common.json_lines import dataset_rows
from learner.batch.packing import Document
from learner.loop.tasks import RowOrder

# ---------------------------------------------------------------- chat rows
# A template with {% generation %} marks says itself which tokens are the assistant's. Otherwise the conversation is
# rendered twice up to each assistant message: once asking for the message, once with it. The difference is the
# assistant's, up to the end of its turn. Templates that rewrite earlier turns are refused; some drop the reasoning of
# all but the last. The pieces are tokenised one by one, as in an episode.


GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ASSISTANT = "assistant"


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[dict[str, object]]  # `role`, `content`, and whatever else the template reads (tool_calls, ...)
    tools: list[dict[str, object]] | None = None  # JSON schemas of the tools that the template shows to the model


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    eos_token_id: int | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, list[list[int]]]: ...

    def get_chat_template(self, chat_template: None = None, tools: Any = None) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def check_messages(chat: Chat) -> None:
    """Raise ValueError saying what is missing: a role or content, or an assistant message to learn from."""
    for number, message in enumerate(chat.messages, start=1):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {number} has no text as its content")
    if not any(message["role"] == ASSISTANT for message in chat.messages):
        raise ValueError("no message is the assistant's, so there is nothing to learn")


class ChatTemplate:
    """The chat template of one tokenizer. Every method raises UsageError that begins with the `name` given."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    def check(self, chat: Chat, name: str) -> None:
        """Whether the template takes this conversation, without tokenising it."""
        if self._marked(chat, name):
            self._apply(chat, chat.messages, name)
        else:
            self._segments(chat, name)

    def tokens(self, chat: Chat, name: str) -> tuple[list[int], list[int]]:
        """(token ids, mask: 1 where the assistant says the token, the end of its turn included)."""
        tokens, mask = (self._by_marks if self._marked(chat, name) else self._by_prefixes)(chat, name)
        if not any(mask):
            raise UsageError(f"{name}: the chat template marks no token of it as the assistant's")
        return tokens, mask

    def _by_marks(self, chat: Chat, name: str) -> tuple[list[int], list[int]]:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(chat, chat.messages, name, **options)
        tokens = list(found["input_ids"])
        mask = list(found["assistant_masks"])
        for at in range(1, len(tokens)):  # marks that stop short of the token that ends the turn
            if mask[at - 1] and tokens[at] == self._tokenizer.eos_token_id and tokens[at - 1] != tokens[at]:
                mask[at] = 1
        return tokens, mask

    def _by_prefixes(self, chat: Chat, name: str) -> tuple[list[int], list[int]]:
        segments = self._segments(chat, name)
        pieces = self._tokenizer([text for text, _ in segments], add_special_tokens=False)["input_ids"]
        tokens: list[int] = []
        mask: list[int] = []
        for (_, trained), piece in zip(segments, pieces, strict=True):
            said = 0
            if trained:  # all up to the last special token, which ends the assistant's turn
                ends = [at for at, token in enumerate(piece) if token == self._tokenizer.eos_token_id]
                ends = ends or [at for at, token in enumerate(piece) if token in self._special]
                if not ends:
                    raise UsageError(
                        f"{name}: the chat template ends the assistant's turn with no special token. The model would "
                        "never learn to stop; give model.path a template that does"
                    )
                said = ends[-1] + 1
            tokens += piece
            mask += [1] * said + [0] * (len(piece) - said)
        return tokens, mask

    def _segments(self, chat: Chat, name: str) -> list[tuple[str, Literal[0, 1]]]:
        """The conversation's text in pieces, 1 where the assistant adds it."""
        whole = self._apply(chat, chat.messages, name)
        segments: list[tuple[str, Literal[0, 1]]] = []
        done = 0
        for number, message in enumerate(chat.messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._apply(chat, chat.messages[:number], name, add_generation_prompt=True)
            after = self._apply(chat, chat.messages[: number + 1], name)
            if not (len(before) >= done and after.startswith(before) and whole.startswith(after)):
                raise UsageError(
                    f"{name}: the chat template writes message {number + 1} otherwise when it is asked for, or when "
                    "more follows. So the assistant's part of the text cannot be found. End every row with its "
                    "only assistant message, or give model.path a template with {% generation %} marks"
                )
            segments.append((whole[done : len(before)], 0))
            segments.append((whole[len(before) : len(after)], 1))
            done = len(after)
        return [*segments, (whole[done:], 0)] if whole[done:] else segments

    def _marked(self, chat: Chat, name: str) -> bool:
        try:
            return bool(GENERATION.search(self._tokenizer.get_chat_template(tools=chat.tools)))
        except ValueError:
            raise UsageError(
                f"{name}: chat rows need a tokenizer with a chat template, and model.path has none; add one, or write "
                "rows as prompt and completion"
            ) from None

    def _apply(
        self, chat: Chat, messages: list[dict[str, object]], name: str, tokenize: bool = False, **options: bool
    ) -> Any:
        if not messages:
            raise UsageError(f"{name}: the assistant speaks first; the chat template cannot ask for that")
        try:
            return self._tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=tokenize, **options)
        except Exception as error:  # templates raise what they like
            reason = str(error).strip().split("\n")[0]
            raise UsageError(f"{name}: the chat template refuses it: {reason}") from None


# ---------------------------------------------------------------- rows

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
        self._begin = begin_tokens(tokenizer)
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
                tokens = begun(tokens, self._begin)
                mask = [0] * (len(tokens) - len(mask)) + mask
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
