"""Errors that a person reads: what is wrong, where, and what to do."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HOPELESS = 3
EXITS_FOR_GOOD = (EXIT_USAGE, EXIT_HOPELESS)  # a supervisor does not restart a role after these


class SlipstreamError(Exception):
    """A run-time failure with a message for the operator; the command exits with code 1."""

    exit_code = EXIT_FAILED


class UsageError(SlipstreamError):
    """Bad usage or bad input; the command prints the message and exits with code 2."""

    exit_code = EXIT_USAGE


class HopelessError(SlipstreamError):
    """A failure that the same process, started again, would run into again; a role exits with code 3."""

    exit_code = EXIT_HOPELESS


class ConfigError(UsageError):
    """A config value that cannot be used.

    Attributes:
        file: the config file, or '<override>' for a command-line override.
        key: dotted path of the key, for example 'learner.parallel.tensor'.
        expected: values that would have been accepted.
        found: the value that was given.
        hint: the nearest valid name, or the next step to take.
        line: the key's line in the file; None when it is not known.
    """

    def __init__(
        self, file: str, key: str, expected: str, found: str, hint: str | None = None, line: int | None = None
    ) -> None:
        self.file, self.key, self.expected, self.found, self.hint, self.line = file, key, expected, found, hint, line
        where = file if line is None else f"{file}, line {line}"
        text = f"{where}: {key}: expected {expected}, found {found}"
        super().__init__(f"{text}; {hint}" if hint else text)


class BrokerError(SlipstreamError):
    """The broker refused a request; the message says why."""


class BrokerUnreachable(SlipstreamError):
    """No answer from the broker within the deadline."""
