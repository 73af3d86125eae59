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

from common.errors import ConfigError, meant
from common.import_path import check_arguments, load
from rollout_fleet.environments.protocol import Action, Chat, StepResult
from rollout_fleet.environments.reward_library import BUILT_IN, column_of, text_of, total_of

KEY = "tasks.reward"
EXPECTED = "a built-in reward or 'module:function'"
PROMPT_COLUMN = "prompt"
ROLES = ("system", "user", "assistant", "tool")
# Keys of a message that a chat template may show, and a Chat has no place for. Others, such as timestamps, are ignored,
# and so is the reasoning of earlier turns, which most templates leave out.
NO_PLACE = ("tool_calls", "tool_call_id", "function_call", "name")
SHOWN_CHARS = 200
_PLACE = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([^{}\n]+)\}")  # {{word}} stands for {word}
_WORD = re.compile(r"[A-Za-z_][\w.]*")


class RewardFailed(Exception):
    """A reward function raised, or returned something that is no reward; the message names it."""


class RewardFunction:
    """Single turn. Problem: a row with the columns that prompt and rewards name.

    Options: the keys of TasksConfig.
    """

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        reward: str | Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        prompt: str | Sequence[Mapping[str, str]] | None,
        chat_template_kwargs: Mapping[str, Any],
    ) -> None:
        self._row = problem
        self._prompt = Chat(tuple(messages_of(prompt, problem)), tuple(chat_template_kwargs.items()))
        self._rewards = list(_rewards(reward, options))

    async def reset(self) -> Chat:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """The weighted sum of the rewards, which are the metrics as they were returned; raises RewardFailed."""
        metrics: dict[str, float] = {}
        weighted: list[float] = []
        for reward in self._rewards:
            values, part = await reward.judge(action, self._row)
            if twice := metrics.keys() & values.keys():
                raise RewardFailed(f"two rewards are named {min(twice)!r}; give one of them a `name`")
            metrics |= values
            weighted.append(part)
        return StepResult(reward=total_of(weighted), metrics=metrics)

    @staticmethod
    def needs(reward: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any], file: str) -> tuple[str, ...]:
        """The libraries of the functions. Raises ConfigError for one that is not there or does not take its options."""
        libraries: list[str] = []
        for each in _rewards(reward, options, file):
            given = ("action",) if each.takes_action else ()
            key = "tasks.options" if isinstance(reward, str) else each.key.replace(".function", ".options")
            each.check_signature(file)
            check_arguments(each.function, each.options, ("completion", "row"), given, file=file, key=key)
            libraries += getattr(each.function, "NEEDS", ())
        return tuple(libraries)


def _rewards(
    reward: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any], file: str = "config"
) -> Iterator["_Reward"]:
    """The rewards of `tasks.reward`; raises ConfigError for what is no function."""
    alone = [{"function": reward, "weight": 1.0, "options": options, "name": None}]
    for number, entry in enumerate(alone if isinstance(reward, str) else reward):
        if entry["function"] is None:
            continue  # a scorer's; the node asks it
        key = KEY if isinstance(reward, str) else f"{KEY}[{number}].function"
        found = load(entry["function"], built_in=BUILT_IN, file=file, key=key, expected=EXPECTED)
        if not callable(found) or inspect.isclass(found):
            reason = f"{entry['function']!r}, which is a {type(found).__name__}"
            raise ConfigError(file, key, "a function (completion, row)", reason, "tasks.environment takes classes")
        shown = entry["function"].rpartition(":")[2]
        yield _Reward(found, entry["weight"], entry["options"], name=entry["name"], default=shown, key=key)


