"""Turns an environment's messages into token ids; the policy's text is never tokenised.

A chat template renders whole conversations; this module takes only the new text from it. For the text between two
turns it renders a made-up conversation, in which the assistant says a mark and the new messages follow. So a turn's
tokens are an exact prefix of the next prompt, even if the template would change earlier turns.
"""

import json
import operator
from functools import lru_cache
from typing import Any, Protocol

from rollout_fleet.environments.protocol import Chat, Observation

MARK = "SLIPSTREAM-ASSISTANT-SAID-THIS"
Message = dict[str, Any]
CACHED_CHARS = 4096  # longer texts are tokenised each time, so that the cache stays small


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the driver uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    # those of chat models have `chat_template` and `apply_chat_template` too


class Renderer:
    """Observations to token ids, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached = lru_cache(maxsize=4096)(self._encode)

    @property
    def template(self) -> str:
        """The chat template's source; '' of a tokenizer without one."""
        found = getattr(self._tokenizer, "chat_template", None)
        return found if isinstance(found, str) else "" if found is None else json.dumps(found)

    def ids(self, observation: Observation, end_token: int | None = None) -> list[int]:
        """Token ids of an observation: of the prompt, or of what follows a turn that ended with `end_token`."""
        if isinstance(observation, Chat):
            messages: list[Message] = [{"role": role, "content": content} for role, content in observation.messages]
            tools, options = observation.tools, dict(observation.options)
            if end_token is None:
                observation = self.conversation(messages, tools, options)
            else:
                observation = self.continuation(messages, end_token, tools, options)
        return self.encode(observation) if isinstance(observation, str) else [_token(found) for found in observation]

    def conversation(self, messages: list[Message], tools: str = "", options: Message | None = None) -> str:
        """A whole conversation, up to where the assistant begins; messages as chat templates want them."""
        if not self.template:
            return "\n\n".join(str(message.get("content") or "") for message in messages)
        return self._render(messages, tools, options or {})

    def continuation(
        self, messages: list[Message], end_token: int | None, tools: str = "", options: Message | None = None
    ) -> str:
        """The text between a turn of the assistant and its next one; `end_token` None: that turn was cut off."""
        if not self.template:
            return "".join(f"\n\n{message.get('content') or ''}" for message in messages) + "\n\n"
        said: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        whole = self._render([*said, *messages], tools, options or {})
        before, mark, after = whole.rpartition(MARK)
        if not mark or MARK in before:
            raise ValueError("the chat template does not show what the assistant said exactly once")
        return after if end_token is None else after.removeprefix(self.text([end_token]))

    def text(self, tokens: list[int]) -> str:
        """Tokens as text, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """Text as tokens, none added."""
        return list(self._cached(text)) if len(text) <= CACHED_CHARS else list(self._encode(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: list[Message], tools: str, options: Message) -> str:
        template: Any = self._tokenizer
        if tools:
            options = {**options, "tools": json.loads(tools)}
        return template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def _token(found: object) -> int:
    try:
        return operator.index(found)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"a token id must be an integer, found {found!r}") from None
