"""The findings of `slipstream doctor`."""

from typing import Literal

import msgspec

Level = Literal["problem", "warning", "fine"]
Case = tuple[bool, Level, str, str]  # whether it is so, how bad that is, why, and how to repair it


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        check: its name, for example 'disk'.
        level: problem: the job will fail, or lose what it promises; warning: it may, or be slow; fine.
        what: the fact that was found.
        why: the reason why it matters; '' when it is fine.
        fix: the way to repair it; '' when it is fine.
    """

    check: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""


def judged(check: str, what: str, *cases: Case) -> Finding:
    """The fact with the first case that is so; fine without one."""
    return next((Finding(check, level, what, why, fix) for so, level, why, fix in cases if so), fine(check, what))


def fine(check: str, what: str) -> Finding:
    """Nothing wrong here."""
    return Finding(check, "fine", what)


def warning(check: str, what: str, why: str, fix: str) -> Finding:
    """Something that may go wrong, or is slow."""
    return Finding(check, "warning", what, why, fix)


def problem(check: str, what: str, why: str, fix: str) -> Finding:
    """Something that will go wrong."""
    return Finding(check, "problem", what, why, fix)
