"""The environment around reward functions: `tasks.reward` and `tasks.prompt` instead of a class; docs/rewards.md.

A function gets the completion and the row, and its options by keyword. It returns a number, or numbers by name; it may
be a coroutine function. Whatever else it does fails its sample with a reason.
"""

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from common.errors import ConfigError
from rollout_fleet.environments.protocol import Action, Chat, StepResult
from rollout_fleet.environments.registry import check_arguments, resolve
from rollout_fleet.environments.reward_library import BUILT_IN, column_of, text_of

KEY = "tasks.reward"
EXPECTED = "a built-in reward or 'module:function'"
PROMPT_COLUMN = "prompt"
ROLES = ("system", "user", "assistant", "tool")
SHOWN_CHARS = 200
_PLACE = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([^{}\n]+)\}")  # {{word}} stands for {word}
_WORD = re.compile(r"[A-Za-z_][\w.]*")


class RewardFailed(Exception):
    """A reward function raised, or returned something that is no reward; the message names it."""


class RewardFunction:
    """Single turn. Problem: a row with the columns that prompt and rewards name.

    Options:
        rewards: of each function the entry that registry.played makes.
        prompt, chat_template_kwargs: as in TasksConfig.
    """

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        rewards: Sequence[Mapping[str, Any]],
        prompt: str | Sequence[Mapping[str, str]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._row = problem
        self._prompt = Chat(tuple(messages_of(prompt, problem)), tuple((chat_template_kwargs or {}).items()))
        self._rewards = [_Reward.of(entry) for entry in rewards]

    async def reset(self) -> Chat:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """The weighted sum of the rewards, which are the metrics as they were returned; raises RewardFailed."""
        metrics: dict[str, float] = {}
        total = 0.0
        for reward in self._rewards:
            values = await reward.judge(action, self._row)
            if twice := metrics.keys() & values.keys():
                raise RewardFailed(f"two rewards are named {min(twice)!r}; give one of them a `name`")
            metrics |= values
            total += sum(reward.weight_of(name) * value for name, value in values.items())
        return StepResult(reward=total, metrics=metrics)

    @staticmethod
    def needs(rewards: Sequence[Mapping[str, Any]], **_: Any) -> tuple[str, ...]:
        """The libraries of the functions; raises as `check`."""
        functions = [_function(entry) for entry in rewards]
        return tuple(library for function in functions for library in getattr(function, "NEEDS", ()))

    @staticmethod
    def check(rewards: Sequence[Mapping[str, Any]], file: str, **_: Any) -> None:
        """Raise ConfigError for a function that is not there, is none, or does not take its options."""
        for entry in rewards:
            function = _function(entry, file)
            given = ("action",) if _takes_action(function) else ()
            check_arguments(
                function, entry["options"], ("completion", "row"), given, file=file, key=entry["options_key"]
            )


@dataclass(frozen=True)
class _Reward:
    function: Callable[..., Any]
    weight: float | Mapping[str, float]  # a mapping has the function's own names
    options: Mapping[str, Any]
    metric: str  # name of its only reward
    prefix: str  # before names that the function returns

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "_Reward":
        return cls(_function(entry), *(entry[name] for name in ("weight", "options", "metric", "prefix")))

    def weight_of(self, name: str) -> float:
        """The weight of a metric."""
        return self.weight[name.removeprefix(self.prefix)] if isinstance(self.weight, Mapping) else self.weight

    async def judge(self, action: Action, row: Mapping[str, Any]) -> dict[str, float]:
        """Its rewards by metric."""
        given = {"action": action} if _takes_action(self.function) else {}
        try:
            found = self.function(action.text, copy.deepcopy(row), **self.options, **given)
            found = await found if inspect.isawaitable(found) else found
        except Exception as error:
            raise RewardFailed(f"{self.metric} raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Mapping):
            if isinstance(self.weight, Mapping):
                raise RewardFailed(f"{self.metric} returned one reward, its weights are for {', '.join(self.weight)}")
            return {self.metric: self._number(found, self.metric)}
        expected = self.weight if isinstance(self.weight, Mapping) else found
        if found.keys() != expected.keys() or not found or not all(isinstance(name, str) for name in found):
            wanted = f"its weights are for {', '.join(expected)}" if expected is not found else "expected names"
            raise RewardFailed(f"{self.metric} returned rewards for {list(found)!r}; {wanted}"[:SHOWN_CHARS])
        return {f"{self.prefix}{name}": self._number(value, f"{self.metric}: {name}") for name, value in found.items()}

    @staticmethod
    def _number(found: Any, name: str) -> float:
        try:
            number = found.item() if hasattr(found, "item") else found  # of NumPy or torch
            if isinstance(number, Real) and math.isfinite(number):
                return float(number)
        except (ValueError, TypeError, OverflowError, RuntimeError):  # several elements, or too large
            pass
        if inspect.iscoroutine(found):
            found.close()
        raise RewardFailed(f"{name} returned {found!r}"[:SHOWN_CHARS] + ", expected a finite number")


def _function(entry: Mapping[str, Any], file: str = "config") -> Callable[..., Any]:
    """The function of an entry; raises ConfigError."""
    name: str = entry["function"]
    found = resolve(name, file, key=entry["key"], built_in=BUILT_IN, expected=EXPECTED)
    if not callable(found) or inspect.isclass(found):
        kind = "class" if inspect.isclass(found) else type(found).__name__
        hint = "a class with reset and step is a tasks.environment" if inspect.isclass(found) else None
        raise ConfigError(file, entry["key"], "a function (completion, row)", f"{name!r}, which is a {kind}", hint)
    return found


def _takes_action(function: Callable[..., Any]) -> bool:
    return "action" in inspect.signature(function).parameters


# -------------------------------------------------------------------- prompts


def messages_of(prompt: str | Sequence[Mapping[str, str]] | None, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, content) of the prompt's messages for a row.

    A template is one user message. A place that is all of it may name a column of messages, as without `prompt` the
    column `prompt` may. Raises ValueError for a column that is missing, with the nearest, or has another form.
    """
    if prompt is not None and not isinstance(prompt, str):
        yield from ((message["role"], filled(message["content"], row)) for message in prompt)
        return
    place = _PLACE.fullmatch(f"{{{PROMPT_COLUMN}}}" if prompt is None else prompt)
    found = column_of(row, place[2]) if place and place[2] and _WORD.fullmatch(place[2]) else None
    if not isinstance(found, list):
        yield "user", text_of(row, PROMPT_COLUMN) if prompt is None else filled(prompt, row)
        return
    for message in found:
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in ("role", "content"))
        if role not in ROLES or not isinstance(content, str):
            expected = f'a list of {{"role": {"|".join(ROLES)}, "content": text}}'
            raise ValueError(f"expected {expected}, found {message!r}"[:SHOWN_CHARS])
        yield role, content


def filled(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's columns in the place of {column}; other braces stay. Raises as `text_of`."""

    def value(place: re.Match[str]) -> str:
        if place[1]:
            return f"{{{place[1]}}}"
        return text_of(row, place[2]) if place[2] in row or _WORD.fullmatch(place[2]) else place[0]

    return _PLACE.sub(value, template)