@dataclass(frozen=True)
class _Reward:
    function: Callable[..., Any]
    weight: float | Mapping[str, float]  # a mapping has the names that the function returns
    options: Mapping[str, Any]
    name: str | None
    default: str  # its name in the config
    key: str  # that names it in the config

    @property
    def takes_action(self) -> bool:
        return "action" in inspect.signature(self.function).parameters

    def check_signature(self, file: str) -> None:
        """Raise ConfigError for a function that cannot be called with one completion and its row, as TRL's and verl's.

        A function that needs more gets it as options; without any option it was written for other arguments.
        """
        signature = inspect.signature(self.function)
        more = [p for p in [*signature.parameters.values()][2:] if p.name != "action" and p.default is p.empty]
        needs = any(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in more) and not self.options
        try:
            signature.bind_partial("completion", "row")
            fits = not needs and "completions" not in signature.parameters
        except TypeError:
            fits = False
        if not fits and self.default not in BUILT_IN:
            hint = "columns are in `row`; docs/migrate.md translates functions of TRL and verl"
            raise ConfigError(file, self.key, "a function (completion, row)", f"{self.default}{signature}", hint)

    def check_second(self, row: Mapping[str, Any]) -> None:
        """Raise RewardFailed for a second parameter that is named like a column, as in TRL and verl: it gets the row.

        Compared with text, the row is never equal, so each answer would get 0 without an error.
        """
        inner = (column for column in row.values() if isinstance(column, Mapping))
        second = "".join([*inspect.signature(self.function).parameters][1:2])  # *arguments have none
        if second not in ("", "row") and any(second in columns for columns in (row, *inner)):
            name = self.name or self.default
            raise RewardFailed(f"{name} calls the row {second!r}, which is a column; take (completion, row)")

    async def judge(self, action: Action, row: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """(its rewards by metric, their weighted sum)."""
        self.check_second(row)
        alone = self.name or self.default
        given = {"action": action} if self.takes_action else {}
        try:
            found = self.function(action.text, copy.deepcopy(row), **self.options, **given)
            found = await found if inspect.isawaitable(found) else found
        except Exception as error:
            raise RewardFailed(f"{alone} raised {type(error).__name__}: {error}") from error
        values = found if isinstance(found, Mapping) else {"": found}
        weights = self.weight if isinstance(self.weight, Mapping) else dict.fromkeys(values, self.weight)
        if not values or values.keys() != weights.keys() or not all(isinstance(name, str) for name in values):
            expected = "a number, or numbers by name" if weights is not self.weight else f"numbers for {[*weights]}"
            raise RewardFailed(f"{alone} returned {found!r}"[:SHOWN_CHARS] + f", expected {expected}")
        numbers = {name: _number(value, f"{alone} {name}".rstrip()) for name, value in values.items()}
        metrics = {"/".join(filter(None, (self.name, key))) or alone: value for key, value in numbers.items()}
        return metrics, total_of([weights[name] * value for name, value in numbers.items()])


def _number(found: Any, name: str) -> float:
    """A number as a finite float; raises RewardFailed, naming the reward, for anything else."""
    try:
        number = found.item() if hasattr(found, "item") else found  # a number of NumPy or torch
        if isinstance(number, Real) and math.isfinite(number):
            return float(number)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # several elements, or too large
        pass
    if inspect.iscoroutine(found):
        found.close()
    raise RewardFailed(f"{name} returned {found!r}"[:SHOWN_CHARS] + ", expected a finite number")


# -------------------------------------------------------------------- prompts


def messages_of(prompt: str | Sequence[Mapping[str, str]] | None, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, content) of the prompt's messages for a row.

    A template is one user message. A place that is all of it may name a column of messages, as without `prompt` the
    column `prompt` may. Raises ValueError for a column that is missing, with the nearest, or has another form, and for
    messages with tool calls or names.
    """
    if prompt is not None and not isinstance(prompt, str):
        yield from ((message["role"], filled(message["content"], row)) for message in prompt)
        return
    place = _PLACE.fullmatch(f"{{{PROMPT_COLUMN}}}" if prompt is None else prompt)
    found = column_of(row, place[2]) if place and place[2] and _WORD.fullmatch(place[2]) else None
    if place is None or not isinstance(found, list):
        yield "user", text_of(row, PROMPT_COLUMN) if prompt is None else filled(prompt, row)
        return
    if not found:
        raise ValueError(f"the column {place[2]!r} has no message")
    role = None
    for message in found:
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in ("role", "content"))
        if role not in ROLES or not isinstance(content, str):
            expected = f'a list of {{"role": {"|".join(ROLES)}, "content": text}}'
            raise ValueError(f"expected {expected}, found {message!r}"[:SHOWN_CHARS])
        if lost := [key for key in NO_PLACE if message.get(key)]:
            raise ValueError(
                f"the policy would not read {lost[0]!r} of a message, found {message[lost[0]]!r}"[:SHOWN_CHARS]
            )
        yield role, content
    if role == "assistant":
        raise ValueError("the last message is the assistant's: the policy would read the answer that it is to give")


def filled(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's columns in the place of {column}; other braces stay. Raises as `text_of`."""

    def value(place: re.Match[str]) -> str:
        if place[1]:
            return f"{{{place[1]}}}"
        return text_of(row, place[2]) if _is_column(place, row) else place[0]

    return _PLACE.sub(value, template)


def check_filled(prompt: str | Sequence[Mapping[str, str]], row: Mapping[str, Any]) -> None:
    """Raise ValueError, with the nearest column, for a prompt without a place for one: all rows would have the same."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    if any(_is_column(place, row) for place in _PLACE.finditer(text)):
        return
    columns = [f"{{{column}}}" for column in row]
    braces = re.search(r"\{+[^{}\n]*\}+", text)
    hint = meant(braces[0] if braces else "", columns, f"the row has {', '.join(columns)}")
    raise ValueError(f"no column is filled in, and each row has the same prompt; {hint}")


def _is_column(place: re.Match[str], row: Mapping[str, Any]) -> bool:
    return not place[1] and (place[2] in row or _WORD.fullmatch(place[2]) is not None)
