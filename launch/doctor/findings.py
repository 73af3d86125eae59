"""The findings of `slipstream doctor`."""

from typing import Literal

import msgspec

Level = Literal["problem", "warning", "fine"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        check: its name, for example 'disk'.
        level: problem: the job will fail, or lose what it promises; warning: it may, or be slow; fine.
        what: the fact that was found.
        why: the reason why it matters; '' when it is fine.
        mend: the way to repair it; '' when it is fine.
    """

    check: str
    level: Level
    what: str
    why: str = ""
    mend: str = ""


def fine(check: str, what: str) -> Finding:
    """Nothing wrong here."""
    return Finding(check, "fine", what)


def warning(check: str, what: str, why: str, mend: str) -> Finding:
    """Something that may go wrong, or is slow."""
    return Finding(check, "warning", what, why, mend)


def problem(check: str, what: str, why: str, mend: str) -> Finding:
    """Something that will go wrong."""
    return Finding(check, "problem", what, why, mend)
