"""A finding: what `plan`, `doctor`, `preflight` and `selftest` say of one thing, and how a terminal shows it."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.text import Text

from common.errors import EXIT_DONE, EXIT_FAILED, Problem
from common.process.logs import visible

SHOWN = 4  # names in one finding
Level = Literal["problem", "warning", "note", "fine", "skipped"]
SIGNS: dict[Level, tuple[str, str]] = {  # notes stand in the numbered lists of a plan
    "problem": ("✗", "red"),
    "warning": ("!", "yellow"),
    "fine": ("✓", "green"),
    "skipped": ("-", "yellow"),
}
ENVIRONMENT_KEYS = ("tasks.environment", "tasks.reward", "tasks.options", "tasks.limits.python")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that was looked at. `code` names what is wrong with it, for programs; the sentences are for people."""

    level: Level  # problem: the job will fail, or lose what it promises; warning: it may, or be slow; note: advice
    check: str  # for example 'disk'
    code: str = ""  # for example 'full'; '' when it is fine
    what: str
    why: str = ""  # '' when it is fine, as `fix`
    fix: str = ""


def fine(check: str, what: str) -> Finding:
    return Finding(level="fine", check=check, what=what)


def note(check: str, code: str, what: str) -> Finding:
    return Finding(level="note", check=check, code=code, what=what)


def warning(check: str, code: str, what: str, *, why: str, fix: str) -> Finding:
    return Finding(level="warning", check=check, code=code, what=what, why=why, fix=fix)


def problem(check: str, code: str, what: str, *, why: str, fix: str) -> Finding:
    return Finding(level="problem", check=check, code=code, what=what, why=why, fix=fix)


def refusal(wrong: Problem, file: str = "") -> Finding:
    """A value of a config that a launch refuses; its key is the code."""
    key = re.sub(r"^tasks\.sources\.[^.]+", "tasks", wrong.key)  # as of a job of one source
    of_environment = key.partition("[")[0] in ENVIRONMENT_KEYS
    fix = "install it where the rollout nodes run" if of_environment else f"set {wrong.key} in the config"
    return problem(
        "environment" if of_environment else "config",
        wrong.key,
        f"{file}: " * bool(file) + f"{wrong.key}: found {wrong.found}",
        why=f"expected {wrong.expected}",
        fix=wrong.hint or fix,
    )


def exit_code(findings: Iterable[Finding]) -> int:
    return EXIT_FAILED if any(finding.level == "problem" for finding in findings) else EXIT_DONE


def few(names: Sequence[object]) -> str:
    """The first names of one finding, and how many more there are."""
    more = [f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
    return ", ".join([*map(str, names[:SHOWN]), *more])


def show(findings: Sequence[Finding]) -> None:
    """Problems and warnings with reasons, the rest in a line each, and how many there are."""
    console = Console()
    for finding in findings:
        reasons = [] if finding.level == "fine" else [f"why:  {finding.why}", f"fix:  {finding.fix}"]
        show_line(console, finding.level, finding.check, finding.what, reasons)
    problems, warnings, good = (sum(f.level == level for f in findings) for level in ("problem", "warning", "fine"))
    counted = (f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((problems, "problem"), (warnings, "warning")))
    console.print(f"{', '.join(counted)}, {good} fine")


def show_line(console: Console, level: Level, name: str, text: str, details: Iterable[str] = ()) -> None:
    """One line with the sign of its level, and details below it."""
    sign, colour = SIGNS[level]
    console.print(Text.assemble((f"{sign} {name}: ", colour), visible(text)), soft_wrap=True)
    for line in details:
        console.print(f"    {visible(line)}", markup=False, highlight=False, soft_wrap=True)
