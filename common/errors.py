"""Errors that a person reads: what is wrong, where, and what to do."""

import difflib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HOPELESS = 3
EXITS_FOR_GOOD = (EXIT_USAGE, EXIT_HOPELESS)  # a supervisor does not restart a role after these
MOST_SHOWN = 100  # characters of a refused path


class SlipstreamError(Exception):
    """A run-time failure with a message for the operator; the command exits with code 1."""

    exit_code = EXIT_FAILED


class UsageError(SlipstreamError):
    """Bad usage or bad input; the command prints the message and exits with code 2."""

    exit_code = EXIT_USAGE


class HopelessError(SlipstreamError):
    """A failure that the same process, started again, would run into again; a role exits with code 3."""

    exit_code = EXIT_HOPELESS


@dataclass(frozen=True)
class Problem:
    """A config value that cannot be used."""

    key: str  # dotted path of the key, for example 'learner.parallel.tensor'
    expected: str  # values that would have been accepted
    found: str = ""  # the value that was given; '' stands for the key's value as it is
    hint: str | None = None  # the nearest valid name, or the next step to take
    kind: Literal["value", "missing"] = "value"  # missing: files that a person may still bring; the key may be right

    def __str__(self) -> str:
        text = f"{self.key}: expected {self.expected}, found {self.found}"
        return f"{text}; {self.hint}" if self.hint else text


class ConfigError(UsageError):
    """A problem in a config file, or in '<override>'; `line` is None when it is not known."""

    def __init__(
        self, file: str, key: str, expected: str, found: str, hint: str | None = None, line: int | None = None
    ) -> None:
        self.file = file
        self.key = key
        self.expected = expected
        self.found = found
        self.hint = hint
        self.line = line
        self.problem = Problem(key, expected, found, hint)
        where = file if line is None else f"{file}, line {line}"
        super().__init__(f"{where}: {self.problem}")

    @classmethod
    def of(cls, file: str, problem: Problem) -> "ConfigError":
        return cls(file, problem.key, problem.expected, problem.found, problem.hint)


@contextmanager
def of_source(name: str) -> Generator[None]:
    """A ConfigError about a key of `tasks` becomes one about that of the source `name`; '' is the only source."""
    try:
        yield
    except ConfigError as error:
        section, _, key = error.key.partition(".")
        if not name or section != "tasks":
            raise
        at = ".".join(filter(None, (f"tasks.sources.{name}", key)))
        raise ConfigError(error.file, at, error.expected, error.found, error.hint, error.line) from error


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely meant, or None when nothing is close."""
    by_lower = {c.lower(): c for c in choices}
    hits = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[hits[0]] if hits else None


def meant(word: str, choices: Iterable[str], otherwise: str) -> str:
    """The hint of an error about `word`: the nearest of the choices, or `otherwise` when nothing is close."""
    near = nearest(word, choices)
    return f"did you mean '{near}'?" if near else otherwise


class DiskFull(SlipstreamError):
    """A file cannot be written until there is room on its disk."""


class BrokerError(SlipstreamError):
    """The broker refused a request; the message says why."""


class StoreChanged(SlipstreamError):
    """The broker's store is another one, or lacks what the broker had told this learner; attach again."""


class BrokerUnreachable(SlipstreamError):
    """No answer from the broker within the deadline."""
