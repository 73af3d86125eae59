"""The findings of `slipstream doctor`."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

SHOWN = 4  # names in one finding
Level = Literal["problem", "warning", "fine"]
Case = tuple[bool, Level, str, str]  # whether it is so, how bad that is, why, and how to repair it


class Finding(msgspec.Struct, frozen=True):
    """One fact that was looked at, the reason why it matters, and the way to repair it."""

    level: Level  # problem: the job will fail, or lose what it promises; warning: it may, or be slow
    check: str  # for example 'disk'
    what: str
    why: str = ""  # '' when it is fine, as `fix`
    fix: str = ""


fine = partial(Finding, "fine")
warning = partial(Finding, "warning")
problem = partial(Finding, "problem")


def few(names: Sequence[object]) -> str:
    """The first names of one finding, and how many more there are."""
    more = [f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
    return ", ".join([*map(str, names[:SHOWN]), *more])


def judged(check: str, what: str, *cases: Case) -> Finding:
    """The fact with the first case that is so; fine without one."""
    return next((Finding(level, check, what, why, fix) for so, level, why, fix in cases if so), fine(check, what))
