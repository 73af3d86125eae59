r"""The built-in reward functions: (completion, row) -> float, with options by keyword; docs/rewards.md.

`column` names the row's column with the reference, also inside of a mapping: `reward_model.ground_truth`. A function
that names `action` gets the policy's turn (tokens, whether it ended) as well. Standard library only, as in an
environment; what a function needs besides is in its `NEEDS`.
"""

import difflib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_fleet.environments.builtin.math_problems import judge
from rollout_fleet.environments.isolation.sandbox import Killed, call_apart
from rollout_fleet.environments.protocol import Action

logger = logging.getLogger(__name__)

BUILT_IN = {
    name: f"{__name__}:{name}"
    for name in ("code", "exact_match", "json_schema", "length_penalty", "math_verify", "regex")
}
WALL_PER_CPU = 10  # code may wait, also for a core
MATH_S = 30.0  # for one comparison of expressions
MATH_MIB = 2048
MATH = ("math_verify",)
WORD_BYTES = 16
_FENCED = re.compile(r"```[\w+-]*\n(.*?)(?:```|$)", re.DOTALL)


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of `a.b` inside of the mapping `a`; raises ValueError with the nearest column."""
    found: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            near = difflib.get_close_matches(name, row, 1, 0.0)
            columns = f"the row has {', '.join(map(repr, row)) or 'none'}"
            nearest = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"there is no column {name!r}: {columns}{nearest}")
        found = found[part]
    return found


def text_of(row: Mapping[str, Any], name: str) -> str:
    """A column as text; raises ValueError where it is missing, null, a list or a mapping."""
    found = column_of(row, name)
    if not isinstance(found, str | int | float):
        raise ValueError(f"the column {name!r} is {type(found).__name__}, expected text or a number")
    return str(found)


def total_of(rewards: Sequence[float]) -> float:
    """The sum of rewards, rounded once: 0.7 + 0.2 + 0.1 is 1.0, which a running sum misses."""
    try:
        return math.fsum(rewards)
    except (OverflowError, ValueError):
        return sum(rewards)  # no finite number


def exact_match(completion: str, row: Mapping[str, Any], *, column: str = "answer", after: str = "") -> float:
    """1 when the completion equals the column, both without surrounding space.

    With `after` only the text behind its last occurrence counts on each side, as in GSM8K's `#### 42`.
    """

    def final(text: str) -> str:
        return (text.rpartition(after)[2] if after else text).strip()

    return float(final(completion) == final(text_of(row, column)))


async def math_verify(completion: str, row: Mapping[str, Any], *, column: str = "answer") -> float:
    """1 when the answer has the column's value by math-verify, however it is spelt; a row's `#### 42` is understood.

    It runs in a process of its own, because expressions exist on which a computer algebra system does not come back.
    An answer for which that process is ended gets 0. Raises ValueError for a column that math-verify does not read.
    """
    right = text_of(row, column).rpartition("####")[2].strip()
    if threading.current_thread() is threading.main_thread():  # the episode has a process, and its limits
        return float(judge(right, completion)[1])
    keywords = {"gold": right, "answer": completion}
    path = f"{judge.__module__}:judge"
    try:
        _, equal = await call_apart(path, keywords, seconds=MATH_S, memory_mib=MATH_MIB, preload=MATH)
    except Killed as error:
        logger.warning("math_verify gives 0 to an answer for %.100r: %s", right, error)
        return 0.0
    return float(equal)


def regex(completion: str, row: Mapping[str, Any], *, pattern: str, column: str = "") -> float:
    """1 when `pattern` is found in the completion; with `column`, when the last match is the column's text.

    The match is that of the pattern's first group, or all of it. Syntax: Python's `re`; (?s) lets a dot match newlines.
    """
    right = text_of(row, column).strip() if column else ""  # a wrong column fails before a launch, without a match too
    found = list(re.finditer(pattern, completion))
    if not found or not column:
        return float(bool(found))
    given = found[-1][1 if found[-1].re.groups else 0]
    return float((given or "").strip() == right)


def json_schema(completion: str, row: Mapping[str, Any], *, schema: str = "", column: str = "schema") -> float:
    """1 when the completion, or its last fenced block, is JSON that fits a JSON schema.

    `schema`: its JSON text; '' takes the row's column, which is such a text or the mapping itself.
    """
    from jsonschema.validators import validator_for

    found = json.loads(schema) if schema else column_of(row, column)
    rules = json.loads(found) if isinstance(found, str) else found
    kind = validator_for(rules)
    kind.check_schema(rules)
    try:
        return float(kind(rules).is_valid(json.loads(_block(completion), parse_constant=_refused)))
    except (ValueError, ArithmeticError, RecursionError):  # no JSON, or numbers and depths that jsonschema cannot take
        return 0.0


def _refused(constant: str) -> float:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


async def code(
    completion: str, row: Mapping[str, Any], *, column: str = "tests", seconds: float = 5.0, memory_mib: int = 512
) -> float:
    """Share of the column's tests that pass after the completion's last fenced block, or all of it, has run.

    A test is Python code that raises if something is wrong; the column has one text or a list of them. All of it runs
    in one process, without network where the kernel allows it; 0 when that process is ended. A program can change the
    interpreter that tests it, so a policy may learn to cheat. `seconds` limits CPU time. Ten times as much may pass, so
    that a busy machine changes no reward.
    """
    tests = column_of(row, column)
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"the column {column!r} must be Python code or a list of it, found {tests!r}"[:200])
    keywords = {"code": _block(completion), "tests": tests}
    try:
        return await call_apart(
            f"{__name__}:passed", keywords, seconds=WALL_PER_CPU * seconds, memory_mib=memory_mib, cpu_s=seconds
        )
    except Killed:
        return 0.0


def passed(code: str, tests: list[str]) -> float:
    """In the process: the share of `tests` that do not raise after `code`.

    Both run in a child without the node's socket, on which `code` could answer by itself. The child reports the number
    of passed tests by a random word that `code` is not given; without one it is 0.
    """
    words = [os.urandom(WORD_BYTES) for _ in range(len(tests) + 1)]
    reader, writer = os.pipe2(os.O_NONBLOCK)
    child = os.fork()
    if child == 0:
        try:
            _run(code, tests, words, writer)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    try:
        said = os.read(reader, WORD_BYTES)
    except BlockingIOError:  # it wrote none
        return 0.0
    return words.index(said) / len(tests) if said in words else 0.0


def _run(code: str, tests: list[str], words: list[bytes], writer: int) -> None:
    """In the child: run `code`, then `tests`, without output, and write the word for the number of passed tests."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.dup2(writer, 3, inheritable=False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    run, write, anything = exec, os.write, BaseException  # before `code` can replace them
    world = {"__name__": "__main__"}

    def runs(program: Any) -> bool:
        try:
            run(program, world)
        except anything:  # SystemExit too: tests behind it would not run
            return False
        return True

    compiled = [_compiled(test) for test in tests]
    number = 0
    if runs(_compiled(code)):
        for test in compiled:
            number += runs(test)
    write(3, words[number])


def _compiled(text: str) -> Any:
    """Its code; None, which `exec` refuses, where it is no Python."""
    try:
        return compile(text, "<code>", "exec")
    except Exception:
        return None


def length_penalty(
    completion: str, row: Mapping[str, Any], *, action: Action, max_tokens: int, buffer_tokens: int
) -> float:
    """From 0 to -1 as the answer grows from `max_tokens - buffer_tokens` to `max_tokens` sampled tokens."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be from 1 to max_tokens ({max_tokens}), found {buffer_tokens}")
    return soft_overlong(len(action.tokens), max_tokens, buffer_tokens)


def soft_overlong(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment, DAPO (arXiv 2503.14476), equation 13; lengths in tokens.

    0 up to max_tokens - buffer_tokens, then linear down to -1 at max_tokens.
    """
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - length) / buffer_tokens))


def _block(text: str) -> str:
    """The last fenced block of a completion, else all of it."""
    fenced = _FENCED.findall(text)
    return fenced[-1] if fenced else text


math_verify.NEEDS = MATH  # type: ignore[attr-defined]
json_schema.NEEDS = ("jsonschema",)  # type: ignore[attr-defined]
