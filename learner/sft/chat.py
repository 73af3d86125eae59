"""Chat rows: a conversation as the tokenizer's chat template renders it, and the tokens that the assistant says.

A template with {% generation %} marks says itself which tokens are the assistant's. Otherwise the conversation is
rendered twice up to each assistant message: once asking for the message, once with it. The difference is the
assistant's, up to the end of its turn. Templates that rewrite earlier turns are refused; some drop the reasoning of all
but the last. The pieces are tokenised one by one, as in an episode.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from common.errors import UsageError

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ASSISTANT = "assistant"


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One conversation."""

    messages: list[dict[str, object]]  # `role`, `content`, and whatever else the template reads (tool_calls, ...)
    tools: list[dict[str, object]] | None = None  # JSON schemas of the tools that the template shows to the model


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    eos_token_id: int | None
    all_special_ids: list[int]

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
