"""Waiting for events in tests. A limit only ends a test that would otherwise wait for ever."""

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.json_lines import lines_of

LIMIT_S = 600.0  # far above what any wait needs on a slow machine with a busy neighbour


def until(
    condition: Callable[[], Any],
    what: str = "",
    limit_s: float = LIMIT_S,
    *,
    check: Callable[[], object] = lambda: None,
    told: Callable[[], str] = str,
    every_s: float = 0.01,
) -> Any:
    """The first true value of `condition`.

    `what` names the awaited event; the default is the source of `condition`. `check` raises when waiting has become
    pointless, for instance because a process has ended. `told` gives more text for the failure, for instance a log.

    Raises:
        AssertionError: the event did not come within `limit_s`.
    """
    end = time.monotonic() + limit_s
    while not (value := condition()):
        check()
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain for: {what or _source(condition)}\n{told()}"
        time.sleep(every_s)
    return value


async def until_async(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """As `until`, while the other tasks of this event loop run."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain for: {what or _source(condition)}"
        await asyncio.sleep(0.005)
    return value


def _source(condition: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)


class Clock:
    """Monotonic seconds that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, also while it is written; [] when there is none."""
    return list(lines_of(path.read_bytes(), dict[str, Any])) if path.exists() else []
